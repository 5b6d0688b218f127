#!/usr/bin/env bash
# Packs what a machine with a GPU and without a network is missing into pieces of a limited size.
#
#   ./scripts/gpu/pack.sh build/pack --what model wheels --limit 48M
#
# scripts/gpu/pack.py explains the options; it runs in .venv, which scripts/setup.sh makes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
exec "${PYTHON:-$root/.venv/bin/python}" "$root/scripts/gpu/pack.py" "$@"
