"""Which tasks a run plays: its sources, their weights, and what stored trials say against a task.

The choice is made once, when a run begins, and kept in RUN/tasks.json: a phase that starts again, on any node, plays
the same tasks, although the trials it was made from have grown, moved or gone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1 import sealed
from megatron_t1.config.schema import EnvConfig, SelectionConfig
from megatron_t1.environment.baseline import with_baselines
from megatron_t1.environment.loading import load_tasks
from megatron_t1.environment.sandbox.interface import builds_dockerfiles
from megatron_t1.environment.task import Task
from megatron_t1.environment.trials import Trial, read_trials
from megatron_t1.errors import IncompleteError, MismatchError, T1Error

VERSION = 2
ONLY_SOURCE = "tasks"  # the name of env.tasks, where env.sources names none
SHOWN = 5


@dataclass(frozen=True)
class Source:
    """A task set of the run.

    Attributes:
        weight: its share of an iteration's tasks, relative to the other sources'.
        names: tasks that are played, sorted.
    """

    name: str
    path: str
    weight: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Attributes:
    sources: what is played.
    left_out: task -> why it isn't.
    settings: the options that this was decided by.
    """

    sources: tuple[Source, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        sources = {source.name: {"path": source.path, "weight": source.weight, "tasks": list(source.names)}
                   for source in self.sources}  # fmt: skip
        return {"version": VERSION, "settings": self.settings, "sources": sources, "left_out": dict(self.left_out)}


@dataclass(frozen=True)
class TaskRate:
    """Of a task's trusted trials: how many, how many solved it, how many passed a check beyond the baseline."""

    trials: int = 0
    solved: int = 0
    touched: int = 0


def sources_of(env: EnvConfig) -> list[Source]:
    """The task sets that the options name, in the order of their names."""
    if not env.sources:
        return [Source(ONLY_SOURCE, env.tasks, 1.0)]
    return [Source(name, path, env.weights.get(name, 1.0)) for name, path in sorted(env.sources.items())]


def load_sources(env: EnvConfig) -> dict[str, dict[str, Task]]:
    """Source -> task name -> task, with what is known of their baselines.

    Raises:
        T1Error: a source can't be loaded, or two of them have a task of the same name.
    """
    loaded: dict[str, dict[str, Task]] = {}
    owners: dict[str, str] = {}
    builds = builds_dockerfiles(env.sandbox)
    for source in sources_of(env):
        place = Path(source.path)
        tasks = with_baselines(load_tasks(place, engine_builds=builds), place, env.baselines)
        twice = sorted(task.name for task in tasks if task.name in owners)
        if twice:
            raise T1Error(
                f"{len(twice)} tasks have the name of another source's, for example {twice[0]!r} of "
                f"{owners[twice[0]]!r}: records are kept by task name",
                where=f"env.sources.{source.name}={source.path}",
                remedy="rename the folders of one source, or leave these tasks out of its list",
            )
        owners.update({task.name: source.name for task in tasks})
        loaded[source.name] = {task.name: task for task in tasks}
    return loaded


def rates_of(trials: Iterable[Trial], tasks: Iterable[Task]) -> dict[str, TaskRate]:
    """Task name -> what its trusted trials came to. A trial belongs to a task by folder name or registry name."""
    named = {}
    for task in tasks:
        named.update({name: task for name in (task.name, task.package) if name})
    counts: dict[str, list[int]] = {}
    for trial in trials:
        task, verdict = named.get(trial.task), trial.verdict
        if task is None or not verdict.trusted:
            continue
        baseline = max(task.baseline, verdict.baseline, 0)
        row = counts.setdefault(task.name, [0, 0, 0])
        for index, holds in enumerate((True, verdict.solved, verdict.passed > baseline)):
            row[index] += holds
    return {name: TaskRate(*row) for name, row in counts.items()}


def objection(rate: TaskRate, selection: SelectionConfig) -> str:
    """Why a task isn't worth playing; "" when it is, or when too little is known."""
    if rate.trials < selection.min_trials:
        return ""
    share = rate.solved / rate.trials
    solved = f"{rate.solved} of {rate.trials} trials solve it"
    if share > selection.max_pass_rate:
        return f"{solved}: more than max_pass_rate={selection.max_pass_rate}"
    if share < selection.min_pass_rate:
        return f"{solved}: less than min_pass_rate={selection.min_pass_rate}"
    if selection.drop_untouched and not rate.touched:
        return f"none of {rate.trials} trials passes a check beyond the baseline"
    return ""


def choose(env: EnvConfig, selection: SelectionConfig, loaded: Mapping[str, Mapping[str, Task]]) -> Choice:
    """Decide afresh.

    Raises:
        T1Error: trials can't be read, or none of a source's tasks is left.
    """
    tasks = [task for source in loaded.values() for task in source.values()]
    trials = [trial for path in selection.trials for trial in read_trials(path)]
    rates = rates_of(trials, tasks)
    reasons = {task.name: objection(rates.get(task.name, TaskRate()), selection) for task in tasks}
    left_out = {name: reason for name, reason in sorted(reasons.items()) if reason}
    sources = []
    for source in sources_of(env):
        names = tuple(sorted(name for name in loaded[source.name] if name not in left_out))
        if not names:
            raise T1Error(
                f"no task of {source.path} is left: {next(iter(left_out.values()))}, ...",
                where="rollout.selection",
                remedy="weaken the filter, or give tasks of another difficulty",
            )
        sources.append(Source(source.name, source.path, source.weight, names))
    return Choice(tuple(sources), left_out, settings(env, selection))


def kept_choice(
    path: Path, env: EnvConfig, selection: SelectionConfig, loaded: Mapping[str, Mapping[str, Task]]
) -> Choice:
    """The choice in `path`, made and written there when there is none by these options.

    Raises:
        T1Error: see `choose`; the file can't be read; or a chosen task is gone.
    """
    stored = _read(path) if path.exists() else None
    if stored is None or stored.settings != settings(env, selection):
        stored = choose(env, selection, loaded)
        _say(stored, loaded)
        if path.exists():  # of other options: nothing of the run was finished by them
            sealed.write(path, stored.to_json())
        else:
            _write_first(path, stored)
            stored = _read(path)  # of the worker that was first
    gone = [name for source in stored.sources for name in source.names if name not in loaded.get(source.name, {})]
    if gone:
        raise MismatchError(
            f"{len(gone)} tasks that this run plays are gone, for example {gone[0]!r}",
            where=str(path),
            remedy="bring them back; or use another run.dir",
        )
    return stored


def settings(env: EnvConfig, selection: SelectionConfig) -> dict[str, Any]:
    """The options that a choice depends on."""
    sources = {source.name: [source.path, source.weight] for source in sources_of(env)}
    return {"sources": sources, "selection": asdict(selection)}


def _say(choice: Choice, loaded: Mapping[str, Mapping[str, Task]]) -> None:
    if len(choice.sources) > 1 or choice.left_out:
        for source in choice.sources:
            known, played = len(loaded[source.name]), len(source.names)
            print(f"tasks: {played} of {known} of {source.path}, weight {source.weight:g}", flush=True)
    for name, reason in list(choice.left_out.items())[:SHOWN]:
        print(f"  left out: {name}: {reason}", flush=True)
    if len(choice.left_out) > SHOWN:
        print(f"  and {len(choice.left_out) - SHOWN} more", flush=True)


def _write_first(path: Path, choice: Choice) -> None:
    """Of several workers the first one's file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        sealed.write(own, choice.to_json())
        try:
            os.link(own, path)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)


def _read(path: Path) -> Choice:
    try:
        raw = sealed.read(path)
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']!r}, known: {VERSION}")
        sources = [
            Source(name, entry["path"], float(entry["weight"]), _names(entry["tasks"]))
            for name, entry in raw["sources"].items()
        ]
        if not all(0 < source.weight < math.inf for source in sources):
            raise ValueError("a weight is not a positive number")
        return Choice(tuple(sources), dict(raw["left_out"]), dict(raw["settings"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteError(
            f"the run's choice of tasks can't be read: {error!r}",
            where=str(path),
            remedy="restore the file from a copy; without it the tasks are chosen again, perhaps others",
        ) from error


def _names(value: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("tasks must be a list of names")
    return tuple(value)
