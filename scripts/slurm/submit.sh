#!/usr/bin/env bash
# Queues an experiment on a SLURM cluster, on one node or several that share this checkout's file system.
#
#   ./scripts/slurm/submit.sh a.jsonnet,b.jsonnet                   trains and then evaluates that experiment
#   ./scripts/slurm/submit.sh a.jsonnet,b.jsonnet run_evaluation    these commands instead
#
# The same line again resumes a run that was interrupted; it waits for a job of the experiment that is still queued or
# running. The number of the (last) job is what is printed on standard output.
#
# Environment, with defaults from src/treetune/cluster/slurm.py: NODES (1); of each node GPUS_PER_NODE (8), CPUS_PER_NODE
# (96), MEMORY (1000G) and TIME (3-00:00:00); PARTITION, ACCOUNT, QOS; JOBS (1): so many jobs one after the other, each
# resuming where time ended the one before; SIGNAL_SECONDS (300): so long before TIME ends, or before a preemption where
# the cluster does so, the run is asked to write a checkpoint at the end of its iteration and to end; DEPENDENCY (such as
# afterok:17); JOB_NAME (the experiment's, with its seed); LOGS (<directory>/logs); SBATCH_ARGUMENTS (further ones). The
# variables that job.sh next to this reads, and APP_SEED, APP_DIRECTORY and APP_EXPERIMENT_NAME, are passed to the job.
# PYTHON (default .venv's) checks the configuration before anything is queued.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ $# -eq 0 ]; then echo "usage: scripts/slurm/submit.sh CONFIGS [COMMAND...]" >&2; exit 2; fi
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || {
    echo "submit.sh: there is no $python: run TREETUNE_DEVICE=nvidia ./scripts/setup.sh first" >&2
    exit 2
}
exec "$python" src/treetune/cluster/slurm.py experiment "$@"
