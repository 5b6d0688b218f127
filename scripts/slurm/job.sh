#!/usr/bin/env bash
# What submit.sh queues: CONFIGS [COMMAND...], by default training and then evaluation, on all nodes of the job.
# DeepSpeed's launcher runs once on each node (srun starts it, so no ssh is needed) and starts a rank per GPU.
#
# Environment: MASTER_PORT (20000 and something, by the job's number); OMP_NUM_THREADS (the node's cores, shared among
# its ranks); RUN_IN (words before the launcher, such as "singularity exec --nv treetune.sif", in place of .venv);
# SOCKET_IFNAME (the network interface that nodes reach each other by, such as ib0, where they choose another one).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is for sbatch: use scripts/slurm/submit.sh}"
configs=$1
shift
if [ $# -eq 0 ]; then set -- run_iteration_loop run_evaluation; fi

ranks=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
threads=$((${SLURM_CPUS_PER_TASK:-$(nproc)} / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
if [ -n "${SOCKET_IFNAME:-}" ]; then export GLOO_SOCKET_IFNAME=$SOCKET_IFNAME NCCL_SOCKET_IFNAME=$SOCKET_IFNAME; fi
# Where Python may not keep what it compiled, every process compiles torch and vLLM anew: half of each start.
export PYTHONDONTWRITEBYTECODE=
if [ -z "${RUN_IN:-}" ]; then
    export PATH="$PWD/.venv/bin:$PATH"
    if [ ! -x .venv/bin/deepspeed ]; then
        echo "job.sh: there is no $PWD/.venv: run TREETUNE_DEVICE=nvidia ./scripts/setup.sh, or name a container with RUN_IN" >&2
        exit 2
    fi
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
launch=(--quiet --no_local_rank --master_addr="${nodes[0]}" --master_port="$port")
if [ ${#nodes[@]} -gt 1 ]; then
    hostfile=$PWD/${TREETUNE_LOGS:-.}/hostfile-$SLURM_JOB_ID
    case ${TREETUNE_LOGS:-} in /*) hostfile=$TREETUNE_LOGS/hostfile-$SLURM_JOB_ID ;; esac
    printf "%s slots=$ranks\n" "${nodes[@]}" >"$hostfile"
    trap 'rm -f "$hostfile"' EXIT
    launch+=(--hostfile="$hostfile" --no_ssh)
elif [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then
    launch+=(--num_gpus="$ranks")
fi  # else those that SLURM gave to the job, which need not be the node's first

for command in "$@"; do
    # shellcheck disable=SC2016  # each node has a number of its own
    srun --nodes="${#nodes[@]}" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
        bash -c 'exec $RUN_IN deepspeed --node_rank="$SLURM_NODEID" "$@"' node \
        "${launch[@]}" src/treetune/main.py --configs "$configs" "$command"
    # DeepSpeed's command ends with 0 when a part of it was killed: a job that isn't finished says so.
    if [ "$command" = run_iteration_loop ]; then
        ${RUN_IN:-} python src/treetune/main.py --configs "$configs" check_finished
    fi
done
