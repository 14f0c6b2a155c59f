"""What an episode needs from a sandbox: any class like this can be named in env.sandbox._target_."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error


class SandboxLost(T1Error):
    """The sandbox died, or can't be started or brought to the task's initial state: never the agent's result."""


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

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        """End the agent's session, bring the tests in, run tests/test.sh once. `run` is then refused."""

    async def stop(self) -> None:
        """Leave no process and no file. May be called in any state, and twice."""
