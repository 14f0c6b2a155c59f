"""A task: an instruction, the files it starts from, and the tests that count what was achieved.

A task lies in a directory (Harbor's format) or, where thousands are made and thrown away, in memory. `Task.image`,
`Task.test_files` and `Task.solution_files` give the same answer for both; nothing else looks at the difference.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_t1.environment.image import CopyFiles, Image, MakeDirectory, load_image
from megatron_t1.environment.tree import Reader, walk
from megatron_t1.errors import T1Error

DEFAULT_WORKDIR = "/app"

MEAN, FINAL = "mean", "final"  # multi_step_reward_strategy

Files = Mapping[str, tuple[bytes, int]]  # relative path -> content, permission bits


@dataclass(frozen=True)
class TaskContent:
    """A task in memory. Paths of `files` and `directories` are relative to the task's workdir."""

    files: Files = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    tests: Files = field(default_factory=dict)  # below /tests
    solution: Files = field(default_factory=dict)  # below /solution


@dataclass(frozen=True)
class Resources:
    """What a task asks for; 0 where it says nothing. A sandbox has the limits of `env.sandbox`, not these."""

    cpus: float = 0.0
    memory_mb: int = 0
    storage_mb: int = 0
    build_timeout_s: float = 600.0


@dataclass(frozen=True)
class Healthcheck:
    """A command that has to succeed before a step's agent begins. Within `start_period_s` failures don't count, and it
    is tried again every `start_interval_s`; then `retries` failures, `interval_s` apart, are too many."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class Step:
    """One step of a task of several (docs/tasks.md).

    Attributes:
        verifier_env: variables of this step's verifier, on top of the task's.
        min_reward: of the step's own rewards, by name, the least with which the next step is begun.
    """

    name: str
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    min_reward: Mapping[str, float] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True)
class Task:
    """One job for the agent.

    Attributes:
        name: unique in its set, usable as a file name.
        directory: where it was loaded from, in Harbor's format; None for a task in memory.
        env: environment variables of the agent's commands and of the verifier, on top of the Dockerfile's.
        verifier_env, solution_env: more of them, for the verifier and for the reference solution alone.
        instruction: what the agent is told first; of several steps, the first one's.
        baseline: of the checks that count, how many pass when nothing is done; -1 unknown.
        baseline_checks: all of them by name, "STEP/CHECK" where there are steps; None unknown (environment.baseline).
        check_names: every check there is, from the reference solution's run; empty: unknown.
        steps: of a task of several; each is played as `stages` has it.
        strategy: which steps count: MEAN, all of them, or FINAL, the last.
        step: in one of `stages`, the step's name.
        gated: in one of `stages`, whether its own rewards decide about the next step.
        package: its name in a registry, "organisation/name"; "" when it states none.
        obstacles: what it needs and no sandbox here gives, by field. Such a task can be looked at, not played.
        metadata: the [metadata] table of task.toml. `result = "exit_code"` declares that the verifier leaves no result
            file and that its exit status (0 or 1) is the result. `unknown_fields` holds what task.toml says beyond the
            schema, by dotted name.
    """

    name: str
    instruction: str
    directory: Path | None = None
    content: TaskContent | None = None
    workdir: str = ""  # empty: the Dockerfile's WORKDIR
    docker_image: str = ""  # a ready image, for a task without a Dockerfile
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    verifier_timeout_s: float = 600.0
    agent_timeout_s: float = 600.0
    baseline: int = -1
    baseline_checks: Mapping[str, bool] | None = None
    check_names: tuple[str, ...] = ()
    package: str = ""
    resources: Resources = Resources()
    steps: tuple[Step, ...] = ()
    strategy: str = MEAN
    step: str = ""
    gated: bool = False
    obstacles: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def environment_dir(self) -> Path | None:
        return None if self.directory is None else self.directory / "environment"

    @property
    def tests_dir(self) -> Path | None:
        return None if self.directory is None else self.directory / "tests"

    @property
    def solution_dir(self) -> Path | None:
        return None if self.directory is None else self.directory / "solution"

    @cached_property
    def image(self) -> Image:
        """What the sandbox builds before the agent starts. Raises T1Error for a Dockerfile that can't be followed."""
        if self.content is not None:
            workdir = self.workdir or DEFAULT_WORKDIR
            steps = [MakeDirectory(workdir)]
            steps += [MakeDirectory(f"{workdir}/{path}") for path in self.content.directories]
            steps.append(CopyFiles({f"{workdir}/{path}": entry for path, entry in self.content.files.items()}))
            return Image(workdir=workdir, env=dict(self.env), steps=tuple(steps))
        if self.docker_image and not (self.environment_dir / "Dockerfile").exists():
            return Image(self.workdir or "/", dict(self.env), (), self.docker_image)
        image = load_image(self.environment_dir, where=f"task {self.name}")
        return replace(image, workdir=self.workdir or image.workdir, env={**image.env, **self.env})

    def environment_files(self) -> Files:
        """What its image is built from, by name in environment/; in memory, what lies in its workdir."""
        return self.content.files if self.content is not None else _read_tree(self.environment_dir, self.directory)

    @property
    def step_dir(self) -> Path | None:
        return self.directory / "steps" / self.step if self.directory is not None and self.step else None

    @cached_property
    def stages(self) -> tuple[Task, ...]:
        """Its steps as tasks of one instruction each, in their order; itself where it has none."""
        return tuple(map(self._stage, self.steps)) or (self,)

    def _stage(self, step: Step) -> Task:
        prefix, known = f"{step.name}/", self.baseline_checks
        own = {n.removeprefix(prefix): p for n, p in (known or {}).items() if n.startswith(prefix)} or None
        stage = replace(
            self,
            instruction=step.instruction,
            verifier_env={**self.verifier_env, **step.verifier_env},
            verifier_timeout_s=step.verifier_timeout_s,
            agent_timeout_s=step.agent_timeout_s,
            baseline=-1 if own is None else sum(own.values()),
            baseline_checks=own,
            check_names=tuple(n.removeprefix(prefix) for n in self.check_names if n.startswith(prefix)),
            steps=(),
            step=step.name,
            gated=bool(step.min_reward),
        )
        if "image" in self.__dict__:
            stage.__dict__["image"] = self.image
        return stage

    def counted(self, checks: Mapping[str, bool]) -> dict[str, bool]:
        """Of checks by name, those that a verdict of the whole task counts."""
        prefix = f"{self.steps[-1].name}/" if self.steps and self.strategy == FINAL else ""
        return {name: passed for name, passed in checks.items() if name.startswith(prefix)}

    def test_files(self) -> Files:
        """What lies in tests/; in a stage, with the step's own over it."""
        if self.content is not None:
            return self.content.tests
        own = _read_tree(self.step_dir / "tests", self.directory) if self.step_dir else {}
        return dict(sorted((_read_tree(self.tests_dir, self.directory) | own).items()))

    def solution_files(self) -> Files:
        """What lies in solution/; in a stage, in the step's own where it has one."""
        if self.content is not None:
            return self.content.solution
        own = self.step_dir / "solution" if self.step_dir else self.solution_dir
        return _read_tree(own if own.is_dir() else self.solution_dir, self.directory)

    def workdir_files(self) -> Files:
        """What a stage's step brings into the working directory."""
        return _read_tree(self.step_dir / "workdir", self.directory) if self.step_dir else {}


def _read_tree(directory: Path, root: Path) -> dict[str, tuple[bytes, int]]:
    """Files below a directory; links have to stay in `root`."""
    found = {}
    if not directory.is_dir():
        return found
    root, reader = root.resolve(), Reader()
    try:
        for entry in walk(directory, ignored=("__pycache__",)):
            if stat.S_ISLNK(entry.mode):
                if not os.path.isfile(entry.path):
                    continue
                if not Path(entry.path).resolve().is_relative_to(root):
                    raise T1Error(
                        f"{entry.name} links to a file outside of the task",
                        where=str(directory),
                        remedy="replace the link by a copy",
                    )
            elif not stat.S_ISREG(entry.mode):
                continue
            found[entry.name] = reader.read(entry.path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        said = error.strerror if isinstance(error, OSError) else error
        raise T1Error(
            f"can't read the task's files: {said}", where=str(directory), remedy="check their size and permissions"
        ) from error
    return dict(sorted(found.items()))
