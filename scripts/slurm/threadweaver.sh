#!/usr/bin/env bash
# Queues the parallel-thread experiments of configs/threadweaver on a SLURM cluster: supervised fine-tuning on one
# node, and, after its success, reinforcement learning from its model on four nodes (the published size).
#
#   ./scripts/slurm/threadweaver.sh parallel     answers with threads
#   ./scripts/slurm/threadweaver.sh sequential   their baseline
#
# Environment: STAGES (default "sft rl"); SFT_NODES (1) and NODES (4), the nodes of both stages; CONFIGS, further
# configuration files for both, separated by commas; and all variables of submit.sh. The same command resumes what was
# interrupted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
form=${1:-}
case "$form" in
    parallel | sequential) ;;
    *) echo "usage: scripts/slurm/threadweaver.sh parallel|sequential" >&2; exit 2 ;;
esac
stages=${STAGES:-sft rl}
for stage in $stages; do
    case "$stage" in
        sft | rl) ;;
        *) echo "threadweaver.sh: STAGES has '$stage'; there are sft and rl" >&2; exit 2 ;;
    esac
done
after=${DEPENDENCY:-}
for stage in $stages; do
    if [ "$stage" = sft ]; then name=sft_$form nodes=${SFT_NODES:-1}; else name=$form nodes=${NODES:-4}; fi
    job=$(NODES=$nodes DEPENDENCY=$after ./scripts/slurm/submit.sh "configs/threadweaver/$name.jsonnet${CONFIGS:+,$CONFIGS}")
    after=afterok:$job
done
echo "$job"
