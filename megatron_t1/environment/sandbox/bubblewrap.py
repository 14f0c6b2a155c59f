"""The default sandbox: bubblewrap on a private root directory, no daemon, as root or as a normal user.

Each session has its own user, mount, pid, network, ipc, uts and cgroup namespaces. The file system survives from the
agent's session to the verifier's, processes never do.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.image import CopyFiles, MakeDirectory, RunCommand
from megatron_t1.environment.sandbox.disk import FULL, has_room
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost, VerifierRun
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.process import SandboxProcess, host_identity, start_bwrap
from megatron_t1.environment.sandbox.root import PrivateRoot, read_regular
from megatron_t1.environment.sandbox.scratch import ScratchDirectory, shared_base
from megatron_t1.environment.sandbox.shell import Shell
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error

RESULT_LIMIT_BYTES = 4 << 20  # of one verifier result file
VERIFIER_OUTPUT_LIMIT = 20_000
BUILD_TIMEOUT_S = 600.0
OPEN_FILES = 16_384  # descriptors of the driver


class BubblewrapSandbox:
    """See `environment.sandbox.interface.Sandbox`.

    Args:
        config: limits, and the host user for a driver that is root.
        scratch_dir: below which private roots lie; None: `config.scratch_dir`, else the system's temporary directory.
            That is used too when the sandbox's host user can't reach the one named (below a closed home of root).
        output_limit: bytes of one command's output that are kept.
    """

    def __init__(self, config: SandboxConfig, scratch_dir: str | Path | None = None, output_limit: int = 16_000):
        self._config, self._output_limit = config, output_limit
        self._owner = host_identity(config)
        _raise_open_files()
        self._base = shared_base(scratch_dir or config.scratch_dir, self._owner)
        self._scratch: ScratchDirectory | None = None
        self._was_full = False
        self._root: PrivateRoot | None = None
        self._shell: Shell | None = None
        self._env: dict[str, str] = {}

    async def start(self, task: Task) -> None:
        image = task.image
        await self._end_session()
        try:
            if self._scratch is None:
                self._scratch = ScratchDirectory(self._base, self._config.disk_mb, self._config.max_files)
                self._root = PrivateRoot(self._scratch.disk / "root", self._owner)
            await _in_thread(self._root.reset)
        except OSError as error:
            raise SandboxLost(f"can't write the sandbox's root: {error}", where=self._base) from error
        self._was_full = False
        for step in image.steps:
            await self._build(step, task)
        self._env = dict(image.env)
        self._shell = Shell(self._spawn_shell, image.workdir, self._output_limit)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        if self._shell is None:
            raise SandboxLost("the sandbox has no session: it was not started, or its verifier has run")
        if not self._shell.alive and not self._root.is_directory(self._shell.cwd):
            self._shell.cwd = "/"
        result = await self._shell.run(command, timeout_s)
        self._look_at_disk()
        return result

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        if self._shell is None:
            raise SandboxLost("the sandbox has no session to verify")
        await self._end_session()
        self._look_at_disk()
        if self._was_full:
            return VerifierRun(None, "", False, doubt=FULL)
        tests, logs = self._scratch.path / "tests", self._scratch.disk / "logs"
        try:
            self._prepare_verifier(task, tests, logs)
        except OSError as error:
            raise SandboxLost(f"can't prepare the verifier: {error}", where=str(self._scratch.path)) from error
        binds = ["--ro-bind", str(tests), "/tests", "--bind", str(logs), "/logs/verifier"]
        env = {**self._env, "PYTHONNOUSERSITE": "1", **task.verifier_env}
        workdir = task.image.workdir if self._root.is_directory(task.image.workdir) else "/"
        exit_code, output = await self._run_once(
            "exec /bin/bash --noprofile --norc /tests/test.sh",
            env=env,
            workdir=workdir,
            binds=binds,
            timeout_s=timeout_s,
        )
        files, problems = {}, {}
        for name in names:
            try:
                files[name] = read_regular(logs / name, RESULT_LIMIT_BYTES)
            except FileNotFoundError:
                pass
            except (ValueError, OSError) as error:
                problems[name] = str(error)
        self._look_at_disk()
        doubt = FULL if self._was_full else ""
        return VerifierRun(exit_code, output.text()[0], exit_code is None, files, problems, doubt)

    async def stop(self) -> None:
        try:
            await self._end_session()
        finally:
            scratch, self._scratch = self._scratch, None
            if scratch is not None:
                await _in_thread(scratch.remove)

    def _look_at_disk(self) -> None:
        self._was_full = self._was_full or not has_room(self._scratch.disk, self._config)

    def _prepare_verifier(self, task: Task, tests: Path, logs: Path) -> None:
        """A protected copy of the tests and an empty log directory, outside the root, and where both get mounted.

        What the verifier's processes write counts against the sandbox's disk.
        """
        for path in (tests, logs):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        if self._owner is not None:
            os.chown(logs, self._owner, self._owner)
        _write_tests(tests, task)
        for name in ("tests", "logs"):
            self._root.fresh_mount_point(name)
        os.mkdir(self._root.path / "logs" / "verifier")

    async def _end_session(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.end()

    async def _build(self, step: MakeDirectory | CopyFiles | RunCommand, task: Task) -> None:
        try:
            if isinstance(step, MakeDirectory):
                self._root.make_directory(step.path)
            elif isinstance(step, CopyFiles):
                self._root.copy(step)
            else:
                await self._build_run(step, task)
        except OSError as error:
            raise SandboxLost(f"can't build the task's files: {error}", where=f"task {task.name}") from error
        except T1Error as error:  # shows only while it is built: one episode's loss, not the phase's end
            raise SandboxLost(error.problem, where=f"task {task.name}: {error.where}", remedy=error.remedy) from error

    async def _build_run(self, step: RunCommand, task: Task) -> None:
        exit_code, output = await self._run_once(
            step.command, env=step.env, workdir=step.workdir, binds=(), timeout_s=BUILD_TIMEOUT_S
        )
        if exit_code != 0:
            reason = "ran out of time" if exit_code is None else f"exit status {exit_code}"
            raise SandboxLost(
                f"RUN {step.command[:200]!r}: {reason}: {output.text()[0][-500:].strip()}",
                where="environment/Dockerfile",
                remedy="the sandbox has no network and the host's own programs: prepare the files with COPY instead",
            )

    async def _spawn_shell(self, script: str, output_fd: int, pass_fds: tuple[int, int], cwd: str) -> SandboxProcess:
        return await start_bwrap(
            self._config, self._root, script, env=self._env, workdir=cwd, output_fd=output_fd, pass_fds=pass_fds
        )

    async def _run_once(
        self, script: str, *, env, workdir: str, binds, timeout_s: float
    ) -> tuple[int | None, OutputBuffer]:
        """One script in namespaces of its own, everything dead afterwards. Exit status None: out of time."""
        output_path = self._scratch.disk / "output"
        descriptor = os.open(output_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await start_bwrap(
                self._config, self._root, script, env=env, workdir=workdir, binds=binds, output_fd=descriptor
            )
            try:
                exit_code = await process.wait(timeout_s)
                complaint = process.complaint()
            finally:
                await process.end()
            if complaint:
                raise SandboxLost(f"the sandbox could not be set up: {complaint}", where=str(self._root.path))
            output = OutputBuffer(VERIFIER_OUTPUT_LIMIT)
            os.lseek(descriptor, 0, os.SEEK_SET)
            while block := os.read(descriptor, 1 << 20):
                output.feed(block)
            return exit_code, output
        finally:
            os.close(descriptor)
            output_path.unlink(missing_ok=True)


async def _in_thread(work: Callable[[], None]) -> None:
    """File work aside, so that a large tree doesn't hold up other episodes; it is finished also when cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _raise_open_files() -> None:
    """A session holds six descriptors; the usual soft limit of 1,024 would end at some 150 episodes at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _write_tests(directory: Path, task: Task) -> None:
    """The protected copy: owned by the driver, bound read-only."""
    for name, (content, mode) in task.test_files().items():
        path = directory / name
        if posixpath.normpath(name).startswith(("..", "/")):
            raise T1Error(f"test file {name!r} lies outside tests/", where=f"task {task.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode | 0o444)
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o755)
