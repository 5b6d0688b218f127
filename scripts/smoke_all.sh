#!/usr/bin/env bash
# Every experiment of the paper for two small iterations on a CPU (configs/overlays/smoke.jsonnet), one after the other:
# a line each with its seconds, green only if all are.
#
#   ./scripts/smoke_all.sh                 all of them, about 20 minutes on two cores
#   ./scripts/smoke_all.sh vineppo_GSM8K   those whose name has that in it (an extended regular expression)
#
# Environment: SMOKE_DIRECTORY (default experiments/smoke) for what the runs write; logs are in its folder logs.
# SMOKE_TIMEOUT (seconds a run may take, default 900). PYTHON (default .venv's, or else python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -gt 1 ]; then echo "usage: scripts/smoke_all.sh [FILTER]" >&2; exit 2; fi
filter=${1:-}
place=${SMOKE_DIRECTORY:-experiments/smoke}
deadline=${SMOKE_TIMEOUT:-900}
python=${PYTHON:-}
if [ -z "$python" ]; then if [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; else python=python3; fi; fi
if ! command -v "$python" >/dev/null; then
    echo "smoke_all.sh: there is no $python: run ./scripts/setup.sh, or name one with PYTHON" >&2
    exit 2
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=
# Where Python may not keep what it compiled, every process compiles torch and vLLM anew: half of each start.
export PYTHONDONTWRITEBYTECODE=
unset APP_SEED APP_EXPERIMENT_NAME
export APP_DIRECTORY=$place
mkdir -p "$place/logs" || exit 1

# What a finished smoke run must have left: both iterations, and steps of the optimiser in each.
trained() {
    "$python" - "$1" <<'PYTHON'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
steps = [row.get("train/steps", 0) for row in rows]
sys.exit(0 if len(rows) == 2 and min(steps) >= 1 else f"two iterations with training were expected; steps: {steps}")
PYTHON
}

passed=0 failed=0 began=$SECONDS
for config in configs/polIter_*.jsonnet configs/sft_*.jsonnet; do
    name=$(basename "$config" .jsonnet)
    if [ -n "$filter" ] && ! grep -qE -- "$filter" <<<"$name"; then continue; fi
    run=$place/${name}_smoke
    log=$place/logs/$name.log
    rm -rf -- "$run"
    start=$SECONDS
    timeout --kill-after=30 "$deadline" "$python" src/treetune/main.py \
        --configs "$config,configs/overlays/smoke.jsonnet" run_iteration_loop </dev/null >"$log" 2>&1
    code=$?
    if [ $code -eq 0 ]; then trained "$run/metrics.jsonl" >>"$log" 2>&1; code=$?; fi
    if [ $code -eq 0 ]; then
        passed=$((passed + 1))
        printf 'ok      %-46s %4d s\n' "$name" $((SECONDS - start))
    else
        failed=$((failed + 1))
        printf 'FAILED  %-46s %4d s  exit code %d, see %s\n' "$name" $((SECONDS - start)) $code "$log"
        tail -n 3 "$log" | sed 's/^/        /'
    fi
done
if [ $((passed + failed)) -eq 0 ]; then echo "smoke_all.sh: no experiment's name has '$filter' in it" >&2; exit 2; fi
echo "$passed passed, $failed failed in $((SECONDS - began)) s; logs in $place/logs"
[ $failed -eq 0 ]
