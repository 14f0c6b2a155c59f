"""Phases as srun steps of the allocation the loop runs in: no Ray, no name resolution, one at a time (verl#491)."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.config.schema import Config
from megatron_t1.config.validate import train_nodes
from megatron_t1.errors import T1Error
from megatron_t1.loop.launcher import KINDS, BaseLauncher, PhaseCommand
from megatron_t1.loop.worker import WORKER, WORKERS

PORTS = range(20000, 32000)  # below the range from which Linux takes ports for outgoing connections
# Each task finds its place in the group from what Slurm tells it.
RANK_LINES = ("export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",)
WORKER_LINES = (f"export {WORKER}=$SLURM_PROCID {WORKERS}=$SLURM_NTASKS",)


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
        # From the allocation's first node on, ranks in the order of nodes: there rank 0 listens.
        line = [
            "srun", f"--nodes={nodes}", "--relative=0", f"--ntasks={tasks}", f"--ntasks-per-node={per_node}",
            "--distribution=block", f"--cpus-per-task={cpus_per_task(allocation.cpus_per_node, per_node)}",
            "--kill-on-bad-exit=1", "--export=ALL", "--unbuffered", f"--job-name={command.name}",
            f"--output={log_dir}/rank_%t.log",
        ]  # fmt: skip
        if resources.het_group >= 0:
            line.append(f"--het-group={resources.het_group}")
        if resources.gpus_per_node:
            line.append(f"--gpus-per-node={resources.gpus_per_node}")
        if resources.container:
            line.append(f"--container-image={resources.container}")
        line += resources.srun_args
        extra = [*RANK_LINES, *self._rendezvous(allocation)] if command.distributed else WORKER_LINES
        script = self.script(command, log_dir, extra)
        return [*line, "bash", str(script), self.python(command), "-m", command.module, *command.arguments]

    def _rendezvous(self, allocation: Allocation) -> list[str]:
        node = first_node(allocation.node_list)
        # Each launch takes another port: the last one's may still be in TIME_WAIT.
        port = meeting_port(allocation.job_id, self._launches, probe=os.environ.get("SLURMD_NODENAME") == node)
        self._launches += 1
        return [f"export MASTER_ADDR={node_address(node)} MASTER_PORT={port}"]

    def python(self, command: PhaseCommand) -> str:
        """An interpreter of this machine means nothing inside a container."""
        resources = self.resources(command)
        return "python3" if resources.container and not resources.python else super().python(command)

    def main_log(self, log_dir: Path) -> Path:
        return log_dir / "rank_0.log"

    def rank_logs(self, log_dir: Path) -> dict[int, list[Path]]:
        return {int(path.stem.removeprefix("rank_")): [path] for path in sorted(log_dir.glob("rank_*.log"))}

    def preflight(self, kinds: Sequence[str] = KINDS) -> list[str]:
        missing = [name for name in ("srun", "scontrol") if shutil.which(name) is None]
        if missing:
            return [f"cluster.launcher=slurm needs {' and '.join(missing)} on PATH"]
        problems = []
        for kind in kinds:
            resources = self.config.cluster.resources(kind)
            allocation = Allocation.current(resources.het_group)
            problems += compare(need(self.config, kind, allocation), allocation)
            if resources.python and not resources.container and not resources.setup:
                if shutil.which(resources.python) is None:
                    problems.append(f"cluster.{kind}.python={resources.python}: no such interpreter on this node")
        return problems


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
    """First node name of a Slurm list such as `n[1-4,7],gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?([^,]*)", node_list)
    if not match:
        raise T1Error(f"can't read the node list {node_list!r}", where="SLURM_JOB_NODELIST")
    return match[1] + (match[2] or "") + (match[3] or "")


def node_address(node: str) -> str:
    """Address of a node as Slurm knows it; node names need not resolve."""
    shown = subprocess.run(["scontrol", "show", "node", node, "-o"], capture_output=True, text=True)
    match = re.search(r"\bNodeAddr=([A-Za-z0-9_.:-]+)", shown.stdout)
    if shown.returncode or not match:
        raise T1Error(
            f"Slurm doesn't tell the address of node {node}: {shown.stderr.strip() or shown.stdout.strip()[:200]}",
            where="scontrol show node",
            remedy="check that the controller answers (`scontrol ping`)",
        )
    return match[1]


def _counts(text: str) -> list[int]:
    """`72(x2),36` -> [72, 36]."""
    return [int(re.match(r"\d+", part)[0]) for part in text.split(",") if part] or [1]


def _gpus(text: str) -> int:
    """`8`, `h100:8` or `gpu:h100:8,...` -> 8."""
    numbers = [int(part.rpartition(":")[2]) for part in text.split(",") if part.rpartition(":")[2].isdigit()]
    return sum(numbers)
