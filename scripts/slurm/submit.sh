#!/usr/bin/env bash
# Queues an experiment on a SLURM cluster, on one node or several that share this checkout's file system.
#
#   ./scripts/slurm/submit.sh a.jsonnet,b.jsonnet                   trains and then evaluates that experiment
#   ./scripts/slurm/submit.sh a.jsonnet,b.jsonnet run_evaluation    these commands instead
#
# The same line again goes on with a run that was interrupted; it waits for a job of the experiment that is still
# queued or running. The number of the (last) job is what is printed on standard output.
#
# Environment: NODES (default 1); of each node GPUS_PER_NODE (8), CPUS_PER_NODE (96), MEMORY (1000G) and TIME
# (3-00:00:00); PARTITION, ACCOUNT, QOS; JOBS (1): so many jobs one after the other, each going on where time ended
# the one before; SIGNAL_SECONDS (300): so long before TIME ends, or before a preemption where the cluster does so, the
# run is asked to write a checkpoint at the end of its iteration and to end; DEPENDENCY (such as afterok:17); JOB_NAME (the experiment's, with its seed); LOGS
# (<directory>/logs); SBATCH_ARGUMENTS (further ones). What job.sh next to this reads, and APP_SEED, APP_DIRECTORY and
# APP_EXPERIMENT_NAME, go along. PYTHON (default .venv's) looks at the configuration before anything is queued.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ $# -eq 0 ]; then echo "usage: scripts/slurm/submit.sh CONFIGS [COMMAND...]" >&2; exit 2; fi
configs=$1
shift

refuse() { echo "submit.sh: $1" >&2; exit 2; }
whole() { # NAME VALUE
    case "$2" in '' | *[!0-9]* | 0*) refuse "$1 is '$2'; it must be a whole number above 0" ;; esac
}
NODES=${NODES:-1} GPUS_PER_NODE=${GPUS_PER_NODE:-8} CPUS_PER_NODE=${CPUS_PER_NODE:-96} JOBS=${JOBS:-1}
SIGNAL_SECONDS=${SIGNAL_SECONDS:-300}
for name in NODES GPUS_PER_NODE CPUS_PER_NODE JOBS SIGNAL_SECONDS; do whole $name "${!name}"; done
command -v sbatch >/dev/null || refuse "there is no sbatch here: this is for a SLURM cluster's login node"
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || refuse "there is no $python: run TREETUNE_DEVICE=nvidia ./scripts/setup.sh first"

# A mistake is told here and now, not after hours in the queue.
"$python" src/treetune/main.py check --config-only --configs "$configs" >&2
read -r experiment seed directory < <("$python" src/treetune/main.py --configs "$configs" print_config | "$python" -c '
import json, sys
config = json.load(sys.stdin)
print(config["experiment_name"], config.get("seed", 0), config.get("directory", "experiments"))')
logs=${LOGS:-$directory/logs}
mkdir -p "$logs"

options=(
    --parsable --export=ALL --requeue --open-mode=append
    # To all steps of the job, and so to each node's `treetune run`, which asks its ranks.
    --signal="USR1@$SIGNAL_SECONDS"
    --job-name="${JOB_NAME:-$experiment-$seed}"
    --output="$logs/slurm-%j.out"
    --nodes="$NODES" --ntasks-per-node=1
    --gpus-per-node="$GPUS_PER_NODE" --cpus-per-task="$CPUS_PER_NODE"
    --mem="${MEMORY:-1000G}" --time="${TIME:-3-00:00:00}"
    # One job of a name at a time: two would want the same directory.
    --dependency="singleton${DEPENDENCY:+,$DEPENDENCY}"
)
if [ "$NODES" -gt 1 ]; then options+=(--exclusive); fi  # ranks count a node's GPUs from 0
for name in PARTITION ACCOUNT QOS; do
    if [ -n "${!name:-}" ]; then options+=("--${name,,}=${!name}"); fi
done
# shellcheck disable=SC2206  # several words
options+=(${SBATCH_ARGUMENTS:-})

export TREETUNE_LOGS=$logs
for ((number = 1; number <= JOBS; number++)); do
    # sbatch that asks a busy controller again, looks for the job first, and prints its number alone.
    job=$("$python" src/treetune/cluster/submission.py "${options[@]}" scripts/slurm/job.sh "$configs" "$@")
    echo "queued job $job of $experiment: $NODES x $GPUS_PER_NODE GPUs, log $logs/slurm-$job.out" >&2
done
echo "$job"
