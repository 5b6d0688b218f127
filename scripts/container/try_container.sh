#!/usr/bin/env bash
# Builds an image by Dockerfile for the CPU, checks a paper's configuration in it, and runs the quickstart's first steps.
# No registry of images is needed: mmdebstrap makes the base image from the packages that this machine's apt finds. With
# DEVICE=nvidia, the CUDA packages are installed on that base, and nothing is trained.
#
#   sudo ./scripts/container/try_container.sh          needs: apt-get install buildah mmdebstrap (about 10 GB, 15 minutes)
#
# Environment:
#   FOLDER  a folder, whose subfolder treetune-container gets all files and is deleted at the end (default: a new folder
#           below TMPDIR, which is deleted itself)
#   KEEP=1  keeps the files. Images that are there are not built again
#   MOUNT   files and folders that pip reads while it installs, such as /etc/pip.conf and a folder of wheels, separated by
#           spaces. Each is a path, or PATH:PATH_IN_THE_IMAGE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

missing=()
for tool in buildah mmdebstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then echo "try_container.sh: apt-get install ${missing[*]}" >&2; exit 2; fi
if [ "$(id -u)" != 0 ]; then echo "try_container.sh: a root file system is made by root: sudo $0" >&2; exit 2; fi

if [ -z "${TREETUNE_INSIDE:-}" ]; then
    # Mounts and processes are in namespaces of their own, so that they end with this script.
    if [ -n "${FOLDER:-}" ]; then folder=$FOLDER/treetune-container; else folder=$(mktemp -d "${TMPDIR:-/tmp}/treetune-container-XXXXXX"); fi
    mkdir -p "$folder"
    inside=
    leave() {
        if [ -n "$inside" ]; then kill -KILL "$inside" 2>/dev/null || true; fi
        if [ -z "${KEEP:-}" ]; then rm -rf "$folder"; else echo "kept: $folder" >&2; fi
    }
    trap leave EXIT
    trap 'exit 130' INT TERM HUP
    TREETUNE_INSIDE=$folder unshare --mount --pid --fork --kill-child --mount-proc "$PWD/scripts/container/try_container.sh" &
    inside=$!
    code=0
    wait "$inside" || code=$?
    exit "$code"
fi

folder=$TREETUNE_INSIDE
export BUILDAH_ISOLATION=chroot
images=(buildah --storage-driver overlay --root "$folder/images" --runroot "$folder/run")
images() { "${images[@]}" "$@"; }

mounts=()
for mount in ${MOUNT:-}; do mounts+=(--volume "${mount%%:*}:${mount#*:}:ro"); done
step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }

is_built() { images inspect --type image "localhost/$1" >/dev/null 2>&1; }

step "a base image of $(. /etc/os-release && echo "$PRETTY_NAME")"
if ! is_built base; then
    mmdebstrap --quiet --variant=apt --include=ca-certificates "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder/base.tar"
    printf 'FROM scratch\nADD base.tar /\n' >"$folder/base.docker"
    images bud --quiet --pull-never --file "$folder/base.docker" --tag localhost/base "$folder"
fi

step "Dockerfile on it, for ${DEVICE:=cpu}"
if ! is_built treetune; then
    images bud --pull-never --network host --build-arg BASE=localhost/base --build-arg DEVICE="$DEVICE" \
        ${mounts[@]+"${mounts[@]}"} --ignorefile .dockerignore --file Dockerfile --tag localhost/treetune .
fi

container=$(images from --pull-never localhost/treetune)
# Runs a command in the container: as the image's own user, with a loopback as the only network.
inside() {
    # shellcheck disable=SC2016  # the inner shell's words
    unshare --net bash -c 'ip link set lo up && exec "$@"' inside "${images[@]}" run "$container" -- "$@"
}

step "who runs there, and with what"
inside bash -c 'id -un; ./scripts/setup.sh && .venv/bin/python --version; .venv/bin/python src/treetune/main.py doctor || true'

step "a paper's configuration, and its data in their volume"
paper=configs/polIter_rho1bSft2_vineppo_MATH.jsonnet
inside .venv/bin/python src/treetune/main.py check --config-only --configs "$paper"
inside bash -c 'command -v curl && for split in train test; do mkdir -p data/math; for i in $(seq 1100); do
    echo "{\"problem\": \"1 + $i?\", \"solution\": \"\\\\boxed{$((i + 1))}\", \"answer\": \"$((i + 1))\"}"; done >data/math/$split.jsonl; done'
if inside .venv/bin/python src/treetune/main.py check --config-only --configs "$paper" 2>&1 | grep "there is no file"; then exit 1; fi

if [ "$DEVICE" != cpu ]; then step "done"; exit 0; fi
step "the quickstart's first steps"
quick=configs/quickstart
inside bash -c ".venv/bin/python src/treetune/main.py check --config-only --configs $quick/vineppo.jsonnet"
echo '{ iterations: 2, problems_per_iteration: 64, checkpoints+: { every: 1 }, evaluation+: { sets: [{ split: "validation", samples: 1, problems: 20 }] },
        trainer+: { schedule+: { may_outlast_training: true } } }' >"$folder/short.jsonnet"
images copy --chown researcher "$container" "$folder/short.jsonnet" /treetune/short.jsonnet
for name in sft vineppo; do inside env OMP_NUM_THREADS=1 CONFIGSTR="$quick/$name.jsonnet,short.jsonnet" ./run.sh; done
step "done"
