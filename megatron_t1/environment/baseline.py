"""What passes when nothing is done, by the names of the checks: a file for a whole task set.

    {"version": 1, "tasks": {TASK: {"checks": {CHECK: passed}, "names": [every check that a solved task has]}}}

baseline.json lies in the task set (`t1 tasks generate`) or beside a list of tasks (`t1 tasks check`); env.baselines
names another place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error

BASELINE_FILE = "baseline.json"
VERSION = 1


@dataclass(frozen=True)
class Baseline:
    """Of one task.

    Attributes:
        checks: check name -> whether it passes when nothing is done.
        names: checks that the reference solution's run reported; empty where it wasn't run.
    """

    checks: Mapping[str, bool]
    names: tuple[str, ...] = ()


def write_baselines(path: str | Path, baselines: Mapping[str, Baseline]) -> None:
    """Write the file for a task set, complete or not at all."""
    tasks = {
        name: {"checks": dict(baseline.checks), "names": list(baseline.names)}
        for name, baseline in sorted(baselines.items())
    }
    atomic.write_json(Path(path), {"version": VERSION, "tasks": tasks})


def read_baselines(path: str | Path) -> dict[str, Baseline]:
    """Task -> baseline.

    Raises:
        T1Error: the file is missing or says something else.
    """
    try:
        raw = json.loads(Path(path).read_bytes())
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']!r}, known: {VERSION}")
        return {name: _parse(name, entry) for name, entry in raw["tasks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise T1Error(
            f"no readable baselines: {error}",
            where=str(path),
            remedy="`t1 tasks check` writes them; or name another file with env.baselines",
        ) from error


def with_baselines(tasks: Iterable[Task], place: str | Path, path: str | Path = "") -> list[Task]:
    """The tasks, with what is known of their baselines.

    Args:
        place: directory or list of the task set; the baseline.json in it, or beside it, counts where `path` is empty.
        path: env.baselines.

    Raises:
        T1Error: the file can't be read, or `path` names none.
    """
    own = (Path(place) if Path(place).is_dir() else Path(place).parent) / BASELINE_FILE
    if not path and not own.is_file():
        return list(tasks)
    known = read_baselines(path or own)
    return [_with(task, known[task.name]) if task.name in known else task for task in tasks]


def require_baselines(tasks: Iterable[Task], *, where: str) -> None:
    """Raise T1Error, naming tasks, unless the baseline of each is known by check name."""
    unknown = sorted(task.name for task in tasks if task.baseline_checks is None)
    if unknown:
        raise T1Error(
            f"what passes when nothing is done is not known by check name for {len(unknown)} tasks, for example "
            f"{', '.join(unknown[:3])}: the reward can't tell gained checks from those that passed before",
            where=where,
            remedy="run `t1 tasks check` on the tasks and name the list it writes in env.tasks, or use reward=dense",
        )


def _with(task: Task, baseline: Baseline) -> Task:
    passed = sum(task.counted(baseline.checks).values())
    return replace(task, baseline=passed, baseline_checks=baseline.checks, check_names=baseline.names)


def _parse(name: str, entry: Mapping) -> Baseline:
    checks, names = entry["checks"], entry.get("names", [])
    sane = isinstance(checks, dict) and all(isinstance(passed, bool) for passed in checks.values())
    if not sane or not isinstance(names, list) or not all(isinstance(check, str) for check in names):
        raise ValueError(f"task {name}: checks must be names with true or false, names a list of texts")
    return Baseline(checks, tuple(names))
