"""A dry run of every rank of a layout without GPUs, in a few processes on this machine. Imports no torch by itself.

Each worker (`dryrun_worker`) visits its share of the ranks, one after another: it builds the rank's model, gradient
buffers and optimizer shards on the meta device under a fake process group, and says what it found. What all ranks
together must amount to is checked here (`dryrun_report`), also against the planner's arithmetic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1.config.compose import save
from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.planner.dryrun_report import LayoutFindings, RankFindings
from megatron_t1.planner.parameters import rank_bytes, total_parameters

ROLES = ("policy", "value")
WORKER = "megatron_t1.planner.dryrun_worker"
SAID = "error of a dry run"  # key of the line in which a worker says what is wrong: [problem, where, remedy]
TAIL = 4000  # characters shown of a worker's output that failed otherwise
POLL_S = 0.2


@dataclass(frozen=True)
class DryRun:
    """One layout to visit with one role's model."""

    name: str
    config: Config
    role: str = "policy"


def dry_run(
    runs: Sequence[DryRun],
    *,
    passes: bool = True,
    workers: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> list[LayoutFindings]:
    """Visit every rank of every run.

    Args:
        runs: with checked configurations; `cluster.train.python` of the first is the interpreter.
        passes: also run one micro-batch forward and backward on one rank of every pipeline stage; of the value model,
            which differs there alone, of the last stage.
        workers: processes at once; 0: as many as there are CPUs, at most 8.
        say: is told when a layout is finished.

    Raises:
        T1Error: a worker failed; with what it said.
    """
    count = min(workers or min(8, os.cpu_count() or 1), max(run.config.layout.processes for run in runs))
    with tempfile.TemporaryDirectory(prefix="t1-dryrun-") as scratch:
        directory = Path(scratch)
        for index, run in enumerate(runs):
            (directory / str(index)).mkdir()
            save(run.config, directory / str(index) / "config.yaml")
        python = runs[0].config.cluster.train.python or sys.executable
        started = [_start(python, directory, number, _jobs(runs, directory, number, count, passes))
                   for number in range(count)]  # fmt: skip
        try:
            _wait(started, runs, say)
        finally:
            for worker in started:
                worker.process.kill()
                worker.process.wait()
        lines = [line for worker in started for line in worker.lines]
    return [_findings(runs, index, lines, passes) for index in range(len(runs))]


def passing_ranks(processes: int, stages: int, *, only_last: bool = False) -> set[int]:
    """The first rank of the first stage and the last rank of each other, in Megatron's order of ranks."""
    each = processes // stages
    chosen = {0, *(stage * each - 1 for stage in range(2, stages + 1))}
    return {rank for rank in chosen if rank >= processes - each} if only_last else chosen


def _ranks(run: DryRun, twin: int | None) -> range:
    """What is visited of a run: all ranks; where its twin has visited all, those of the last stage."""
    layout = run.config.layout
    return range(0 if twin is None else layout.processes - layout.processes // layout.pipeline, layout.processes)


def _twin(runs: Sequence[DryRun], index: int) -> int | None:
    """The run of the policy in the same layout: a value model's stages before the last are the policy's."""
    run = runs[index]
    if run.role == "policy":
        return None
    alike = (each.role == "policy" and each.name == run.name and each.config == run.config for each in runs)
    return next((other for other, same in enumerate(alike) if same), None)


def _jobs(runs: Sequence[DryRun], directory: Path, number: int, count: int, passes: bool) -> list[dict[str, Any]]:
    """What worker `number` of `count` visits: neighbours go to different workers, so that all end together."""
    jobs = []
    for index, run in enumerate(runs):
        layout, only_last = run.config.layout, run.role == "value"
        ranks = list(_ranks(run, _twin(runs, index)))[(number + index) % count :: count]
        chosen = passing_ranks(layout.processes, layout.pipeline, only_last=only_last) if passes else set()
        jobs.append(
            {"run": str(directory / str(index)), "role": run.role, "ranks": ranks, "passes": sorted(chosen & {*ranks})}
        )
    return jobs


@dataclass
class _Worker:
    """A process that visits ranks, and the lines it has written so far."""

    process: subprocess.Popen
    out: Path
    said: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    position: int = 0

    def read(self) -> None:
        """Take what has been added since the last time, as far as its last line is complete."""
        if self.out.exists():
            with self.out.open("rb") as file:
                file.seek(self.position)
                added = file.read()
            complete = added[: added.rfind(b"\n") + 1]
            self.position += len(complete)
            self.lines += map(json.loads, complete.splitlines())

    @property
    def finished(self) -> int:
        """Jobs that it has done."""
        return sum("done" in line for line in self.lines)


def _start(python: str, directory: Path, number: int, jobs: list[dict[str, Any]]) -> _Worker:
    todo, out, said = (directory / f"{kind}_{number}" for kind in ("jobs", "out", "said"))
    todo.write_text(json.dumps(jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with said.open("w") as stream:
        command = [python, "-m", WORKER, str(todo), str(out)]
        return _Worker(subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT), out, said)


def _wait(workers: Sequence[_Worker], runs: Sequence[DryRun], say: Callable[[str], None]) -> None:
    """Read what the workers write until all have ended."""
    began, told = time.monotonic(), 0
    while True:
        running = [worker.process.poll() is None for worker in workers]
        for worker in workers:
            worker.read()
            if worker.process.poll():
                raise _failure(worker)
        finished = min(worker.finished for worker in workers)
        for run in runs[told:finished]:
            say(f"{run.name} {run.role}: {run.config.layout.processes} ranks after {time.monotonic() - began:.0f} s")
        told = finished
        if not any(running):
            return
        time.sleep(POLL_S)


def _failure(worker: _Worker) -> T1Error:
    """What a worker that failed says is wrong; or, where it couldn't, the end of its output."""
    output = worker.said.read_text(errors="replace").strip()
    for line in output.splitlines():
        if line.startswith(f'{{"{SAID}": '):
            problem, where, remedy = json.loads(line)[SAID]
            return T1Error(problem, where=where, remedy=remedy)
    return T1Error(
        f"a worker of the dry run ended with status {worker.process.returncode}:\n{output[-TAIL:]}",
        where=WORKER,
        remedy="the model can't be built, or not by this megatron-core, in this layout",
    )


def _findings(runs: Sequence[DryRun], index: int, lines: Sequence[dict[str, Any]], passes: bool) -> LayoutFindings:
    run, twin = runs[index], _twin(runs, index)
    own = [line for line in lines if line["job"] == index]
    visited = {line["rank"]["place"]["rank"] for line in own if "rank" in line}
    shared = [line for line in lines if line["job"] == twin and "rank" in line]
    own += [line for line in shared if line["rank"]["place"]["rank"] not in visited]
    whole = next(line["whole"] for line in own if "whole" in line)
    layout, model = run.config.layout, run.config.model
    return LayoutFindings(
        name=run.name,
        role=run.role,
        ranks=sorted((RankFindings.from_json(line["rank"]) for line in own if "rank" in line), key=_number),
        visited=len(visited),
        processes=layout.processes,
        **whole,
        planned_parameters=total_parameters(model.architecture, run.role),
        planned=[
            rank_bytes(model.architecture, layout, model.dtype, run.role, rank) for rank in range(layout.processes)
        ],
        passes=passes,
    )


def _number(found: RankFindings) -> int:
    return found.place.rank
