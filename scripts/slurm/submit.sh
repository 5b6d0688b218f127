#!/usr/bin/env bash
# Queues an experiment on a SLURM cluster, on one node or several that share this checkout's file system.
#
#   ./scripts/slurm/submit.sh a.jsonnet,b.jsonnet                   trains and then evaluates that experiment
#   ./scripts/slurm/submit.sh a.jsonnet,b.jsonnet run_evaluation    these commands instead
#
# The same command resumes a run that was interrupted, and waits for a job of the experiment that is still queued or
# running. It prints the number of the (last) job.
#
# Environment, with defaults from src/treetune/cluster/slurm.py:
#   NODES             1
#   GPUS_PER_NODE     8
#   CPUS_PER_NODE     96
#   MEMORY            1000G, of each node
#   TIME              3-00:00:00
#   PARTITION, ACCOUNT, QOS
#   JOBS              1; with more, the jobs run one after the other, and each resumes where time ended the one before
#   SIGNAL_SECONDS    300; so long before TIME ends (or before a preemption, if the cluster announces it), the run is
#                     asked to write a checkpoint at the end of its iteration and to end
#   DEPENDENCY        such as afterok:17
#   JOB_NAME          the experiment's name and seed
#   LOGS              <directory>/logs
#   SBATCH_ARGUMENTS  further arguments of sbatch
#   PYTHON            that of .venv; it checks the configuration before anything is queued
# The job also gets the variables that job.sh reads, and APP_SEED, APP_DIRECTORY and APP_EXPERIMENT_NAME.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ $# -eq 0 ]; then echo "usage: scripts/slurm/submit.sh CONFIGS [COMMAND...]" >&2; exit 2; fi
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || {
    echo "submit.sh: there is no $python: run TREETUNE_DEVICE=nvidia ./scripts/setup.sh first" >&2
    exit 2
}
exec "$python" src/treetune/cluster/slurm.py experiment "$@"
