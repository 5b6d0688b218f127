#!/usr/bin/env bash
# Packs the model and the wheels that a GPU machine without a network lacks, in pieces of a limited size.
#
#   ./scripts/gpu/pack.sh build/pack --what model wheels --limit 48M
#
# scripts/gpu/pack.py explains the options. PYTHON names an interpreter other than that of .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "pack.sh: $python is missing: run scripts/setup.sh, or set PYTHON" >&2
    exit 1
fi
exec "$python" "$root/scripts/gpu/pack.py" "$@"
