#!/usr/bin/env bash
# Runs commands for CONFIGS on all nodes of a job: CONFIGS [COMMAND...], by default training and then evaluation.
# submit.sh queues this script. srun starts `treetune run` once on each node, without ssh, and that starts a rank per GPU.
#
# Environment, with defaults:
#   MASTER_PORT      20000 plus the last digits of the job's number
#   OMP_NUM_THREADS  the node's cores, shared among its ranks
#   RUN_IN           a command before the launcher, such as "singularity exec --nv treetune.sif", in place of .venv
#   SOCKET_IFNAME    the network interface by which nodes reach each other, such as ib0, if they choose another one
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is for sbatch: use scripts/slurm/submit.sh}"
configs=$1
shift
if [ $# -eq 0 ]; then set -- run_iteration_loop run_evaluation; fi

ranks=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?set GPUS_PER_NODE, or submit with --gpus-per-node}}
port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
threads=$((${SLURM_CPUS_PER_TASK:-$(nproc)} / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
if [ -n "${SOCKET_IFNAME:-}" ]; then export GLOO_SOCKET_IFNAME=$SOCKET_IFNAME NCCL_SOCKET_IFNAME=$SOCKET_IFNAME; fi
# If Python may not write bytecode, every process compiles torch and vLLM anew, which takes half of each start.
export PYTHONDONTWRITEBYTECODE=
if [ -z "${RUN_IN:-}" ]; then
    export PATH="$PWD/.venv/bin:$PATH"
    if [ ! -x .venv/bin/treetune ]; then
        echo "job.sh: there is no $PWD/.venv: run TREETUNE_DEVICE=nvidia ./scripts/setup.sh, or name a container with RUN_IN" >&2
        exit 2
    fi
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
launch=(--nodes "$(IFS=,; echo "${nodes[*]}")" --master_port "$port" --num_gpus "$ranks")
for command in "$@"; do
    # shellcheck disable=SC2016  # each node has a number of its own
    srun --nodes="${#nodes[@]}" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
        bash -c 'exec $RUN_IN treetune run --node_rank "$SLURM_NODEID" "$@"' node \
        "${launch[@]}" --configs "$configs" "$command"
done
