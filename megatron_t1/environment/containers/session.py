"""A persistent bash at the other end of one pair of pipes, which is all that `exec` of a container engine gives.

Every command gets a random mark; the shell writes it to its own standard output when the command begins and when it has
ended, with status and directory. So one ordered stream carries everything, and what a background job writes in between
is never taken for the shell's word. What a command fakes of it cheats only itself: nothing is scored from here.

What ends or wedges the shell (`exit`, `exec`, a loop of builtins at its time limit) ends every process of the session;
the next command gets a new shell in the last known directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from megatron_t1.environment.containers.engine import end_process
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost
from megatron_t1.environment.sandbox.output import OutputBuffer

# fd 7: the true standard output, put back after a command that moved it with exec; 9: commands.
LOOP = (
    "exec 9<&0 </dev/null 7>&1 2>&1; "
    'builtin cd -- "$1" 2>/dev/null || builtin cd /; set --; '
    "while IFS= builtin read -r -d '' -u 9 __mark && IFS= builtin read -r -d '' -u 9 __command; do "
    "builtin read -r __up _ </proc/uptime; "
    r"""builtin printf '\0%s begin %s %s\0' "$__mark" "$__up" $$ >&7; """
    r"""builtin trap 'builtin printf "\0%s exit %d %s\0" "$__mark" "$?" "$PWD" >&7' EXIT; """
    'builtin eval "$__command" </dev/null 7>&- 9<&-; '
    "__status=$?; exec 1>&7 2>&7; builtin set +eux; "
    r"""builtin printf '\0%s end %d %s\0' "$__mark" "$__status" "$PWD" >&7; """
    "done; builtin trap - EXIT"
)
# Ends what started at or after $1 (hundredths of a second of /proc/uptime), except the shell $2 and the first process.
INTERRUPT = (
    "since=$1 shell=$2; for number in TERM KILL; do for file in /proc/[0-9]*/stat; do "
    "line=; IFS= read -r -d '' line 2>/dev/null <\"$file\"; pid=${file//[!0-9]/}; fields=(${line##*)}); "
    '[ "${#fields[@]}" -gt 19 ] && [ "${fields[19]}" -ge "$since" ] && '
    '[ "$pid" -gt 1 ] && [ "$pid" -ne "$shell" ] && [ "$pid" -ne $$ ] && kill -$number "$pid" 2>/dev/null; '
    "done; sleep 0.2; done"
)
KILL_ALL = "kill -9 -1"
GRACE_S = 1.0  # for the shell to report after what its command started was killed at the time limit
BLOCK = 1 << 16
_STATUS = re.compile(r"[0-9]{1,3}")

Exec = Callable[..., Awaitable[asyncio.subprocess.Process]]
Script = Callable[..., Awaitable[None]]


class Session:
    """One bash in a container.

    Args:
        spawn: `await spawn("bash", ...)` runs these words in the container with pipes.
        script: `await script(text, *arguments)` runs a bash script in the container as its root, to its end.
        cwd: directory to start in.
        output_limit: bytes of output kept of one command.
    """

    def __init__(self, spawn: Exec, script: Script, cwd: str, output_limit: int):
        self._spawn, self._script, self.cwd, self._output_limit = spawn, script, cwd, output_limit
        self._process: asyncio.subprocess.Process | None = None
        self._pending = bytearray()  # what the shell's stream brought after the last command's end

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """One command. Raises SandboxLost when the container gives no shell."""
        deadline = time.monotonic() + timeout_s
        if self._process is None:
            shell = ("/bin/bash", "--noprofile", "--norc", "-c", LOOP, "bash", self.cwd)
            self._process = await self._spawn(*shell)
            self._pending.clear()
        call = _Call(self._process, command, OutputBuffer(self._output_limit), self._pending)
        reading = asyncio.ensure_future(call.read())
        try:
            timed_out = not await _done(reading, deadline - time.monotonic())
            if timed_out and call.began:
                await self._script(INTERRUPT, *call.began)
                await _done(reading, GRACE_S)
            result = await self._result(call, reading, timed_out, deadline)
        except BaseException:
            await self.end()
            raise
        finally:
            reading.cancel()
        return result

    async def end(self) -> None:
        """End the shell. What it started in the background dies with the container, or in `_end_all`."""
        process, self._process = self._process, None
        if process is not None:
            await end_process(process)

    async def _result(self, call: _Call, reading: asyncio.Future, timed_out: bool, deadline: float) -> CommandResult:
        exit_code = None
        if call.status is not None:
            kind, exit_code, self.cwd = call.status
            if kind == "exit":
                await self._end_all()
        elif reading.done() and (exit_code := await self._ended(deadline)) is not None:
            # The shell's place was taken by another program, which has ended, or the container is gone.
            complaint = (await self._process.stderr.read(4096)).decode(errors="replace").strip()
            await self._end_all()
            if not call.began or exit_code in (125, 126, 127) and complaint:
                raise SandboxLost(f"the container gives no shell: {complaint or f'exit status {exit_code}'}")
        else:
            timed_out = True
            await self._end_all()
        text, omitted = call.output.text()
        return CommandResult(None if timed_out else exit_code, text, timed_out, omitted)

    async def _ended(self, deadline: float) -> int | None:
        """Exit status of what closed its output; None when it runs on all the same."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), max(GRACE_S, deadline - time.monotonic()))
        return None

    async def _end_all(self) -> None:
        await self._script(KILL_ALL)
        await self.end()


class _Call:
    """One command in flight.

    Attributes:
        began: when the shell took the command up (hundredths of a second of /proc/uptime) and its pid; () before.
        status: ("end" or "exit", exit status, directory) once the shell has reported.
    """

    def __init__(self, process: asyncio.subprocess.Process, command: str, output: OutputBuffer, pending: bytearray):
        self._process, self.output, self._pending = process, output, pending
        self._mark = secrets.token_hex(16).encode()
        self.began: tuple[str, ...] = ()
        self.status: tuple[str, int, str] | None = None
        text = command.replace("\0", "").encode("utf-8", "surrogateescape")
        with contextlib.suppress(ConnectionError):
            process.stdin.write(self._mark + b"\0" + text + b"\0")

    async def read(self) -> None:
        """Until the shell reports the end, or its output ends."""
        while self.status is None and (block := await self._process.stdout.read(BLOCK)):
            self._pending += block
            self._take()
        if self.status is None:
            self.output.feed(bytes(self._pending))
            self._pending.clear()

    def _take(self) -> None:
        sign = b"\0" + self._mark + b" "
        while True:
            start = self._pending.find(sign)
            if start < 0:
                spare = len(self._pending) - len(sign) + 1  # the rest may be the beginning of a sign
                if spare > 0:
                    self.output.feed(bytes(self._pending[:spare]))
                    del self._pending[:spare]
                return
            end = self._pending.find(b"\0", start + len(sign))
            if end < 0:
                return
            self.output.feed(bytes(self._pending[:start]))
            words = self._pending[start + len(sign) : end].decode(errors="surrogateescape").split(" ", 2)
            del self._pending[: end + 1]
            if words[0] == "begin" and len(words) == 3:
                self.began = (words[1].replace(".", ""), words[2])
            elif words[0] in ("end", "exit") and len(words) == 3 and _STATUS.fullmatch(words[1]):
                self.status = (words[0], int(words[1]), words[2] if words[2].startswith("/") else "/")
                return


def running(session: Session | None) -> Session:
    """Raises SandboxLost where there is none."""
    if session is None:
        raise SandboxLost("the sandbox has no session: it was not started, or its verifier has run")
    return session


async def _done(future: asyncio.Future, timeout_s: float) -> bool:
    done, _ = await asyncio.wait([future], timeout=max(0.0, timeout_s))
    return bool(done)
