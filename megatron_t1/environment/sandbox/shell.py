"""A persistent bash: commands go in over one channel, their output comes over another, their status over a third.

When a status arrives, everything the command wrote already lies in the output pipe, so no marker is mixed into the
output. Commands and status use sockets: a pipe could be opened again (/proc/PID/fd) by what the shell starts, which
could then answer in its place. Every command has a random mark, which its status repeats: what a subshell of an earlier
command writes to the shell's own descriptors answers no later one. A command can fake its own status, which cheats only
itself: nothing is scored from here.

What ends or wedges the shell itself (`exit`, `exec`, a loop of builtins at its time limit) ends the whole process tree;
the next command gets a new shell in the last known directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable

from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.process import SandboxProcess

# fd 7: the true standard output, put back after a command that moved it with exec; 8: status; 9: commands.
# The loop's descriptors are closed for the command (bash keeps its own copies close-on-exec).
LOOP = (
    "exec 9<&{command} 8>&{status} {command}<&- {status}>&- 7>&1; "
    "while IFS= builtin read -r -d '' -u 9 __mark && IFS= builtin read -r -d '' -u 9 __command; do "
    'builtin eval "$__command" </dev/null 7>&- 8>&- 9<&-; '
    "__status=$?; exec 1>&7 2>&7; builtin set +eux; "
    r"""builtin printf '\0%s %d %s\0' "$__mark" "$__status" "$PWD" >&8; """
    "done"
)
FIRST_FD = 100  # descriptors passed to bwrap stay clear of those it uses itself
GRACE_S = 1.0  # for the shell to report after its children were killed at a time limit
STATUS_BYTES = 1 << 13  # of one message on the status channel; the rest of a longer one is dropped
FLUSH_BYTES = 1 << 20  # read at most this after the status: a background job may write for ever

Spawn = Callable[[str, int, tuple[int, int], str], Awaitable[SandboxProcess]]


class Shell:
    """One bash in one process tree.

    Args:
        spawn: `await spawn(script, output_fd, pass_fds, cwd)` starts bash on the sandbox's root.
        cwd: directory to start in.
        output_limit: bytes of output kept of one command.
    """

    def __init__(self, spawn: Spawn, cwd: str, output_limit: int):
        self._spawn, self.cwd, self._output_limit = spawn, cwd, output_limit
        self._process: SandboxProcess | None = None
        self._descriptors: list[int] = []

    @property
    def alive(self) -> bool:
        return self._process is not None

    async def start(self) -> None:
        command_write, command_read = _channel(_socket_pair)
        status_read, status_write = _channel(_socket_pair)
        output_read, output_write = _channel(os.pipe)
        self._descriptors = [command_write, status_read, output_read]
        for descriptor in self._descriptors:
            os.set_blocking(descriptor, False)
        script = LOOP.format(command=command_read, status=status_write)
        try:
            self._process = await self._spawn(script, output_write, (command_read, status_write), self.cwd)
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in (command_read, status_write, output_write):
                os.close(descriptor)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        if self._process is None:
            await self.start()
        call = _Call(*self._descriptors, command, self.cwd, self._output_limit)
        started, deadline = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic() + timeout_s
        timed_out = False
        try:
            if not await call.finished(timeout_s):
                timed_out = True
                await self._interrupt(call, started)
            if call.status is not None:
                exit_code, self.cwd = call.status
            else:
                exit_code = await self._end_of_shell(0.0 if timed_out else deadline - time.monotonic())
                timed_out = timed_out or exit_code is None
            call.flush()
        except BaseException:
            call.close()
            await self.end()
            raise
        call.close()
        if call.status is None:
            await self.end()
        text, omitted = call.output.text()
        return CommandResult(None if timed_out else exit_code, text, timed_out, omitted)

    async def end(self) -> None:
        """Kill the shell and everything it started; its directory stays known."""
        process, self._process = self._process, None
        try:
            if process is not None:
                await process.end()
        finally:
            self._close()

    async def _end_of_shell(self, remaining_s: float) -> int | None:
        """The status pipe closed without a status: `exit`, or `exec program`, which may run on until the time limit."""
        code = await self._process.wait(remaining_s) if remaining_s > 0 else None
        complaint = self._process.complaint()
        if complaint:
            raise SandboxLost(f"the shell could not be started in the sandbox: {complaint}", where=self.cwd)
        return code

    async def _interrupt(self, call: _Call, started: float) -> None:
        """At the time limit: SIGTERM, then SIGKILL, for what this command started, until the shell reports."""
        end = time.monotonic() + GRACE_S
        number, wait_s = signal.SIGTERM, 0.2
        while time.monotonic() < end:
            _signal_started_since(self._process.init_pid, started, number)
            if await call.finished(wait_s):
                return
            number, wait_s = signal.SIGKILL, 0.05

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class _Call:
    """One command in flight: feeds it in, collects output, waits for the status."""

    def __init__(self, command_fd: int, status_fd: int, output_fd: int, command: str, cwd: str, output_limit: int):
        self._cwd = cwd
        self._command_fd, self._status_fd, self._output_fd = command_fd, status_fd, output_fd
        self._mark = secrets.token_hex(16).encode()
        text = command.replace("\0", "").encode("utf-8", "surrogateescape")
        self._pending = memoryview(self._mark + b"\0" + text + b"\0")
        self._status = bytearray()
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self.status: tuple[int, str] | None = None
        self.output = OutputBuffer(output_limit)
        self._loop.add_reader(status_fd, self._read_status)
        self._loop.add_reader(output_fd, self._read_output)
        self._write()

    async def finished(self, timeout_s: float) -> bool:
        """Whether a status arrived, or the shell ended, within the time."""
        done, _ = await asyncio.wait([self._done], timeout=timeout_s)
        return bool(done)

    def flush(self) -> None:
        """Read what already lies in the output pipe."""
        goal = self.output.total + FLUSH_BYTES
        while self.output.total < goal and self._read_output():
            pass

    def close(self) -> None:
        for descriptor in (self._status_fd, self._output_fd):
            self._loop.remove_reader(descriptor)
        self._loop.remove_writer(self._command_fd)
        self._done.cancel()

    def _write(self) -> None:
        try:
            self._pending = self._pending[os.write(self._command_fd, self._pending) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._pending = self._pending[:0]
        if self._pending:
            self._loop.add_writer(self._command_fd, self._write)
        else:
            self._loop.remove_writer(self._command_fd)

    def _read_status(self) -> None:
        try:
            block = os.read(self._status_fd, 65536)
        except BlockingIOError:
            return
        *messages, rest = bytes(self._status + block).split(b"\0")
        self._status = bytearray(rest[:STATUS_BYTES])
        for message in messages:
            mark, _, answer = message[:STATUS_BYTES].partition(b" ")
            code, _, directory = answer.decode(errors="surrogateescape").partition(" ")
            if mark == self._mark and code.isdecimal() and self.status is None:
                known = directory.startswith("/") and len(message) < STATUS_BYTES
                self.status = int(code[:9]), directory if known else self._cwd
        if self.status is not None or not block:
            self._loop.remove_reader(self._status_fd)
            if not self._done.done():
                self._done.set_result(None)

    def _read_output(self) -> bool:
        try:
            block = os.read(self._output_fd, 1 << 17)
        except BlockingIOError:
            return False
        if block:
            self.output.feed(block)
        else:
            self._loop.remove_reader(self._output_fd)
        return bool(block)


def _socket_pair() -> tuple[int, int]:
    ours, shells = socket.socketpair()
    return ours.detach(), shells.detach()


def _channel(make: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """The driver's end and the shell's."""
    made = make()
    moved = tuple(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FD) for descriptor in made)
    for descriptor in made:
        os.close(descriptor)
    return moved


def _signal_started_since(init_pid: int, boottime_s: float, number: int) -> None:
    """Signal the shell's descendants that started at or after a moment: earlier background jobs are spared.

    Every process is held by a descriptor before its parent is read, so that a number that the kernel gave to another
    process of the host meanwhile is noticed. All are found before the first is signalled: orphans change their parent.
    """
    earliest = int(boottime_s * os.sysconf("SC_CLK_TCK"))
    held, pending = [], [init_pid]
    try:
        while pending:
            parent = pending.pop()
            for pid in _children(parent):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    descriptor = os.pidfd_open(pid)
                    try:
                        started, actual = _started_and_parent(pid)
                        signal.pidfd_send_signal(descriptor, 0)  # still the process that was just read about
                        if actual == parent:
                            pending.append(pid)
                            if started >= earliest and parent != init_pid:
                                held.append(os.dup(descriptor))
                    finally:
                        os.close(descriptor)
        for descriptor in held:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        for descriptor in held:
            os.close(descriptor)


def _children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def _started_and_parent(pid: int) -> tuple[int, int]:
    """Clock ticks since boot, and pid. Raises OSError, IndexError, ValueError."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[19]), int(fields[1])
