"""A task: an instruction, the files it starts from, and the tests that count what was achieved.

A task lies in a directory (Harbor's format) or, where thousands are made and thrown away, in memory. `Task.image`,
`Task.test_files` and `Task.solution_files` give the same answer for both; nothing else looks at the difference.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_t1.environment.image import CopyFiles, Image, MakeDirectory, load_image
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
class Task:
    """One job for the agent.

    Attributes:
        name: unique in its set, usable as a file name.
        directory: where it was loaded from; None for a task in memory.
        env: environment variables of the agent's commands and of the verifier, on top of the Dockerfile's.
        baseline: checks that pass when nothing is done; -1 unknown.
        metadata: the [metadata] table of task.toml. `result = "exit_code"` declares that the verifier leaves no result
            file and that its exit status (0 or 1) is the result.
    """

    name: str
    instruction: str
    directory: Path | None = None
    content: TaskContent | None = None
    workdir: str = ""  # empty: the Dockerfile's WORKDIR
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    verifier_timeout_s: float = 600.0
    agent_timeout_s: float = 600.0
    baseline: int = -1
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
        image = load_image(self.environment_dir, where=f"task {self.name}")
        return Image(self.workdir or image.workdir, {**image.env, **self.env}, image.steps)

    def test_files(self) -> Files:
        return self.content.tests if self.content is not None else _read_tree(self.tests_dir)

    def solution_files(self) -> Files:
        return self.content.solution if self.content is not None else _read_tree(self.solution_dir)


def _read_tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    found = {}
    if not directory.is_dir():
        return found
    try:
        for path in sorted(directory.rglob("*")):
            if "__pycache__" not in path.parts and path.is_file():
                found[str(path.relative_to(directory))] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    except OSError as error:
        raise T1Error(
            f"can't read the task's files: {error}", where=str(directory), remedy="check its permissions"
        ) from error
    return found
