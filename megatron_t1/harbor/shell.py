"""A persistent bash in an environment that only runs one command at a time and answers when it has ended.

The shell waits inside, behind named pipes; each command is one call that hands it over, waits for the status and brings
the output back. Same behaviour as `environment.sandbox.shell` at what ends or wedges it.
"""

from __future__ import annotations

import base64
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable

from megatron_t1.environment.containers.session import GRACE_S, INTERRUPT
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost

LOOP = (
    'exec 9<>"$2/in" 8<>"$2/done" 7>>"$2/out"; builtin cd -- "$1" 2>/dev/null || builtin cd /; set --; '
    "while IFS= builtin read -r -d '' -u 9 __command; do "
    """builtin trap 'builtin printf "exit %d %s\\n" "$?" "$PWD" >&8' EXIT; """
    'builtin eval "$__command" </dev/null >&7 2>&1 7>&- 8>&- 9<&-; '
    "__status=$?; exec >/dev/null 2>&1; builtin set +eux; "
    r"""builtin printf 'end %d %s\n' "$__status" "$PWD" >&8; done"""
)
START = (
    'mkdir -p -m 700 "$2" && rm -f "$2"/* && mkfifo "$2/in" "$2/done" && : > "$2/out" || exit 1; '
    'setsid /bin/bash --noprofile --norc -c "$3" bash "$1" "$2" </dev/null >/dev/null 2>&1 & echo $!'
)
# $1 folder, $2 pid of the shell, $3 tenths of a second, $4 bytes to keep, $5 the command (none: only wait). Prints when
# it began (hundredths of a second of /proc/uptime), the shell's word ("timeout" and "dead" where there is none), the
# number of bytes written, and head and tail of them in base64.
CALL = r"""
read -r up _ < /proc/uptime; exec 8<>"$1/done"
[ $# -gt 4 ] && printf '%s\0' "$5" > "$1/in"
word=timeout
for ((i = 0; i < $3; i++)); do
    if IFS= read -r -t 0.1 -u 8 line; then word=$line; break; fi
    if ! kill -0 "$2" 2>/dev/null; then word=dead; IFS= read -r -t 0.1 -u 8 line && word=$line; break; fi
done
total=$(wc -c < "$1/out"); half=$(($4 / 2)); rest=$((total > half ? total - half : 0))
echo "${up/./}"; echo "$word"; echo "$total"
head -c "$half" "$1/out" | base64 | tr -d '\n'; echo
tail -c "$((rest < half ? rest : half))" "$1/out" | base64 | tr -d '\n'; echo
: > "$1/out"
"""
# Lists the processes, as PID:TIME OF START: a number alone is given to another process in time.
PROCESSES = r"""
for folder in /proc/[0-9]*; do
    stat=; read -r -d '' stat < "$folder/stat"; set -- ${stat##*)}; echo -n "${folder#/proc/}:${20} "
done 2>/dev/null; exit 0
"""
# Kills what is not in the list of processes $1, except itself and what started it.
KILL_NEW = r"""
spared=" $1 "; own=" $$ "; pid=$$
while [ "$pid" -gt 1 ]; do
    read -r -d '' stat < "/proc/$pid/stat"; set -- ${stat##*)}; pid=$2; own="$own$pid "
done
for round in 1 2 3; do for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}; stat=; read -r -d '' stat < "$folder/stat"; set -- ${stat##*)}
    [[ $own == *" $pid "* || $spared == *" $pid:${20} "* ]] || kill -9 "$pid"
done; done 2>/dev/null; exit 0
"""
COMMAND_BYTES = 60_000  # a longer command goes through a file: the kernel bounds one word of a command line

Execute = Callable[[str, float], Awaitable[str]]
PutFile = Callable[[str, bytes], Awaitable[None]]


def script(text: str, *arguments: str) -> str:
    """A shell command that runs a bash script with arguments."""
    return f"/bin/bash --noprofile --norc -c {shlex.quote(text)} bash {shlex.join(arguments)}"


async def processes(execute: Execute) -> str:
    """Those that live now, for `RemoteShell`."""
    return (await execute(script(PROCESSES), 30.0)).strip()


class RemoteShell:
    """One bash.

    Args:
        execute: `await execute(command, timeout_s)` runs a shell command to its end and returns its standard output.
        put_file: `await put_file(path, content)`.
        cwd: directory to start in.
        output_limit: bytes of output kept of one command.
        spared: `processes` that were there before any session.
    """

    def __init__(self, execute: Execute, put_file: PutFile, cwd: str, output_limit: int, spared: str):
        self._execute, self._put_file, self.cwd, self._output_limit = execute, put_file, cwd, output_limit
        self.start_directory = cwd
        self._folder = f"/tmp/.t1-session-{secrets.token_hex(8)}"
        self._pid, self._spared = "", spared

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """One command. Raises SandboxLost when the environment gives no shell."""
        if not self._pid:
            await self._start()
        command = command.replace("\0", "")
        if len(command.encode(errors="surrogateescape")) > COMMAND_BYTES:
            await self._put_file(f"{self._folder}/long", command.encode(errors="surrogateescape"))
            command = f"source {self._folder}/long"
        began, word, output, omitted = await self._call(timeout_s, command)
        timed_out = word == "timeout"
        if timed_out:
            await self._execute(script(INTERRUPT, began, self._pid), 30.0)
            _, word, more, omitted_more = await self._call(GRACE_S)
            output, omitted = output + more, omitted + omitted_more
        kind, _, rest = word.partition(" ")
        status, _, directory = rest.partition(" ")
        exit_code = int(status) if re.fullmatch("[0-9]{1,3}", status) else None
        if directory.startswith("/"):
            self.cwd = directory
        if kind != "end":
            await self.end()
        return CommandResult(None if timed_out else exit_code, output, timed_out, omitted)

    async def end(self) -> None:
        """Kill everything that was not there before any session, a verifier's processes too."""
        self._pid = ""
        await self._execute(script(KILL_NEW, self._spared), 30.0)

    async def _start(self) -> None:
        self._pid = (await self._execute(script(START, self.cwd, self._folder, LOOP), 30.0)).strip()
        if not self._pid.isdigit():
            raise SandboxLost(
                f"the environment starts no shell: {self._pid[:200]!r}", remedy="it needs bash and setsid"
            )

    async def _call(self, timeout_s: float, *command: str) -> tuple[str, str, str, int]:
        """When it began, the shell's word, output, and how many bytes were left out."""
        words = (self._folder, self._pid, str(max(1, round(timeout_s * 10))), str(self._output_limit), *command)
        answer = (await self._execute(script(CALL, *words), timeout_s + 60.0)).split("\n")
        try:
            began, word, total, head, tail = answer[:5]
            kept = base64.b64decode(head, validate=True), base64.b64decode(tail, validate=True)
            omitted = int(total) - sum(map(len, kept))
        except ValueError as error:
            raise SandboxLost(f"the environment's answer can't be read: {answer[:2]!r}") from error
        texts = [part.decode(errors="replace").replace("\0", "") for part in kept]
        return (
            began,
            word,
            (f"\n[... {omitted} bytes omitted ...]\n" if omitted > 0 else "").join(texts),
            max(0, omitted),
        )
