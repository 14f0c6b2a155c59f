"""From a run's configuration to the line that hands its job in: what `t1 slurm submit` asks of Slurm.

Three shapes: one allocation in which rollout and training alternate; a heterogeneous job, with nodes of its own kind
for each of the two; a chain of jobs (loop/chain.py), for partitions that can't be in one job.
"""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import train_nodes
from megatron_t1.loop.launcher import KINDS
from megatron_t1.loop.slurm import Allocation, Need, need

HET_GROUPS = {kind: group for group, kind in enumerate(KINDS)}
# What a batch script does on a node that lacks something it needs: the job is queued again and leaves the node out, as
# long as those that it leaves out are few. In slurm/*.sh as well, which nothing of this package can be read beside.
ELSEWHERE = r"""
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
"""
# Its arguments: the run directory, and the command. exec: Slurm's signal before the time limit reaches t1 itself. The
# log is opened here: a job whose log Slurm can't open doesn't get so far.
SCRIPT = (
    "#!/bin/bash\nset -uo pipefail\n"
    + ELSEWHERE
    + r"""
log=$1/slurm/${SLURM_JOB_NAME:-t1}-${SLURM_JOB_ID:-0}.log
if ! { : >>"$log"; } 2>/dev/null; then elsewhere "$1/slurm can't be written"; fi
exec >>"$log" 2>&1
"$2" -c 'import megatron_t1.cli' || elsewhere "$2 can't run megatron_t1"
shift
exec "$@"
"""
)


def _need(config: Config, kind: str) -> Need:
    """What the launcher will ask for in an allocation with training's nodes, with GPUs unless the backend is "cpu"."""
    on_gpus = config.cluster.backend != "cpu"
    return need(config, kind, Allocation(0, train_nodes(config), 0, gpus_per_node=int(on_gpus), node_list=""))


def resource_options(config: Config, kinds: Sequence[str] = KINDS) -> list[str]:
    """sbatch's options for an allocation in which phases of these kinds run, the cluster's own ones last: they win."""
    needs = [_need(config, kind) for kind in kinds]
    gpus = max(each.gpus_per_node for each in needs)
    options = [f"--nodes={max(each.nodes for each in needs)}", "--exclusive"]
    options += [f"--gpus-per-node={gpus}"] if gpus else []
    options += config.cluster.slurm.sbatch_args
    for kind in kinds:
        options += config.cluster.resources(kind).sbatch_args
    return options


def job_options(config: Config, name: str) -> list[str]:
    """sbatch's options that don't depend on what runs in the job."""
    slurm = config.cluster.slurm
    lead = int(slurm.stop_lead_s)
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "_", name)  # what Slurm shows of it is read again
    return [
        f"--job-name={plain or 't1'}", f"--time={slurm.time}", f"--signal=B:TERM@{lead}", "--open-mode=append",
        "--requeue",
        "--output=/dev/null",  # until the script has opened the log
    ]  # fmt: skip


def one_job(config: Config, name: str) -> list[str]:
    """Options of the one job in which everything runs."""
    return [*job_options(config, name), *resource_options(config)]


def heterogeneous_job(config: Config, name: str) -> list[str]:
    """Options of a job with a component for each kind; the batch script runs on the first node of rollout's."""
    options = job_options(config, name)
    return [*options, *resource_options(config, ["rollout"]), ":", *resource_options(config, ["train"])]


def heterogeneous_overrides() -> list[str]:
    """What the loop must be told about it."""
    return [f"cluster.{kind}.het_group={group}" for kind, group in HET_GROUPS.items()]


def t1_command(*words: str) -> list[str]:
    """This installation's `t1`, for the arguments of the batch script."""
    return [sys.executable, "-m", "megatron_t1.cli", *words]


def job_arguments(run_dir: str | Path, *words: str) -> list[str]:
    """Of the batch script, for this installation's `t1`."""
    return [str(Path(run_dir).resolve()), *t1_command(*words)]


def script_of(run_dir: str | Path) -> Path:
    return Path(run_dir).resolve() / "slurm" / "job.sh"


def write_script(run_dir: str | Path) -> Path:
    """The batch script; what it runs is given as its arguments, so no value becomes a part of a shell's text."""
    path = script_of(run_dir)
    atomic.write_text(path, SCRIPT)  # which another job may be handing in at this moment
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
