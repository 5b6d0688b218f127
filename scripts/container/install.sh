#!/usr/bin/env bash
# All that an image has beside its base image. Dockerfile and singularity.def call this, step by step, and
# try_container.sh next to it builds and runs the first on a base image that is made on the spot.
#
#   install.sh system      the system's packages (Debian, Ubuntu); as root
#   install.sh packages [--extras]
#                          .venv for TREETUNE_DEVICE, named since no GPU is there while an image is built
#   install.sh compile     byte code of .venv and src: set-up leaves it out, and without it each container, or each
#                          process where the image is read-only, would compile torch and vLLM anew
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

case "${1:-}" in
    system)
        export DEBIAN_FRONTEND=noninteractive
        apt-get update
        apt-get install -y --no-install-recommends \
            bubblewrap ca-certificates curl g++ git libnuma1 ninja-build python3 python3-dev python3-venv
        rm -rf /var/lib/apt/lists/*
        ;;
    packages)
        : "${TREETUNE_DEVICE:?install.sh packages: set TREETUNE_DEVICE to nvidia or cpu}"
        PIP_NO_CACHE_DIR=1 ./scripts/setup.sh "${@:2}"
        ;;
    compile)
        # Of what doesn't compile (templates, code for later versions of Python) nothing is ever imported.
        .venv/bin/python -m compileall -q -j 0 .venv src >/dev/null || true
        ;;
    *) echo "usage: scripts/container/install.sh system|packages|compile" >&2; exit 2 ;;
esac
