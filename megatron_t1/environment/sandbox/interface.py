"""What an episode needs from a sandbox: any class like this can be named in env.sandbox._target_."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.task import Files, Task
from megatron_t1.errors import T1Error


class SandboxLost(T1Error):
    """The sandbox died, or can't be started or brought to the task's initial state: never the agent's result."""


class FileRefused(SandboxLost):
    """A file can't be written, and the sandbox lives: something else stands in its place, or there is no room. Between
    two steps of a task that can be the agent's doing, so it is no reason to play the episode again."""


@dataclass(frozen=True)
class CommandResult:
    """Outcome of one command of the agent.

    Attributes:
        exit_code: None when the command was killed at its time limit or the shell's end left none.
        output: stdout and stderr in the order written; bytes that are no UTF-8 are replaced, NULs removed. Of a longer
            output head and tail are kept.
        omitted: bytes cut out of the middle of `output`.
    """

    exit_code: int | None
    output: str
    timed_out: bool = False
    omitted: int = 0


RESULT_LIMIT_BYTES = 4 << 20  # of one result file of a verifier


@dataclass(frozen=True)
class VerifierRun:
    """What the task's tests/test.sh left.

    Attributes:
        files: regular files found in /logs/verifier among those asked for, name -> content.
        problems: name -> why a file that is there was not read (symbolic link, too large, ...).
        doubt: why nothing of this may be trusted, whatever the files say; "" where there is no such reason.
    """

    exit_code: int | None
    output: str
    timed_out: bool
    files: dict[str, bytes] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    doubt: str = ""


@dataclass(frozen=True)
class Fetched:
    """What `get_files` read.

    Attributes:
        files: path as asked for -> content.
        problems: path as asked for -> why there is no content (missing, not a regular file, too large, ...).
    """

    files: dict[str, bytes] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Change:
    """One path (absolute, in the sandbox) that differs from the state that `start` built.

    A directory is listed when it was added or removed; what was added or removed with it is listed too. One whose
    content the driver can't list any more is "modified".

    Attributes:
        entry: what stands there now ("closed": a directory whose content the driver can't list, "locked": a file that
            its owner can't write); "" where the backend doesn't say, or for what is gone.
    """

    path: str
    kind: Literal["added", "modified", "removed"]
    entry: Literal["", "file", "locked", "directory", "closed", "link", "other"] = field(default="", compare=False)


@runtime_checkable
class Sandbox(Protocol):
    """Constructed as `Class(config: SandboxConfig, scratch_dir: Path, output_limit: int)`; one episode at a time."""

    async def start(self, task: Task) -> None:
        """Build the task's initial state; on a started sandbox drop everything of the task before.

        Raises:
            T1Error: the task's Dockerfile can't be followed.
            SandboxLost: the machine refuses the sandbox, or a step of the Dockerfile fails in it.
        """

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run in the persistent shell: cwd and environment stay from call to call. Raises SandboxLost."""

    async def execute(self, command: str, timeout_s: float) -> CommandResult:
        """Run for the driver, in a shell of its own below the session's: the session's directory and variables stay as
        they are, and what the command starts in the background goes on with it. Raises SandboxLost."""

    async def put_files(self, files: Files) -> None:
        """Write regular files: absolute path -> (content, permission bits). Folders are made, a link or file in the
        file's place is replaced, links above it are followed as a process inside would. The session goes on.

        Raises:
            FileRefused: a directory in the file's place, a file in a folder's, a path in the read-only system, no room.
            SandboxLost: the sandbox is gone.
        """

    async def get_files(self, paths: Sequence[str], limit_bytes: int) -> Fetched:
        """Read regular files of at most `limit_bytes` each; links are followed as a process inside would. Raises
        SandboxLost only where the sandbox is gone."""

    async def changes(self) -> list[Change]:
        """What differs from the state that `start` built, sorted by path. Raises SandboxLost."""

    def guarantees(self) -> Mapping[str, str]:
        """What bounds this sandbox on this machine: memory, processes, cpu, disk, system, calls, network -> how."""

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        """End the agent's session, bring the tests in, run tests/test.sh once. `run` is then refused until `resume`."""

    async def resume(self, files: Files) -> None:
        """Begin the next step of a task: a new session on what is there, in the image's working directory, with the
        step's `files` (relative to that directory) put in place. No process of an earlier session or verifier lives,
        none of its tests and results is left. While nobody changes them, `files` count as built, not as changed.

        Raises:
            FileRefused: one of `files` can't be written. `run` is then refused.
            SandboxLost: the sandbox is gone.
        """

    async def stop(self) -> None:
        """Leave no process and no file. May be called in any state, and twice."""


def builds_dockerfiles(config: SandboxConfig) -> bool:
    """Whether the configured class hands environment/Dockerfile to an engine (its attribute `builds_dockerfiles`)."""
    module, _, name = config._target_.rpartition(".")
    try:
        return bool(getattr(getattr(importlib.import_module(module), name), "builds_dockerfiles", False))
    except (ImportError, AttributeError, ValueError):
        return False  # said when the class is wanted
