#!/usr/bin/env bash
# Makes .venv with everything that a run needs; with --extras also what one grader, tool or rule alone needs
# (requirements-extras.txt), with --dev what the tests need, extras included. Who had extras once keeps them.
# Every file that is installed must have a hash that the lock names.
#
# Done once; afterwards it only compares hashes and returns at once. Safe to interrupt, to repeat, and to start
# twice at a time. TREETUNE_DEVICE=cpu|nvidia overrides the look for a GPU; PYTHON names another interpreter;
# TREETUNE_FLASH_ATTN=1 builds flash-attn for this machine's GPUs, which only `attention: 'flash_attention_2'` needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=$ROOT/.venv
RECORD=$VENV/set-up            # hash per set of packages that is complete
LOG=$VENV/set-up/log
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
OLDEST_DRIVER=580              # for CUDA 13, which the pinned torch is built with

DEV= EXTRAS=
if [ -f "$RECORD/requirements-extras.txt" ]; then EXTRAS=1; fi
for option in "$@"; do
    case "$option" in
        --dev) DEV=1 EXTRAS=1 ;;
        --extras) EXTRAS=1 ;;
        *) echo "usage: scripts/setup.sh [--extras] [--dev]" >&2; exit 2 ;;
    esac
done

fail() { printf 'set-up: %s\n' "$@" >&2; exit 1; }
say() { printf 'set-up: %s\n' "$*" >&2; }

device() {  # what was asked for, else what the environment was made for, else what is here
    if [ -n "${TREETUNE_DEVICE:-}" ]; then echo "$TREETUNE_DEVICE"
    elif [ -f "$RECORD/device" ]; then cat "$RECORD/device"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo nvidia
    else echo cpu; fi
}

lock_of() { case "$1" in nvidia) echo requirements.txt ;; *) echo requirements-cpu.txt ;; esac; }

# The path belongs to it: console scripts hold it, so a moved checkout needs a new environment.
hash_of() { { echo "$ROOT"; cat "$1" pyproject.toml scripts/setup.sh; } | sha256sum | cut -d' ' -f1; }

complete() { [ -x "$VENV/bin/python" ] && [ "$(cat "$RECORD/$1" 2>/dev/null)" = "$(hash_of "$1")" ]; }

all_complete() {
    complete "$(lock_of "$DEVICE")" && { [ -z "$DEV" ] || complete requirements-dev.txt; } \
        && { [ -z "$EXTRAS" ] || complete requirements-extras.txt; } \
        && { [ -z "$FLASH" ] || complete requirements-flash-attn.txt; }
}

DEVICE=$(device)
case "$DEVICE" in cpu | nvidia) ;; *) fail "TREETUNE_DEVICE is '$DEVICE'; it can be cpu or nvidia" ;; esac
FLASH=
if [ "$DEVICE" = nvidia ] && [ "${TREETUNE_FLASH_ATTN:-0}" = 1 ]; then FLASH=1; fi
if [ "$DEVICE" = cpu ] && [ -z "${TREETUNE_DEVICE:-}" ] && [ -d "$RECORD" ] && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    say "note: .venv was made for the CPU, and here is a GPU: TREETUNE_DEVICE=nvidia ./scripts/setup.sh makes it anew"
fi
all_complete && exit 0

exec 9<"$ROOT"
if ! flock -n 9; then
    say "another set-up is at work in this checkout; waiting for it (at most 30 minutes)"
    flock -w 1800 9 || fail "the other set-up has not finished in 30 minutes: see $LOG"
    all_complete && exit 0
fi

# ---- what must be there before anything is downloaded: everything that is missing, at once
python_is_new_enough() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}
python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if python_is_new_enough "$candidate"; then python=$candidate; break; fi
done
missing=()
if [ -z "$python" ]; then
    missing+=("Python 3.11 to 3.14 is needed; found: $( (${PYTHON:-python3} --version 2>&1 || true) | head -n 1)." \
        "  apt-get install python3 python3-venv, or name one: PYTHON=/path/to/python3.12 $0")
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=("$python cannot make virtual environments: apt-get install python3-venv")
fi
if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    missing+=("A C++ compiler is needed (DeepSpeed compiles some operations when they are first used):" \
        "  apt-get install g++")
fi
if [ "$DEVICE" = cpu ] && [ -n "$python" ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    missing+=("libnuma.so.1 is needed (vLLM's CPU build loads it, and its server doesn't start without):" \
        "  apt-get install libnuma1")
fi
HEADERS=1
if ! "${python:-false}" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null; then HEADERS=; fi
if [ "$DEVICE" = nvidia ]; then
    if [ -z "$HEADERS" ] && [ -n "$python" ]; then
        missing+=("Python.h is needed (Triton compiles with it when a kernel is first used): apt-get install python3-dev")
    fi
    # Torch finds no GPU under an older driver, and everything would run on the CPU.
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    case "${driver%%.*}" in
        '' | *[!0-9]*) ;;  # an image is built where no GPU is
        *) if [ "${driver%%.*}" -lt "$OLDEST_DRIVER" ]; then
            missing+=("An NVIDIA driver of $OLDEST_DRIVER or newer is needed (CUDA 13); this machine's is $driver")
        fi ;;
    esac
    if [ -n "$FLASH" ] && ! command -v nvcc >/dev/null; then
        missing+=("TREETUNE_FLASH_ATTN=1 needs nvcc, the CUDA compiler, of the CUDA version that torch has")
    fi
elif [ -z "${TREETUNE_DEVICE:-}" ] && command -v nvidia-smi >/dev/null; then
    say "note: nvidia-smi is here and finds no GPU, so this is a set-up for the CPU; fix the driver and set" \
        "TREETUNE_DEVICE=nvidia for the other"
fi
case "$DEVICE" in nvidia) need_gib=25 ;; *) need_gib=6 ;; esac
free_gib=$(($(df -Pk "$ROOT" | awk 'NR == 2 {print $4}') / 1024 / 1024))
if [ ! -d "$RECORD" ] && [ "$free_gib" -lt "$need_gib" ]; then
    missing+=("About $need_gib GiB of disk are needed in $ROOT; $free_gib are free")
fi
[ ${#missing[@]} -eq 0 ] || fail "${missing[@]}"
if [ -z "$HEADERS" ]; then
    say "note: Python.h is missing; runs with two or more ranks on a CPU and the task reasoning_gym need it" \
        "(apt-get install python3-dev)"
fi

# ---- the environment; one that was left half made, or made elsewhere, is made anew (downloads are cached)
started=$SECONDS
if [ -d "$VENV" ] && { [ -e "$RECORD/at-work" ] || [ ! -x "$VENV/bin/python" ] \
    || [ "$(cat "$RECORD/root" 2>/dev/null)" != "$ROOT" ] || [ "$(cat "$RECORD/device" 2>/dev/null)" != "$DEVICE" ]; }; then
    say "the environment in .venv is incomplete or was made for another place: making it anew"
    rm -rf "$VENV"
fi
if [ ! -d "$VENV" ]; then
    mkdir -p "$RECORD" && : >"$RECORD/at-work"
    "$python" -m venv "$VENV" >>"$LOG" 2>&1 || fail "$python -m venv failed: see $LOG"
    echo "$ROOT" >"$RECORD/root"
    echo "$DEVICE" >"$RECORD/device"
fi

# Copies pip's lines to the log; a terminal shows the newest of them.
logged() {
    if [ -t 2 ]; then tee -a "$LOG" | awk '{ printf "\r\033[K%.78s", $0 } END { printf "\r\033[K" }' >&2
    else cat >>"$LOG"; fi
}

# Bytecode of tens of thousands of modules, most of them never imported, would double the time.
pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps --no-compile \
        "$@" 2>&1 | logged
}

# usage: entries 1|0 NAME|NAME... LOCK: the lines of these packages (1) or of all others (0)
entries() {
    awk -v wanted="$1" -v names="^($2)==" '/^[A-Za-z0-9]/ { is = ($0 ~ names) } /^[A-Za-z0-9 ]/ && is == wanted' "$3"
}

give_up() {
    grep -E '^(ERROR|error)|rror:' "$LOG" | tail -n 5 >&2 || true
    fail "$1 could not be installed; the whole log is $LOG. Run the same command again once that is fixed"
}

# usage: install_lock FILE; the hash goes in last, so an interrupted set-up is never taken for a whole one
install_lock() {
    local lock=$1 packages=$RECORD/packages.txt
    say "installing $(grep -c '^[^#]*==' "$lock") packages of $lock (once; about $2)"
    rm -f "$RECORD/$lock"
    : >"$RECORD/at-work"
    entries 1 'setuptools|wheel' "$lock" >"$packages"
    if [ -s "$packages" ]; then pip_install --require-hashes -r "$packages" || give_up setuptools; fi
    # Built without isolation: with the pinned setuptools, not with whatever is newest that day.
    entries 0 pycosat "$lock" >"$packages"
    if ! pip_install --no-build-isolation --require-hashes -r "$packages"; then
        if [ "$DEVICE" = cpu ] && tail -n 5 "$LOG" | grep -q 'torch==.*+cpu'; then
            say "pip does not find the CPU build of torch; asking PyTorch's own index"
            entries 1 torch "$lock" >"$packages"
            pip_install --index-url "$TORCH_CPU_INDEX" --require-hashes -r "$packages" || give_up torch
            entries 0 'torch|pycosat' "$lock" >"$packages"
            pip_install --no-build-isolation --require-hashes -r "$packages" || give_up "$lock"
        else
            give_up "$lock"
        fi
    fi
    entries 1 pycosat "$lock" >"$packages"
    if [ -s "$packages" ]; then
        if [ -n "$HEADERS" ]; then
            pip_install --no-build-isolation --require-hashes -r "$packages" || give_up pycosat
        else
            say "note: without Python.h pycosat is not built, which the task reasoning_gym can't do without"
        fi
    fi
    if [ "$lock" = "$(lock_of "$DEVICE")" ]; then
        pip_install --no-build-isolation -e . || give_up "the project itself"
    fi
    rm -f "$packages"
    hash_of "$lock" >"$RECORD/$lock.new"
    sync "$RECORD/$lock.new" && mv "$RECORD/$lock.new" "$RECORD/$lock"
    rm -f "$RECORD/at-work"
}

lock=$(lock_of "$DEVICE")
case "$DEVICE" in nvidia) time="ten minutes" ;; *) time="two minutes" ;; esac
complete "$lock" || install_lock "$lock" "$time"
[ -z "$EXTRAS" ] || complete requirements-extras.txt || install_lock requirements-extras.txt "ten seconds"
[ -z "$DEV" ] || complete requirements-dev.txt || install_lock requirements-dev.txt "ten seconds"
if [ -n "$FLASH" ] && ! complete requirements-flash-attn.txt; then
    # For what is here alone, 8.6 counting as 8.0: all four kinds take four times as long.
    kinds=$({ nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } | sed 's/\..*/0/' | sort -u)
    if [ -n "$kinds" ]; then export FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS:-${kinds//$'\n'/;}}; fi
    install_lock requirements-flash-attn.txt "up to hours on few cores; MAX_JOBS bounds how much runs at a time"
fi
say "ready after $((SECONDS - started)) s ($DEVICE, $("$VENV/bin/python" --version 2>&1))"
