#!/bin/bash
# PPO for the 122B in one Slurm allocation: rollout (vLLM) and training (Megatron-Core) alternate as srun steps.
#
#   sbatch slurm/ppo_122b.sh run.dir=/scratch/me/ppo model.path=/models/Qwen3.5-122B-A10B train.actor.lr=2e-6
#   sbatch -N16 slurm/ppo_122b.sh layout=gpus128 ...          another size: the command line wins over this header
#
#SBATCH --job-name=t1-ppo-122b
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue

EXPERIMENT=ppo_122b

# From here on all scripts of this directory are the same.
# Before its time is over the job stops cleanly and queues itself again (cluster.slurm.max_requeues times at most); so
# does Slurm after a node failure, and the job itself on a node where `t1` can't be run, which it leaves out then. It
# goes on after the last finished step, as does the same command when it is submitted again. Before anything starts the
# allocation is compared with what the layout needs, and its nodes with each other. Slurm runs a copy of this file from
# its spool directory, so nothing beside it is read: `t1` comes from T1 (a path), from PATH, or from .venv in the
# directory the job was submitted from.

set -euo pipefail

elsewhere() {
    trap '' TERM
    local node=${SLURMD_NODENAME:-$(hostname)} job=${SLURM_JOB_ID:-0} shown task out
    shown=$(scontrol show job "$job" -o | sed -n "/^JobId=$job /p")
    task=$(sed -n '1s/.* ArrayJobId=\([0-9]*\) ArrayTaskId=\([0-9]*\) .*/\1_\2/p' <<<"$shown")
    job=${task:-$job} # the number of one task of an array stands for all of them
    echo "error: job $job can't begin on $node: $1" >&2
    out=$(sed -n '1s/.* ExcNodeList=\([^ ]*\).*/\1/p' <<<"$shown")
    if [[ $out == "(null)" ]]; then out=; fi
    if (($(scontrol show hostnames "$out" | wc -l) < 8)); then
        echo "  it is queued again, for other nodes" >&2
        scontrol update "JobId=$job" Requeue=1
        if scontrol requeue "$job"; then
            scontrol update "JobId=$job" "ExcNodeList=${out:+$out,}$node" || scontrol hold "$job"
        fi
    fi
    exit 127
}

cd "${SLURM_SUBMIT_DIR:-$PWD}"

if [[ -z "${T1:-}" ]]; then
    if command -v t1 >/dev/null; then
        T1=$(command -v t1)
    elif [[ -x .venv/bin/t1 ]]; then
        T1=$PWD/.venv/bin/t1
    else
        echo "error: t1 is not on PATH and there is no .venv/bin/t1 in $PWD" >&2
        echo "  remedy: pip install megatron-t1, or submit with T1=/path/to/t1 in the environment" >&2
        exit 2
    fi
fi

"$T1" --version >/dev/null || elsewhere "$T1 can't be run"
echo "job ${SLURM_JOB_ID:-none} on ${SLURM_JOB_NUM_NODES:-1} nodes: ${SLURM_JOB_NODELIST:-$(hostname)}"
# exec: Slurm's signal before the time limit reaches t1 itself, which ends the running phase and keeps what is finished.
exec "$T1" run "+experiment=$EXPERIMENT" cluster=slurm "$@"
