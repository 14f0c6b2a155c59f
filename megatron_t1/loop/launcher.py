"""What every launcher does: start one phase command, follow it, end it with everything it started.

`LocalLauncher` and `SlurmLauncher` differ only in the command line they put around the phase (`wrapped`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_t1.config.cluster import ResourcesConfig
from megatron_t1.config.schema import Config
from megatron_t1.environment.sandbox.scratch import clear_abandoned
from megatron_t1.errors import T1Error, naming
from megatron_t1.loop import reserve
from megatron_t1.loop.failure import OWN_ERROR, first_failure, last_lines, read_end
from megatron_t1.loop.ground import FREE_SHARE, GRACE
from megatron_t1.processes import LAUNCH_MARK, RUN_MARK, marked, send

MAIN_LOG = "main.log"
AGAIN = 75  # exit status of a phase that says itself that another launch may go well (EX_TEMPFAIL)
KINDS = ("rollout", "train")  # of phases: each has resources and an environment of its own (cluster.*)
LITTLE_SPACE = 2**20  # bytes; with less a phase can't write its own error
QUIET = (
    "ignore::FutureWarning,ignore::DeprecationWarning"  # of libraries, about each other; PYTHONWARNINGS overrides it
)


@dataclass(frozen=True)
class PhaseCommand:
    """One phase as a Python module with arguments; the launcher adds interpreter, ranks and machine."""

    name: str  # rollout | critic | actor | export | sft | ...
    kind: str  # rollout | train: whose resources and environment it uses
    module: str
    arguments: tuple[str, ...] = ()
    processes: int = 1  # ranks of one process group; with `distributed` they get RANK, WORLD_SIZE, MASTER_*
    distributed: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    code: int  # of the phase; 128 + N: died of signal N
    log: Path  # what to read: the first failing rank's log where it is known
    rank: int | None
    tail: str
    seconds: float
    reason: str = ""  # time-out, stopped, ...


class Stopped(Exception):
    """The loop was asked to stop (SIGTERM, SIGINT); the phase has been ended."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")


class Launcher(Protocol):
    def launch(self, command: PhaseCommand, log_dir: Path, *, echo: Callable[[str], None] | None = None) -> Exit: ...

    def preflight(self, kinds: Sequence[str] = ...) -> list[str]: ...


class BaseLauncher:
    """Starts the wrapped command under the supervisor and follows its log.

    Args:
        config: the run's configuration; `cluster` says where and how.
        stop_requested: returns the number of a signal that asks the loop to stop, or 0.
    """

    late_stop_s = 0.0  # how much later than its phase the loop may be told to stop

    def __init__(self, config: Config, stop_requested: Callable[[], int] = lambda: 0):
        self.config = config
        self.stop_requested = stop_requested

    def wrapped(self, command: PhaseCommand, log_dir: Path) -> list[str]:
        raise NotImplementedError

    def rank_logs(self, log_dir: Path) -> dict[int, list[Path]]:
        raise NotImplementedError

    def main_log(self, log_dir: Path) -> Path:
        """What rank 0 says."""
        return log_dir / MAIN_LOG

    def late_files_s(self, ended: Exit) -> float:
        """How late this node may see what a phase that ended so has written."""
        return 0.0

    def shown(self, command: PhaseCommand, line: str) -> str | None:
        """What of a main log's line is worth a line on the terminal."""
        return line

    def preflight(self, kinds: Sequence[str] = KINDS) -> list[str]:
        """Why phases of these kinds can't be started here, one line each."""
        return []

    def resources(self, command: PhaseCommand) -> ResourcesConfig:
        return self.config.cluster.resources(command.kind)

    def launch(self, command: PhaseCommand, log_dir: Path, *, echo: Callable[[str], None] | None = None) -> Exit:
        """Run the phase to its end. Nothing of it is alive afterwards.

        Args:
            log_dir: fresh directory for this attempt's logs.
            echo: gets every complete line of the main log (rank 0) as it appears.

        Raises:
            Stopped: the loop was asked to stop; the phase was ended first.
        """
        if requested := self.stop_requested():
            raise Stopped(requested)
        log_dir.mkdir(parents=True, exist_ok=True)
        log, followed = log_dir / MAIN_LOG, self.main_log(log_dir)
        token = command.environment.get(LAUNCH_MARK) or uuid.uuid4().hex
        resources = self.resources(command)
        environment = {
            "PYTHONWARNINGS": QUIET,
            **os.environ,
            "OMP_NUM_THREADS": str(resources.threads),
            "PYTHONUNBUFFERED": "1",
            **resources.env,
            **command.environment,
            LAUNCH_MARK: token,
            RUN_MARK: str(Path(self.config.run.dir).resolve()),
            GRACE: str(self.config.cluster.stop_grace_s),
            FREE_SHARE: str(self.config.cluster.gpu_free_share),
            "SPT_NOENV": "1",  # a process that changes its title keeps its environment, and so the marks, readable
        }

        failed = False

        def shown(line: str) -> None:
            nonlocal failed
            text = self.shown(command, line)
            failed = failed or (text is not None and OWN_ERROR.match(text) is not None)
            if echo is not None and text is not None and not failed:  # `require_success` says an error, once
                echo(text)

        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_t1.loop.supervisor", str(os.getpid()),
             str(self.config.cluster.stop_grace_s), str(log), *self.wrapped(command, log_dir)],
            env=_with_package_path(environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        reason = ""
        try:
            reason = self._follow(process, LogFollower(followed, shown), started)
        finally:
            if process.poll() is None:
                _end(process, self.config.cluster.stop_grace_s)
            send(marked(LAUNCH_MARK, token), signal.SIGKILL)  # only where the supervisor itself was killed
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        deadline = time.monotonic() + self.late_stop_s
        while code == 128 + signal.SIGTERM and not self.stop_requested() and time.monotonic() < deadline:
            time.sleep(0.05)
        requested = self.stop_requested()
        if requested and (reason == "stopped" or code == 128 + signal.SIGTERM):
            raise Stopped(requested)
        seconds = time.monotonic() - started
        if code == 0:
            return Exit(code, log, None, "", seconds, reason)
        if command.kind == "rollout":
            clear_abandoned(self.config.env.sandbox)
        failure = first_failure(log, self.rank_logs(log_dir))
        return Exit(code, failure.log, failure.rank, last_lines(failure.log), seconds, reason or failure.reason)

    def _follow(self, process: subprocess.Popen, follower: LogFollower, started: float) -> str:
        limit = self.config.cluster.phase_timeout_s
        try:
            while process.poll() is None:
                follower.advance()
                if self.stop_requested():
                    return "stopped"
                if time.monotonic() - started > limit:
                    return f"exceeded cluster.phase_timeout_s={limit:g}"
                time.sleep(0.05)
        finally:
            follower.advance(final=True)
        return ""

    def script(self, command: PhaseCommand, log_dir: Path, extra: Sequence[str] = ()) -> Path:
        """A bash script with the user's own set-up lines, which then becomes the command given as its arguments.

        It first looks at what earlier launches left on its node (`loop.ground`), with the phase's own interpreter.
        """
        path = log_dir / "launch.sh"
        look = '"$1" -m megatron_t1.loop.ground'
        lines = ["#!/bin/bash", "set -e", *self.resources(command).setup, *extra, look, 'exec "$@"']
        with naming(path):
            path.write_text("\n".join(lines) + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def python(self, command: PhaseCommand) -> str:
        return self.resources(command).python or sys.executable


class LogFollower:
    """Passes complete lines of a growing file on."""

    def __init__(self, path: Path, echo: Callable[[str], None]):
        self.path, self.echo, self.position, self.rest = path, echo, 0, b""

    def advance(self, *, final: bool = False) -> None:
        data = b""
        with contextlib.suppress(OSError):  # not there yet, or a file system that is away for a while
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read()
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if final and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            self.echo(line.decode(errors="replace"))


def next_attempt(directory: Path) -> int:
    """Number of a phase's next launch: none has logs under it yet, whatever else is known of earlier ones."""
    names = (path.name.removeprefix("attempt_") for path in (directory / "logs").glob("attempt_*"))
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0) + 1


def make_launcher(config: Config, stop_requested: Callable[[], int] = lambda: 0) -> BaseLauncher:
    if config.cluster.launcher == "slurm":
        from megatron_t1.loop.slurm import SlurmLauncher

        return SlurmLauncher(config, stop_requested)
    from megatron_t1.loop.local import LocalLauncher

    return LocalLauncher(config, stop_requested)


def may_pass(result: Exit) -> bool:
    """Whether another launch of a failed phase may go well: something killed it, or its engine was lost.

    Not where the phase itself said what is wrong, nor where it took too long or was told to stop.
    """
    if result.code == 0:
        return False
    if result.code == AGAIN or f"exit code {AGAIN}" in read_end(result.log.parent / MAIN_LOG):
        return True
    return not OWN_ERROR.search(result.tail) and not result.reason.startswith(("exceeded", "stopped"))


def require_success(result: Exit, command: PhaseCommand) -> None:
    """One readable error for a failed phase: what it said last, and where the rest is."""
    if result.code == 0 and not result.reason:
        return
    if result.reason:
        how = result.reason
    elif result.code > 128:
        number = result.code - 128
        known = number in {item.value for item in signal.Signals}
        how = f"died of {signal.Signals(number).name if known else f'signal {number}'}"
    else:
        how = f"failed with exit status {result.code}"
    rank = "" if result.rank is None else f" (first failing rank: {result.rank})"
    indented = "\n".join(f"    | {line}" for line in result.tail.splitlines())
    full = _no_room(result.log.parent)
    raise T1Error(
        f"{full}the {command.name} phase {how}{rank}; it said last:\n{indented or '    | (nothing)'}",
        where=str(result.log),
        remedy=f"{'free some space there' if full else 'mend what it names'} and start the same command again: "
        "finished steps are kept",
    )


def _no_room(directory: Path) -> str:
    """Why a phase couldn't even write down what went wrong: a full disk, or a quota; "" where it could."""
    if not directory.is_dir():
        return ""
    free = shutil.disk_usage(directory).free
    if free >= LITTLE_SPACE and reserve.refusal(directory, LITTLE_SPACE) == errno.EDQUOT:
        return f"the quota is used up (EDQUOT, though {free / 2**20:.1f} MiB are free); "
    return f"the disk is full ({free / 2**20:.1f} MiB are free); " if free < LITTLE_SPACE else ""


def _with_package_path(environment: dict[str, str]) -> dict[str, str]:
    """Phases import this very package, also from a checkout that was never installed.

    An installation isn't passed on: beside it lie its environment's other packages, and the phase's interpreter may
    belong to another environment.
    """
    parent = Path(__file__).resolve().parents[2]
    root, known = str(parent), environment.get("PYTHONPATH", "")
    if parent.name in ("site-packages", "dist-packages") or root in known.split(os.pathsep):
        return environment
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [root, known]))}


def _end(process: subprocess.Popen, grace_s: float) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace_s + 10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
