"""The default sandbox: bubblewrap on a private root directory, no daemon, as root or as a normal user.

Each session has its own user, mount, pid, network, ipc, uts and cgroup namespaces. The file system survives from the
agent's session to the verifier's, processes never do.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.planted import describe_planted, exposed
from megatron_t1.environment.protection import verifier_environment, write_protected_tests
from megatron_t1.environment.sandbox.aside import in_thread
from megatron_t1.environment.sandbox.base import Base, base_for, modules_of, programs_of
from megatron_t1.environment.sandbox.build import build, find_user, refusal
from megatron_t1.environment.sandbox.cgroup import ControlGroups
from megatron_t1.environment.sandbox.changes import Snapshot
from megatron_t1.environment.sandbox.disk import FULL, has_room
from megatron_t1.environment.sandbox.guarantees import guarantees
from megatron_t1.environment.sandbox.inside import read_results
from megatron_t1.environment.sandbox.interface import (
    Change,
    CommandResult,
    Fetched,
    FileRefused,
    SandboxLost,
    VerifierRun,
)
from megatron_t1.environment.sandbox.oneshot import run_script
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.overlay import OverlayRoot, may_mount_overlays
from megatron_t1.environment.sandbox.own_files import OwnFiles, child_command
from megatron_t1.environment.sandbox.process import PATH, ROOT, SandboxProcess, User, host_identity, start_bwrap
from megatron_t1.environment.sandbox.root import PrivateRoot, remove_tree
from megatron_t1.environment.sandbox.scratch import ScratchDirectory, shared_base
from megatron_t1.environment.sandbox.shell import Shell
from megatron_t1.environment.task import Files, Task

LOGS = "logs"  # what the verifier's processes see at /logs/verifier, on the sandbox's disk
OPEN_FILES = 16_384  # descriptors of the driver
# Of a write, what says something about the machine; everything else about what stands in the sandbox.
OF_MACHINE = (errno.EIO, errno.ENOENT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ESTALE)


class BubblewrapSandbox:
    """See `environment.sandbox.interface.Sandbox`.

    Args:
        config: limits, bases, and the host user for a driver that is root.
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
        self._groups: ControlGroups | None = None
        self._was_full = False
        self._root: PrivateRoot | None = None
        self._snapshot: Snapshot | None = None
        self._shell: Shell | None = None
        self._env: dict[str, str] = {}
        self._workdir = "/"
        self._own = OwnFiles()
        self._user = ROOT
        self._bounds: dict[str, str] = {}

    @staticmethod
    def refusal(task: Task, config: SandboxConfig) -> str:
        """Why `start` would refuse the task, as far as that is known before anything is built; "" for no reason."""
        return refusal(task, config)

    async def start(self, task: Task) -> None:
        image = task.image
        base = base_for(image.base, self._config)
        await self._end_session()
        self._snapshot = None
        try:
            if self._scratch is None:
                self._scratch, self._groups = self._new_scratch()
            await in_thread(lambda: self._reset_root(base))
        except OSError as error:
            raise SandboxLost(f"can't write the sandbox's root: {error}", where=self._base) from error
        self._was_full = False
        await build(task, self._root, base, self._run_once)
        self._user = find_user(self._root, image.user)
        self._env, self._workdir, self._own = dict(image.env), image.workdir, OwnFiles()
        await in_thread(self._root.seal)
        self._bounds = guarantees(self._config, self._scratch, self._root)
        self._snapshot = await in_thread(self._root.snapshot)
        self._shell = Shell(self._spawn_shell, self._workdir, self._output_limit)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        if self._shell is None:
            raise SandboxLost("the sandbox has no session: it was not started, or its verifier has run")
        if not self._shell.alive and not self._root.files.is_directory(self._shell.cwd):
            self._shell.cwd = "/"
        result = await self._shell.run(command, timeout_s)
        self._look_at_disk()
        return result

    async def execute(self, command: str, timeout_s: float) -> CommandResult:
        return await BubblewrapSandbox.run(self, child_command(command), timeout_s)

    async def put_files(self, files: Files) -> None:
        root = self._started().files

        def write() -> None:
            for inside, (content, mode) in files.items():
                try:
                    root.write(inside, content, mode)
                except OSError as error:
                    kind = SandboxLost if error.errno in OF_MACHINE else FileRefused
                    raise kind(f"can't write {inside}: {error.strerror}", where=str(root.path)) from error

        await in_thread(write)
        self._look_at_disk()

    async def get_files(self, paths: Sequence[str], limit_bytes: int) -> Fetched:
        root, fetched = self._started().files, Fetched()

        def read() -> None:
            for inside in paths:
                try:
                    fetched.files[inside] = root.read(inside, limit_bytes)
                except OSError as error:
                    fetched.problems[inside] = error.strerror or str(error)
                except ValueError as error:
                    fetched.problems[inside] = str(error)

        await in_thread(read)
        return fetched

    async def changes(self) -> list[Change]:
        self._started()
        return await in_thread(self._snapshot.changes)

    def guarantees(self) -> Mapping[str, str]:
        return self._bounds or guarantees(self._config)

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        if self._shell is None:
            raise SandboxLost("the sandbox has no session to verify")
        await self._end_session()
        self._look_at_disk()
        env = verifier_environment(task, self._env)
        doubt = FULL if self._was_full else await self._planted(task, env)
        if doubt:
            return VerifierRun(None, "", False, doubt=doubt)
        tests, logs = self._scratch.path / "tests", self._scratch.disk / LOGS
        try:
            await in_thread(lambda: self._prepare_verifier(task, tests, logs))
        except OSError as error:
            raise SandboxLost(f"can't prepare the verifier: {error}", where=str(self._scratch.path)) from error
        exit_code, output = await self._run_once(
            "exec /bin/bash --noprofile --norc /tests/test.sh",
            env=env,
            workdir=self._workdir if self._root.files.is_directory(self._workdir) else "/",
            binds=["--ro-bind", str(tests), "/tests", "--bind", str(logs), "/logs/verifier"],
            user=self._user,
            timeout_s=timeout_s,
        )
        files, problems = read_results(logs, names)
        self._look_at_disk()
        doubt = FULL if self._was_full else ""
        return VerifierRun(exit_code, output.text()[0], exit_code is None, files, problems, doubt)

    async def resume(self, files: Files) -> None:
        self._started()
        await self._end_session()
        workdir = await in_thread(lambda: self._root.files.real(self._workdir))  # as changes are named
        await self.put_files(self._own.place(files, workdir))
        self._shell = Shell(self._spawn_shell, self._workdir, self._output_limit)

    async def stop(self) -> None:
        try:
            await self._end_session()
        finally:
            scratch, self._scratch, self._root, self._snapshot = self._scratch, None, None, None
            if scratch is not None:
                await in_thread(scratch.remove)

    def _started(self) -> PrivateRoot:
        if self._snapshot is None:
            raise SandboxLost("the sandbox was not started")
        return self._root

    def _new_scratch(self) -> tuple[ScratchDirectory, ControlGroups]:
        scratch = ScratchDirectory(self._base, self._config.disk_mb, self._config.max_files)
        try:
            return scratch, scratch.limit(self._config)
        except BaseException:
            scratch.remove()
            raise

    def _reset_root(self, base: Base) -> None:
        """A fresh root of the kind that this base and this driver allow."""
        if self._root is None or self._root.system != base.root:
            if self._root is not None:
                self._root.remove()
            scratch = self._scratch
            if scratch.bounded and not base.host and may_mount_overlays(base.root, scratch):
                self._root = OverlayRoot(scratch, self._owner, base.root)
            else:
                self._root = PrivateRoot(scratch.disk / "root", self._owner, base.root, scratch.keeper)
        remove_tree(self._scratch.disk / LOGS)
        self._root.reset()

    async def _planted(self, task: Task, env: Mapping[str, str]) -> str:
        """Why the verifier can't be trusted after what the agent left on its search paths; "" for no reason."""

        def look() -> list[str]:
            found = exposed(task, {"PATH": PATH, "HOME": self._user.home, **env}, real=self._root.files.real)
            system = self._root.system
            return found.planted(self._snapshot.changes(), programs_of(system), modules_of(system)) if found else []

        files = self._root.files

        def read(path: str, limit: int) -> bytes:
            status = files.status(path.lstrip("/"))
            if status is None or not stat.S_ISREG(status.st_mode):
                raise ValueError("is not a regular file")
            return files.read(path, limit)

        planted = await in_thread(look)
        left = await self._own.others(planted, lambda path, limit: in_thread(lambda: read(path, limit)))
        return describe_planted(left)

    def _look_at_disk(self) -> None:
        self._was_full = self._was_full or not has_room(self._scratch.disk, self._config)

    def _prepare_verifier(self, task: Task, tests: Path, logs: Path) -> None:
        """A protected copy of the tests and an empty log directory, outside the root, and where both get mounted.

        What the verifier's processes write counts against the sandbox's disk.
        """
        remove_tree(logs)
        logs.mkdir()
        if self._owner is not None:
            os.chown(logs, self._owner, self._owner)
        write_protected_tests(task, tests)
        for name in ("tests", "logs"):
            self._root.fresh_mount_point(name)
        os.mkdir(self._root.path / "logs" / "verifier")

    async def _end_session(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.end()

    async def _spawn_shell(self, script: str, output_fd: int, pass_fds: tuple[int, int], cwd: str) -> SandboxProcess:
        self._snapshot.settle()
        return await start_bwrap(
            self._config,
            self._root,
            script,
            env=self._env,
            workdir=cwd,
            user=self._user,
            groups=self._groups,
            output_fd=output_fd,
            pass_fds=pass_fds,
        )

    async def _run_once(
        self,
        script: str,
        *,
        env: Mapping[str, str],
        workdir: str,
        timeout_s: float,
        binds: Sequence[str] = (),
        arguments: Sequence[str] = (),
        user: User = ROOT,
    ) -> tuple[int | None, OutputBuffer]:
        return await run_script(
            self._config,
            self._root,
            script,
            output_path=self._scratch.disk / "output",
            timeout_s=timeout_s,
            env=env,
            workdir=workdir,
            binds=binds,
            arguments=arguments,
            user=user,
            groups=self._groups,
        )


def _raise_open_files() -> None:
    """A session holds six descriptors; the usual soft limit of 1,024 would end at some 150 episodes at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
