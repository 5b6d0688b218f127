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

# GPUs that were handed out (by a scheduler, by whoever shares the machine) are the ones that are used.
visible=()
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"; fi
if [ -z "${NUM_GPUS:-}" ]; then
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then NUM_GPUS=${#visible[@]}
    else NUM_GPUS=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true); fi
    # DeepSpeed warns three times where it has to find out itself that there is no accelerator.
    if [ "$NUM_GPUS" -eq 0 ]; then NUM_GPUS=1 && export DS_ACCELERATOR=cpu; fi
fi
case "$NUM_GPUS" in '' | *[!0-9]* | 0) echo "run.sh: NUM_GPUS is '$NUM_GPUS'; it must be a whole number above 0" >&2; exit 2 ;; esac
if [ ${#visible[@]} -gt 0 ] && [ "$NUM_GPUS" -gt ${#visible[@]} ]; then
    echo "run.sh: NUM_GPUS is $NUM_GPUS, and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES are ${#visible[@]}" >&2; exit 2
fi
# DeepSpeed would take the first of the machine with --num_gpus, whatever CUDA_VISIBLE_DEVICES says.
ranks=(--num_gpus="$NUM_GPUS")
if [ ${#visible[@]} -gt 0 ]; then ranks=(--include="localhost:$(IFS=,; echo "${visible[*]:0:NUM_GPUS}")"); fi
# Two ranks that each take all cores run many times slower than two that share them.
threads=$(($(env -u OMP_NUM_THREADS nproc) / NUM_GPUS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# usage: treetune CONFIGS COMMAND; each launch on a port that was free a moment ago, so runs can share a machine
treetune() {
    local port
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    deepspeed --quiet --no_local_rank "${ranks[@]}" --master_port="$port" \
        src/treetune/main.py --configs "$1" "$2"
    # It ends with 0 when a part of it was killed: whether the run is finished is seen from the run.
    if [ "$2" = run_iteration_loop ]; then python src/treetune/main.py --configs "$1" check_finished; fi
}

# usage: look FOLDER: how to look into what was made; the last lines that are printed
look() {
    local command folder
    printf -v command %q "$PWD/.venv/bin/treetune"
    printf -v folder %q "$(realpath -m -- "$1")"
    echo "in a terminal: $command watch $folder"
    echo "in a browser:  $command view $folder   (prints its address)"
}

if [ -n "${CONFIGSTR:-}" ]; then
    treetune "$CONFIGSTR" run_iteration_loop
    treetune "$CONFIGSTR" run_evaluation
    folder=$(python src/treetune/main.py --configs "$CONFIGSTR" print_config |
        python -c 'import json, sys; print(json.load(sys.stdin).get("directory", "experiments"))')
    look "$folder"
    exit 0
fi

if [ -n "${APP_EXPERIMENT_NAME:-}" ]; then
    echo "run.sh: the quickstart is two experiments with names of their own; APP_EXPERIMENT_NAME is for CONFIGSTR" >&2
    exit 2
fi
experiments=${APP_DIRECTORY:-experiments}/quickstart
treetune configs/quickstart/sft.jsonnet run_iteration_loop
treetune configs/quickstart/vineppo.jsonnet run_iteration_loop
python src/treetune/main.py --configs configs/tables/quickstart.jsonnet make_table
report=$(python src/treetune/main.py report "$experiments/sft" "$experiments/vineppo" | tail -n 1)
echo "report:        $(realpath -m -- "$report")"
look "$experiments"
