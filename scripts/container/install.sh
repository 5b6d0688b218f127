#!/usr/bin/env bash
# Installs what an image has besides its base image. Dockerfile and singularity.def call it, step by step.
# try_container.sh builds an image by Dockerfile, and runs it.
#
#   install.sh system               the system's packages (Debian, Ubuntu); as root
#   install.sh packages [--extras]  .venv for TREETUNE_DEVICE, which has to be named: there is no GPU to find while an
#                                   image is built
#   install.sh compile              bytecode of .venv and src. Without it, each container compiles torch and vLLM anew;
#                                   if the image is read-only, each process does
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
        # Files that don't compile (templates, code for later versions of Python) are never imported.
        .venv/bin/python -m compileall -q -j 0 .venv src >/dev/null || true
        ;;
    *) echo "usage: scripts/container/install.sh system|packages|compile" >&2; exit 2 ;;
esac
