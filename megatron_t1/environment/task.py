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
class Step:
    """One step of a task of several: read and shown, never played."""

    name: str
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float


@dataclass(frozen=True)
class Task:
    """One job for the agent.

    Attributes:
        name: unique in its set, usable as a file name.
        directory: where it was loaded from, in Harbor's format; None for a task in memory.
        env: environment variables of the agent's commands and of the verifier, on top of the Dockerfile's.
        verifier_env, solution_env: more of them, for the verifier and for the reference solution alone.
        baseline: checks that pass when nothing is done; -1 unknown.
        baseline_checks: the same by name; None unknown (environment.baseline).
        check_names: every check there is, from the reference solution's run; empty: unknown.
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
        return self.content.files if self.content is not None else _read_tree(self.environment_dir)

    def test_files(self) -> Files:
        return self.content.tests if self.content is not None else _read_tree(self.tests_dir)

    def solution_files(self) -> Files:
        return self.content.solution if self.content is not None else _read_tree(self.solution_dir)


def _read_tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    found = {}
    if not directory.is_dir():
        return found
    root, reader = directory.parent.resolve(), Reader()
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
