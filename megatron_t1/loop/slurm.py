"""Phases as srun steps of the allocation the loop runs in: no Ray, no name resolution, one at a time (verl#491)."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.config.cluster import ResourcesConfig
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import train_nodes
from megatron_t1.errors import T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.failure import read_end
from megatron_t1.loop.launcher import KINDS, MAIN_LOG, BaseLauncher, Exit, PhaseCommand
from megatron_t1.loop.node_reports import node_problems
from megatron_t1.loop.worker import WORKER, WORKERS

PORTS = range(20000, 32000)  # below the range from which Linux takes ports for outgoing connections
PORT_TRIES = 5
ABORTED = re.compile(r"node failure|step aborted|CANCELLED AT", re.IGNORECASE)
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|port \d+ can't be used", re.IGNORECASE)
# Each task finds its place in the group from what Slurm tells it.
RANK_LINES = ("export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",)
WORKER_LINES = (f"export {WORKER}=$SLURM_PROCID {WORKERS}=$SLURM_NTASKS",)
# Workers that share a node take their engines' GPUs from what Slurm gave the step there; srun doesn't narrow it.
GPU_LINES = (
    "IFS=, read -ra gpus <<< ${{CUDA_VISIBLE_DEVICES:-}}",
    'mine=$(IFS=,; echo "${{gpus[*]:$((SLURM_LOCALID * {each})):{each}}}")',
    "if [[ -n $mine ]]; then export CUDA_VISIBLE_DEVICES=$mine; fi",
)


@dataclass(frozen=True)
class Allocation:
    job_id: int
    nodes: int
    cpus_per_node: int  # the smallest node's
    gpus_per_node: int  # 0: none or not known
    node_list: str

    @classmethod
    def current(cls, het_group: int = -1) -> Allocation:
        """From Slurm's environment of this job, or of one component of a heterogeneous job.

        Raises:
            T1Error: this process isn't in an allocation, or that has no such component.
        """
        job = os.environ.get("SLURM_JOB_ID")
        if not job:
            raise T1Error(
                "cluster.launcher=slurm, but this is not a Slurm allocation (SLURM_JOB_ID is not set)",
                remedy="submit it (`sbatch slurm/ppo_122b.sh key=value ...`), use `salloc`, or cluster=local",
            )
        components = int(os.environ.get("SLURM_HET_SIZE") or 0)
        if het_group >= components:
            raise T1Error(
                f"cluster.*.het_group={het_group}, but this job has {components} components",
                remedy="`t1 slurm submit --het` hands in a job that has them",
            )
        suffix = f"_HET_GROUP_{het_group}" if het_group >= 0 else ""

        def said(*names: str) -> str:
            return next(filter(None, (os.environ.get(name + suffix) for name in names)), "")

        return cls(
            job_id=int(job),
            nodes=int(said("SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1),
            cpus_per_node=min(_counts(said("SLURM_JOB_CPUS_PER_NODE") or "1")),
            gpus_per_node=_gpus(said("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
            node_list=said("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        )


@dataclass(frozen=True)
class Need:
    phase: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int


def need(config: Config, kind: str, allocation: Allocation) -> Need:
    """What a kind of phase asks of the allocation: a GPU for each training process and for each part of an engine."""
    resources = config.cluster.resources(kind)
    if kind == "rollout":
        parts = resources.processes_per_node * config.rollout.engine.tensor_parallel if allocation.gpus_per_node else 0
        nodes, processes = resources.nodes or allocation.nodes, resources.processes_per_node
        return Need("rollout", nodes, processes, resources.gpus_per_node or parts)
    on_gpus = config.cluster.backend == "cuda" or (config.cluster.backend == "auto" and allocation.gpus_per_node > 0)
    processes = min(resources.processes_per_node, config.layout.processes)
    return Need("training", train_nodes(config), processes, resources.gpus_per_node or (processes if on_gpus else 0))


def compare(need: Need, allocation: Allocation) -> list[str]:
    """Where the allocation is too small for a kind of phase, one line each; empty when it fits."""
    problems = []
    if need.nodes > allocation.nodes:
        problems.append(
            f"{need.phase} needs {need.nodes} nodes ({need.tasks_per_node} processes each), the allocation has "
            f"{allocation.nodes}: submit with -N{need.nodes}, or choose a smaller layout"
        )
    if need.tasks_per_node > allocation.cpus_per_node:
        problems.append(
            f"{need.phase} starts {need.tasks_per_node} processes per node, the allocation has "
            f"{allocation.cpus_per_node} CPUs per node: submit with --cpus-per-task or --exclusive"
        )
    if need.gpus_per_node > allocation.gpus_per_node:
        problems.append(
            f"{need.phase} needs {need.gpus_per_node} GPUs per node, the allocation has "
            f"{allocation.gpus_per_node}: submit with --gpus-per-node={need.gpus_per_node}"
        )
    return problems


class SlurmLauncher(BaseLauncher):
    late_stop_s = 3.0  # Slurm ends a cancelled job's steps and its batch script in any order

    def __init__(self, config: Config, stop_requested: Callable[[], int] = lambda: 0):
        super().__init__(config, stop_requested)
        self._launches = 0

    def wrapped(self, command: PhaseCommand, log_dir: Path) -> list[str]:
        resources = self.resources(command)
        allocation = Allocation.current(resources.het_group)
        wanted = need(self.config, command.kind, allocation)
        tasks = command.processes if command.distributed else wanted.nodes * wanted.tasks_per_node
        nodes = min(wanted.nodes, tasks)
        per_node = -(-tasks // nodes)
        # From the allocation's first node on, ranks in the order of nodes: there rank 0 listens. Phases run one at a
        # time; a controller that was away when a step ended takes that one's resources for busy: hence --overlap.
        line = [
            "srun", f"--nodes={nodes}", "--relative=0", f"--ntasks={tasks}", f"--ntasks-per-node={per_node}",
            "--distribution=block", f"--cpus-per-task={cpus_per_task(allocation.cpus_per_node, per_node)}",
            "--kill-on-bad-exit=1", "--export=ALL", "--unbuffered", f"--job-name={command.name}", "--overlap",
            f"--output={slurm_jobs.literal(log_dir)}/rank_%t.log",
        ]  # fmt: skip
        if resources.het_group >= 0:
            line.append(f"--het-group={resources.het_group}")
        if resources.gpus_per_node:
            line.append(f"--gpus-per-node={resources.gpus_per_node}")
        line += [*_container(resources), *resources.srun_args]
        extra = [*RANK_LINES, *self._rendezvous(allocation)] if command.distributed else list(WORKER_LINES)
        if not command.distributed and per_node > 1 and wanted.gpus_per_node:
            extra += gpu_lines(wanted.gpus_per_node // per_node)
        script = self.script(command, log_dir, extra)
        inside = apptainer(resources) if resources.container_runtime == "apptainer" else []
        return [*line, *inside, "bash", str(script), self.python(command), "-m", command.module, *command.arguments]

    def launch(self, command: PhaseCommand, log_dir: Path, *, echo: Callable[[str], None] | None = None) -> Exit:
        """As `BaseLauncher.launch`; ranks whose meeting port was taken by somebody else meet at the next one."""
        for number in range(1, PORT_TRIES + 1):
            result = super().launch(command, log_dir, echo=echo)
            taken = PORT_TAKEN.search(read_end(self.main_log(log_dir)))
            if result.code == 0 or not command.distributed or not taken or number == PORT_TRIES:
                break
            for path in [*log_dir.glob(MAIN_LOG), *log_dir.glob("rank_*.log")]:  # the next launch has logs of its own
                path.rename(path.with_name(f"port_taken_{number}.{path.name}"))
        return result

    def _rendezvous(self, allocation: Allocation) -> list[str]:
        node = first_node(allocation.node_list)
        # Each launch takes another port: the last one's may still be in TIME_WAIT.
        port = meeting_port(allocation.job_id, self._launches, probe=os.environ.get("SLURMD_NODENAME") == node)
        self._launches += 1
        return [f"export MASTER_ADDR={slurm_jobs.node_address(node)} MASTER_PORT={port}"]

    def python(self, command: PhaseCommand) -> str:
        """An interpreter of this machine means nothing inside a container."""
        resources = self.resources(command)
        return "python3" if resources.container and not resources.python else super().python(command)

    def main_log(self, log_dir: Path) -> Path:
        return log_dir / "rank_0.log"

    def late_files_s(self, ended: Exit) -> float:
        """None are to come where srun says that Slurm ended its step, though with status 0."""
        return 0.0 if ABORTED.search(read_end(ended.log)) else atomic.LATE_FILES_S

    def rank_logs(self, log_dir: Path) -> dict[int, list[Path]]:
        return {int(path.stem.removeprefix("rank_")): [path] for path in sorted(log_dir.glob("rank_*.log"))}

    def preflight(self, kinds: Sequence[str] = KINDS) -> list[str]:
        missing = [name for name in ("srun", "scontrol") if shutil.which(name) is None]
        if missing:
            return [f"cluster.launcher=slurm needs {' and '.join(missing)} on PATH"]
        problems: list[str] = []
        looked_at: dict[str, Need] = {}
        for kind in kinds:
            resources = self.config.cluster.resources(kind)
            allocation = Allocation.current(resources.het_group)
            wanted = need(self.config, kind, allocation)
            problems += compare(wanted, allocation)
            if resources.python and not resources.container and not resources.setup:
                if shutil.which(resources.python) is None:
                    problems.append(f"cluster.{kind}.python={resources.python}: no such interpreter on this node")
            looked_at[kind] = wanted
        if problems or not self.config.cluster.slurm.preflight:
            return problems
        return [
            problem
            for kind, wanted in looked_at.items()
            for problem in node_problems(self, kind, wanted.nodes, wanted.gpus_per_node)
        ]


def _container(resources: ResourcesConfig) -> list[str]:
    """srun's own options for a container: those of the pyxis plugin."""
    if not resources.container or resources.container_runtime != "pyxis":
        return []
    return [f"--container-image={resources.container}", *resources.container_args]


def apptainer(resources: ResourcesConfig) -> list[str]:
    """What runs the phase's script in its image, where it finds the launcher's environment; directories by `--bind`."""
    return ["apptainer", "exec", *resources.container_args, resources.container] if resources.container else []


def gpu_lines(each: int) -> list[str]:
    """Shell lines that leave a worker the `each` GPUs of its place on the node."""
    return [line.format(each=each) for line in GPU_LINES]


def cpus_per_task(cpus_per_node: int, tasks_per_node: int) -> int:
    """A task's share of its node: phases run one at a time, and engine, sandboxes and data loading use what is there.

    Even where tasks share a node: Slurm hands out whole cores, of two hardware threads on most machines.
    """
    if tasks_per_node == 1:
        return cpus_per_node
    return max(1, cpus_per_node // tasks_per_node // 2 * 2)


def meeting_port(job_id: int, launch: int, *, probe: bool) -> int:
    """The port of rank 0: from the job's number, so that jobs on one node differ; the next one where it is in use.

    Args:
        probe: whether rank 0 will run on this machine, so that a port in use can be seen.
    """
    first = job_id * 7919 + launch
    candidates = (PORTS[(first + step) % len(PORTS)] for step in range(len(PORTS)))
    if not probe:
        return next(candidates)
    for port in candidates:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise T1Error(f"no port between {PORTS[0]} and {PORTS[-1]} is free", where=socket.gethostname())


def first_node(node_list: str) -> str:
    """First node name of a Slurm list such as `n[1-4,7],gpu03` or `rack[1-2]n[01-16]`.

    Raises:
        T1Error: it isn't one.
    """
    first = re.match(r"((?:[^,\[\]]|\[[^\]]*\])+)(?:,|$)", node_list)
    name = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", first[1]) if first else ""
    if not name or "[" in name:
        raise T1Error(f"can't read the node list {node_list!r}", where="SLURM_JOB_NODELIST")
    return name


def _counts(text: str) -> list[int]:
    """`72(x2),36` -> [72, 36]."""
    return [int(re.match(r"\d+", part)[0]) for part in text.split(",") if part] or [1]


def _gpus(text: str) -> int:
    """`8`, `h100:8` or `gpu:h100:8,...` -> 8."""
    numbers = [int(part.rpartition(":")[2]) for part in text.split(",") if part.rpartition(":")[2].isdigit()]
    return sum(numbers)
