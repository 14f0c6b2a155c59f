"""Where phases run: interpreters, containers, nodes, Slurm jobs (`cluster.*`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
UNLIMITED = ("UNLIMITED", "INFINITE", "-1")
SIGNAL_EARLY_S = 60  # that Slurm's signal before the time limit may come early (sbatch --signal)


def slurm_seconds(text: str) -> float | None:
    """Seconds of a time as Slurm writes it (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S); None: it is no time."""
    if text.upper() in UNLIMITED:
        return float("inf")
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:
        return 86400 * int(found["days"]) + 3600 * first + 60 * second + third
    return 3600 * first + 60 * second + third if found["third"] is not None else 60 * first + second


@dataclass
class ResourcesConfig:
    """Where phases of one kind run. Two kinds exist, rollout and train: they may have different Python environments."""

    python: str = ""  # interpreter; empty: the one that runs the loop
    container: str = ""  # image that phases run in, as container_runtime takes it; empty: none
    container_runtime: str = "pyxis"  # pyxis (srun --container-image) | apptainer
    container_args: list[str] = field(default_factory=list)  # of `srun` (pyxis) or `apptainer exec`, e.g. mounts
    setup: list[str] = field(default_factory=list)  # shell lines of the user's own, e.g. "module load cuda"
    env: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    processes_per_node: int = 2
    gpus_per_node: int = 0
    threads: int = 1  # OMP_NUM_THREADS of each process
    srun_args: list[str] = field(default_factory=list)
    sbatch_args: list[str] = field(default_factory=list)  # of jobs for this kind, e.g. a partition (`t1 slurm submit`)
    het_group: int = -1  # component of a heterogeneous job that phases of this kind run in; -1: the whole job


@dataclass
class SlurmConfig:
    """Jobs of a run: what `t1 slurm submit` asks for, and what a job does when its time is over."""

    sbatch_args: list[str] = field(default_factory=list)  # of every job, e.g. "--account=lab"
    time: str = "48:00:00"
    stop_lead_s: float = 300.0  # before the time limit the loop is told to stop: longer than a phase's stop_grace_s
    requeue_within_s: float = 900.0  # a job that is stopped so close to its end queues itself again; ours
    max_requeues: int = 50  # so many times; ours
    max_failures: int = 3  # jobs of a chain in a row that may finish no step; ours
    spare_links: int = 2  # jobs of a chain that wait behind the next one, for the case that no node starts it; ours
    preflight: bool = True  # before the first phase of a job: look at every node, from each kind's environment
    max_clock_difference_s: float = 10.0  # between two nodes' clocks; ours


@dataclass
class ClusterConfig:
    launcher: str = "local"  # local | slurm
    backend: str = "auto"  # auto | cpu | cuda | cuda_torch (no Transformer Engine): of the trainer
    rollout: ResourcesConfig = field(default_factory=ResourcesConfig)
    train: ResourcesConfig = field(default_factory=ResourcesConfig)
    stop_grace_s: float = 15.0  # between SIGTERM and SIGKILL of a phase
    phase_timeout_s: float = 86400.0
    # Launches of a phase again, within one job, that something killed or whose engine was lost (0: the loop ends, and
    # the same command goes on); not where the phase said what is wrong. ours
    phase_retries: int = 0
    gpu_free_share: float = 0.9  # of each GPU's memory, without which no phase starts on it; 0: don't ask; ours
    collective_timeout_s: float = 600.0  # that training's ranks wait for each other, also for one that loads or writes
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def resources(self, kind: str) -> ResourcesConfig:
        """Of a kind of phase: "rollout" or "train"."""
        return self.rollout if kind == "rollout" else self.train


def slurm_problems(slurm: SlurmConfig) -> list[str]:
    """Why a job would be told to stop as soon as it has begun, or end for good when its time is over; one line each."""
    limit_s, told_s, problems = slurm_seconds(slurm.time), slurm.stop_lead_s + SIGNAL_EARLY_S, []
    lead = f"stop_lead_s={slurm.stop_lead_s:g}, and {SIGNAL_EARLY_S} s that Slurm may be early"
    if limit_s is None:
        problems.append(f"cluster.slurm.time={slurm.time!r} is no time of Slurm's: write D-HH:MM:SS, or minutes")
    elif limit_s <= told_s:
        problems.append(
            f"cluster.slurm.time={slurm.time} is {limit_s:g} s, and a job is told to stop {told_s:g} s before its end "
            f"({lead})"
        )
    if slurm.requeue_within_s < told_s:
        problems.append(
            f"cluster.slurm.requeue_within_s={slurm.requeue_within_s:g} must be at least {told_s:g} ({lead}): "
            "a job that is told to stop before that stays ended"
        )
    return problems
