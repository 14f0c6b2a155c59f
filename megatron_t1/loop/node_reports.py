"""The nodes of an allocation, compared before a job's first phase: what would make one fail, hours in, is said now."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import MISSING, Config
from megatron_t1.errors import T1Error
from megatron_t1.loop.launcher import BaseLauncher, PhaseCommand, require_success
from megatron_t1.paths import RunPaths

FOLDER = "preflight"  # of a run, while its nodes are looked at
PATIENCE_S = 10.0  # for the last node's file


def node_problems(launcher: BaseLauncher, kind: str, nodes: int, gpus_per_node: int) -> list[str]:
    """Start a process on each node in which phases of this kind will run; what stands in their way, one line each.

    Args:
        gpus_per_node: that each node must show; 0: any number.

    Raises:
        Stopped: the loop was asked to stop.
    """
    config = launcher.config
    directory = RunPaths.of(config.run.dir).root / FOLDER / f"{kind}.{uuid.uuid4().hex[:8]}"
    directory.mkdir(parents=True)
    arguments = (str(directory.resolve()), *needed_paths(config, kind))
    command = PhaseCommand("preflight", kind, "megatron_t1.loop.node_check", arguments, nodes, distributed=True)
    try:
        require_success(launcher.launch(command, directory / "logs"), command)
    except T1Error as error:
        return [f"the nodes of {kind} phases can't be looked at: {error.problem} ({error.where})"]
    try:
        reports = [_report(directory / f"node_{rank}.json") for rank in range(nodes)]
    except (OSError, ValueError) as error:  # srun's status is 0 when Slurm ends its step because it lost a node
        return [f"{kind}: a node said nothing of itself, or can't be read: {error} ({directory})"]
    problems = compare_nodes(reports, kind, gpus_per_node, config.cluster.slurm.max_clock_difference_s)
    shutil.rmtree(directory, ignore_errors=True)  # a network file system may keep what is still open somewhere
    return problems


def _report(path: Path) -> dict[str, Any]:
    """What a node wrote, which a network file system may show late."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return json.loads(path.read_bytes())


def needed_paths(config: Config, kind: str) -> list[str]:
    """What phases of this kind read that lies outside the run directory."""
    tasks = [config.env.tasks, *config.env.sources.values(), config.eval.tasks] if kind == "rollout" else []
    return [path for path in (config.model.path, *tasks) if path and path != MISSING]


def compare_nodes(reports: list[dict[str, Any]], kind: str, gpus_per_node: int, clock_s: float) -> list[str]:
    """What differs between nodes that must be alike, and what one of them lacks."""
    problems = []
    for report in reports:
        node = report["node"]
        problems += [f"{kind}: node {node} doesn't see {path}" for path in report["missing_paths"]]
        if report["unseen"]:
            others = ", ".join(reports[rank]["node"] for rank in report["unseen"])
            problems.append(f"{kind}: node {node} doesn't see in run.dir what {others} wrote there")
        if isinstance(report["won"], str):
            problems.append(f"{kind}: node {node} can't make a hard link in run.dir: {report['won']}")
        if report["connected"]:
            problems.append(f"{kind}: node {node}: {report['connected']}")
        if report["gpus"] < gpus_per_node:
            problems.append(f"{kind}: node {node} shows {report['gpus']} GPUs, {gpus_per_node} are needed")
    if (winners := sum(report["won"] is True for report in reports)) > 1:
        problems.append(f"{kind}: {winners} nodes made the same link in run.dir: its file system can't hold a lock")
    nodes = [report["node"] for report in reports]
    versions = [{name: report[name] for name in ("megatron_t1", "python")} | report["packages"] for report in reports]
    for name in sorted({name for each in versions for name in each}):
        problems += _differing(nodes, kind, name, [each.get(name) for each in versions])
    clocks = sorted(reports, key=lambda report: report["clock_s"])
    if (apart := clocks[-1]["clock_s"] - clocks[0]["clock_s"]) > clock_s:
        problems.append(
            f"{kind}: the clocks of {clocks[0]['node']} and {clocks[-1]['node']} differ by {apart:.0f} s "
            f"(cluster.slurm.max_clock_difference_s={clock_s:g})"
        )
    return problems


def _differing(nodes: list[str], kind: str, name: str, versions: list[str | None]) -> list[str]:
    """One line where nodes have several versions: which is the usual one, and who has another."""
    usual = Counter(versions).most_common(1)[0][0]
    others = [f"{node} has {version}" for node, version in zip(nodes, versions, strict=True) if version != usual]
    return [f"{kind}: {name} is {usual} on most nodes, but {', '.join(others[:5])}"] if others else []
