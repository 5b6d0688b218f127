#!/usr/bin/env bash
# Sets up, then runs the whole suite; ruff, mypy, the import arrows and the other style checks are tests/style.
# Arguments go to pytest: ./scripts/test.sh tests/config -k unknown
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh --dev
# Three workers with one thread each, since tests also wait: what starts servers runs in one of them, all else
# in the others (`-n 0`: no workers). Left alone, every process would start as many threads as there are cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PATH="$PWD/.venv/bin:$PATH"
# Where Python may not keep what it compiled, every process compiles torch and vLLM anew: half of each start.
export PYTHONDONTWRITEBYTECODE=
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
