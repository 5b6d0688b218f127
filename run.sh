#!/usr/bin/env bash
# Sets up, then runs.
#
#   ./run.sh                                   the quickstart: SFT from random weights, VinePPO from it, table, report
#   CONFIGSTR=a.jsonnet,b.jsonnet ./run.sh     trains and then evaluates that experiment
#
# Environment: APP_DIRECTORY (where experiments go), APP_SEED, WANDB_RUN_ID, with CONFIGSTR also
# APP_EXPERIMENT_NAME: each goes before what the configuration says. NUM_GPUS (ranks; default all GPUs, 1 on a
# CPU), CUDA_VISIBLE_DEVICES (the GPUs to use) and OMP_NUM_THREADS (default: the cores, shared among the ranks).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./scripts/setup.sh

export PATH="$PWD/.venv/bin:$PATH"
# Where Python may not keep what it compiled, every process compiles torch and vLLM anew: half of each start.
export PYTHONDONTWRITEBYTECODE=

# usage: look FOLDER: how to look into what was made; the last lines that are printed
look() {
    local command folder
    printf -v command %q "$PWD/.venv/bin/treetune"
    printf -v folder %q "$(realpath -m -- "$1")"
    echo "in a terminal: $command watch $folder"
    echo "in a browser:  $command view $folder   (prints its address)"
}

if [ -n "${CONFIGSTR:-}" ]; then
    treetune run --configs "$CONFIGSTR" run_iteration_loop
    treetune run --configs "$CONFIGSTR" run_evaluation
    folder=$(treetune print_config --configs "$CONFIGSTR" |
        python -c 'import json, sys; print(json.load(sys.stdin).get("directory", "experiments"))')
    look "$folder"
    exit 0
fi

if [ -n "${APP_EXPERIMENT_NAME:-}" ]; then
    echo "run.sh: the quickstart is two experiments with names of their own; APP_EXPERIMENT_NAME is for CONFIGSTR" >&2
    exit 2
fi
experiments=${APP_DIRECTORY:-experiments}/quickstart
treetune run --configs configs/quickstart/sft.jsonnet
treetune run --configs configs/quickstart/vineppo.jsonnet
treetune make_table --configs configs/tables/quickstart.jsonnet
report=$(treetune report "$experiments/sft" "$experiments/vineppo" | tail -n 1)
echo "report:        $(realpath -m -- "$report")"
look "$experiments"
