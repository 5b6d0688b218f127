#!/usr/bin/env bash
# What submit.sh queues: CONFIGS [COMMAND...], by default training and then evaluation, on all nodes of the job.
# `treetune run` runs once on each node (srun starts it, so no ssh is needed) and starts a rank per GPU.
#
# Environment: MASTER_PORT (20000 and something, by the job's number); OMP_NUM_THREADS (the node's cores, shared among
# its ranks); RUN_IN (words before the launcher, such as "singularity exec --nv treetune.sif", in place of .venv);
# SOCKET_IFNAME (the network interface that nodes reach each other by, such as ib0, where they choose another one).
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
# Where Python may not keep what it compiled, every process compiles torch and vLLM anew: half of each start.
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
