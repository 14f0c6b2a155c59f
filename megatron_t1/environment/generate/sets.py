"""Write the train and held-out sets, each task proven in a sandbox, and a manifest that is written last."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.config.schema import GenerateConfig, SandboxConfig
from megatron_t1.environment.baseline import BASELINE_FILE, Baseline, write_baselines
from megatron_t1.environment.generate.tasks import GeneratedTask, chosen_families, plan_sets
from megatron_t1.environment.loading import load_task, write_task
from megatron_t1.environment.proof import run_solution
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.environment.task import Task
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error, naming, readable

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
UNFINISHED = ".generating"  # stands in OUT until the manifest does
SOLUTION_TIMEOUT_S = 60.0


async def generate_sets(
    config: GenerateConfig, seed: int, out: str | Path, *, sandbox: SandboxConfig | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Write OUT/train/NAME/ and OUT/held_out/NAME/ in Harbor's format and OUT/manifest.json.

    Each task is proven: doing nothing passes the recorded baseline and not all checks, the reference solution, run on
    the task as it lies on disk, passes all. A finished OUT of the same options and seed is left as it is.

    Returns:
        The manifest: options, seed, counts, fingerprints.

    Raises:
        ConfigError: options that can't work.
        T1Error: OUT holds something else, the machine can't run sandboxes, or a task can't be proven.
    """
    out, settings = Path(out), _settings(config, seed)
    finished = _finished(out, settings)
    if finished is not None:
        return finished
    planned = dict(zip(("train", "held_out"), plan_sets(config, seed), strict=True))
    jobs = [(out / name / item.task.name, item) for name, items in planned.items() for item in items]
    out.mkdir(parents=True, exist_ok=True)
    (out / UNFINISHED).touch()
    for name in planned:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
    proven = await _prove_all(jobs, config.workers, sandbox or SandboxConfig(), _progress(len(jobs), quiet))
    manifest = {"version": MANIFEST_VERSION, **settings, "sets": {}}
    for name, items in planned.items():
        write_baselines(out / name / BASELINE_FILE, {item.task.name: proven[item.task.name] for item in items})
        manifest["sets"][name] = {
            "tasks": len(items),
            "checks": sum(2 * len(item.parts) for item in items),
            "baseline_checks": sum(sum(proven[item.task.name].checks.values()) for item in items),
            "difficulties": _count(item.task.metadata["difficulty"] for item in items),
            "families": _count(family for item in items for family in item.families),
            "fingerprints": {item.task.name: item.fingerprint for item in items},
        }
    atomic.write_json(out / MANIFEST, manifest)
    (out / UNFINISHED).unlink()
    return manifest


async def prove(sandbox: Sandbox, generated: GeneratedTask, directory: Path) -> Baseline:
    """Write one task to `directory` when it is sound; returns its baseline.

    Raises:
        T1Error: doing nothing passes everything, the reference fails, or the verifier can't be trusted.
    """
    task = generated.task
    await sandbox.start(task)
    idle = await verify(sandbox, task)
    total = task.metadata["checks"]
    if not idle.trusted or idle.total != total or idle.solved:
        raise _unproven(task, f"doing nothing passes {idle.passed} of {idle.total} checks {idle.reason}")
    with naming(directory):
        write_task(replace(task, baseline=idle.passed), directory)
    written = load_task(directory)
    await sandbox.start(written)
    result = await run_solution(sandbox, written, SOLUTION_TIMEOUT_S)
    solved = await verify(sandbox, written)
    if not solved.solved or solved.total != total:
        failed = [name for name, passed in solved.checks.items() if not passed]
        raise _unproven(
            task,
            f"the reference passes {solved.passed} of {solved.total} checks, not {', '.join(failed)} {solved.reason}"
            f" (status {result.exit_code}: {result.output.strip()[:300]})",
        )
    return Baseline(idle.checks, tuple(solved.checks))


async def _prove_all(
    jobs: list[tuple[Path, GeneratedTask]], workers: int, config: SandboxConfig, tick: Callable[[], None]
) -> dict[str, Baseline]:
    pending, baselines = iter(jobs), {}

    async def work() -> None:
        sandbox = BubblewrapSandbox(config)
        try:
            for directory, generated in pending:
                baselines[generated.task.name] = await prove(sandbox, generated, directory)
                tick()
        finally:
            await sandbox.stop()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(workers, len(jobs)))):
                group.create_task(work())
    except ExceptionGroup as group:
        raise (readable(group) or group) from None
    return baselines


def _settings(config: GenerateConfig, seed: int) -> dict[str, Any]:
    names = ("train", "held_out", "min_parts", "max_parts", "pool")
    options = {name: value for name, value in asdict(config).items() if name in names}
    return {"seed": seed, "options": {**options, "families": list(chosen_families(config))}}


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished OUT; None where nothing finished lies. Raises T1Error where something else does."""
    path = out / MANIFEST
    if not path.exists():
        others = [item.name for item in out.iterdir()] if out.is_dir() else []
        if (
            others and UNFINISHED not in others
        ):  # an interrupted generation of ours starts again, nothing else is touched
            raise T1Error(
                f"the folder holds something else: {', '.join(sorted(others)[:5])}",
                where=str(out),
                remedy="give a new one",
            )
        return None
    try:
        manifest = json.loads(path.read_text())
        same = {name: manifest[name] for name in settings} == settings and manifest["version"] == MANIFEST_VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise T1Error(f"the manifest can't be read: {error}", where=str(path), remedy="remove the folder") from error
    if not same:
        raise T1Error(
            "tasks of other options or another seed lie there",
            where=str(path),
            remedy="give a new folder, or remove this",
        )
    return manifest


def _count(values: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items()))


def _progress(total: int, quiet: bool) -> Callable[[], None]:
    """A tick per task: one moving line on a terminal, a line every few seconds elsewhere."""
    started, state = time.monotonic(), {"done": 0, "shown": 0.0}
    terminal = sys.stderr.isatty()

    def tick() -> None:
        state["done"] += 1
        now, last = time.monotonic(), state["done"] == total
        if quiet or (now - state["shown"] < (0.2 if terminal else 5.0) and not last):
            return
        state["shown"] = now
        line = f"tasks proven: {state['done']}/{total}, {now - started:.0f} s"
        print(f"\r{line}" if terminal else line, end="" if terminal and not last else "\n", file=sys.stderr, flush=True)

    return tick


def _unproven(task: Task, problem: str) -> T1Error:
    return T1Error(
        f"a generated task is not sound: {problem.strip()}",
        where=f"task {task.name} ({', '.join(task.metadata['families'])})",
        remedy="leave these families out with generate.families, or install the programs they use (git, sed, ...)",
    )
