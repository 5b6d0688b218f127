#!/usr/bin/env bash
# Tests as much of the support of NVIDIA GPUs as a machine without a GPU can: installs all CUDA packages into a copy of
# this checkout, imports them, configures servers for them, and compiles kernels. The checkout and its .venv stay as they
# are.
#
#   ./scripts/gpu/without_one.sh      about 12 GB below TMPDIR, ten minutes; ends with 1 if a step failed
#
# Environment:
#   FOLDER    a folder, whose subfolder treetune-without-a-gpu gets the copy (default: a new folder below TMPDIR)
#   KEEP=1    keeps the copy. Its environment is used again
#   CPU_VENV  an environment with vLLM's CPU build, whose sources are compared (default: .venv, if it has that build)
#   MOUNT     see scripts/container/try_container.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=$PWD
CPU_VENV=${CPU_VENV:-$ROOT/.venv}
folder=${FOLDER:-$(mktemp -d "${TMPDIR:-/tmp}/treetune-XXXXXX")}/treetune-without-a-gpu
copy=$folder/checkout python=$folder/checkout/.venv/bin/python
mkdir -p "$copy" "$folder/stub" "$folder/logs"
trap '[ -n "${KEEP:-}" ] || rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM HUP

results=() failed=0
# usage: step NAME SECONDS COMMAND…
# The output of the command goes to a log, and its last line is the result of the step.
step() {
    local name=$1 limit=$2 begun=$SECONDS log code=0 last_line
    shift 2
    log=$folder/logs/${name// /-}
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 || code=$?
    last_line=$(tail -n 1 "$log" | cut -c1-150)
    case "$code" in 0) mark=ok ;; 77) mark=skipped ;; *) mark=FAILED failed=1; tail -n 20 "$log" >&2 ;; esac
    results+=("$(printf '%-8s %5s s  %-28s %s' "$mark" $((SECONDS - begun)) "$name" "$last_line")")
    printf '%s\n' "${results[-1]}"
}

free_gib=$(($(df -Pk "$folder" | awk 'NR == 2 {print $4}') / 1024 / 1024))
if [ "$free_gib" -lt 25 ] && [ ! -x "$python" ]; then
    echo "without_one.sh: $folder has $free_gib GiB free, and 25 are needed: name another FOLDER" >&2
    exit 2
fi

copy_checkout() {
    find "$copy" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
    git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C "$copy" && git rev-parse --short HEAD
}

install() { cd "$copy" && TREETUNE_DEVICE=nvidia ./scripts/setup.sh --dev && du -sh .venv; }

is_for_cuda() {
    "$python" - <<'PYTHON'
import torch
kinds = torch._C._cuda_getArchFlags()
assert torch.version.cuda and "sm_90" in kinds.split(), (torch.version.cuda, kinds)
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {kinds}")
PYTHON
}

# Makes a stand-in for the driver's library, which is missing: it has the functions that vLLM's extensions need, and none
# does anything.
make_stub() {
    find "$copy"/.venv/lib/python*/site-packages/vllm -name '*.so' -print0 |
        xargs -0 -n 1 nm -D --undefined-only 2>/dev/null | awk '$2 ~ /^cu[A-Z]/ {print $2}' | sort -u >"$folder/stub/names"
    sed 's/@.*//; s/.*/int &(void) { return 100; }/' "$folder/stub/names" | sort -u >"$folder/stub/stub.c"
    cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$folder/stub/libcuda.so.1" "$folder/stub/stub.c"
    echo "$(wc -l <"$folder/stub/names") functions of libcuda.so.1"
}

imports() {
    LD_LIBRARY_PATH=$folder/stub "$python" - <<'PYTHON'
import importlib

names = """torch triton transformers deepspeed peft liger_kernel vllm._C_stable_libtorch vllm._moe_C_stable_libtorch
vllm.cumem_allocator vllm.vllm_flash_attn._vllm_fa2_C vllm.vllm_flash_attn._vllm_fa3_C flashinfer
vllm.vllm_flash_attn.flash_attn_interface vllm.device_allocator.cumem vllm.v1.worker.gpu.model_runner
vllm.v1.worker.gpu_worker vllm.distributed.weight_transfer.ipc_engine vllm.distributed.weight_transfer.nccl_engine
treetune.parts treetune.engine.cuda_transfers""".split()
import torch  # noqa: E402,F401  (its libraries are what the others are linked with)

failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
for name, error in failed.items():
    print(name, error)
assert not failed
print(f"{len(names)} modules")
PYTHON
}

sources() {
    if ! "$CPU_VENV/bin/python" -c 'import torch, vllm; assert torch.version.cuda is None' 2>/dev/null; then
        echo "no vLLM for CPUs in $CPU_VENV to compare with"; return 77
    fi
    local here there differing
    here=$(cd "$CPU_VENV"/lib/python*/site-packages/vllm && pwd) there=$(cd "$copy"/.venv/lib/python*/site-packages/vllm && pwd)
    differing=$(diff -rq --exclude='*.pyc' --exclude='*.so' "$here" "$there" | grep '^Files .*\.py differ' | sed "s|Files $here/||; s| and .*||" | sort)
    echo "$differing"
    [ "$differing" = "$(printf '%s\n' _version.py platforms/__init__.py utils/cpu_triton_utils.py | sort)" ] || return 1
    echo "all of vLLM's Python files but $(wc -l <<<"$differing") are those of the CPU build"
}

configured() {
    cd "$copy" && LD_LIBRARY_PATH=$folder/stub "$python" -m pytest -q tests/engine/test_h100_configurations.py \
        tests/engine/test_cuda_transfers.py tests/models/test_gpu_branches_on_the_meta_device.py
}

compiled() { cd "$copy" && "$python" tests/gpu/compiled_for_an_h100.py; }

images() {
    if ! command -v buildah >/dev/null || ! command -v mmdebstrap >/dev/null || [ "$(id -u)" != 0 ]; then
        echo "needs root, buildah and mmdebstrap"; return 77
    fi
    DEVICE=nvidia FOLDER=$folder ./scripts/container/try_container.sh
}

export -f copy_checkout install is_for_cuda make_stub imports sources configured compiled images
export ROOT CPU_VENV folder copy python PYTHONDONTWRITEBYTECODE=
step "copy of the checkout" 60 bash -c copy_checkout
step "set-up for NVIDIA" 1800 bash -c install
step "torch for CUDA and sm_90" 120 bash -c is_for_cuda
step "stub of the driver" 120 bash -c make_stub
step "imports" 600 bash -c imports
step "sources of vLLM" 120 bash -c sources
step "configuration on an H100" 900 bash -c configured
step "compiled for sm_90" 900 bash -c compiled
step "image with its data" 3600 bash -c images
printf '\n%s\n' "$(date +%F), $(nproc --all) cores, $(git rev-parse --short HEAD)"
printf '%s\n' "${results[@]}"
exit "$failed"
