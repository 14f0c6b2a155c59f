"""Which process of a phase failed first, and what is worth reading of its log.

A rank says its own error with `error on rank N: `. One that only lost the others, because a connection to them broke,
says `broken off on rank N: ` and waits a while before it ends (training.main), so that the launcher sees who failed
first. What a killed rank can't say, torchrun, srun or the kernel does.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 15
OWN_ERROR = re.compile(r"^error(?: on rank (\d+))?: ", re.MULTILINE)
BROKEN_OFF = re.compile(r"^broken off on rank \d+: ", re.MULTILINE)
_TRACEBACK = re.compile(r"^Traceback", re.MULTILINE)
_TORCHRUN = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_SRUN = re.compile(r"error: [^\n]*?: tasks? (\d+)[-,\d]*: (\w[\w ]*)")
_SRUN_DEATHS = {
    "Killed": "SIGKILL",
    "Out Of Memory": "SIGKILL, out of memory",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_NCCL_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout:[^\n]*")
# The runtime ends a process so that is waiting for others in vain; torchrun and the launcher end them with SIGTERM.
_CONSEQUENCES = {signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Failure:
    """The first failure of a phase.

    Attributes:
        rank: that failed; None: not known, or not a matter of ranks.
        log: what to read.
        reason: how it ended, where its log can't say.
    """

    rank: int | None
    log: Path
    reason: str = ""


def first_failure(main: Path, logs: dict[int, list[Path]]) -> Failure:
    """The process that failed first.

    Args:
        main: log of the command around the ranks.
        logs: of each rank.
    """
    text = read_end(main, 200_000)
    named, death = _named(text)
    if death and named is not None:
        return Failure(named, _fullest(logs.get(named, []), main), f"failed: rank {named} died of {death}")
    ends = {path: read_end(path) for paths in logs.values() for path in paths}
    own = {rank: path for rank in sorted(logs) for path in logs[rank] if OWN_ERROR.search(ends[path])}
    if own:
        path = own.get(named, own[min(own)])
        said = OWN_ERROR.search(ends[path])
        rank = next(rank for rank, other in own.items() if other == path)
        return Failure(int(said[1]) if said[1] else rank, path)
    if late := _late(logs, ends):
        return late
    for rank in [named] if named is not None else sorted(logs):
        for path in logs.get(rank, ()):
            if _TRACEBACK.search(ends[path]) or (named is not None and ends[path]):
                return Failure(rank, path)
    broken = [(rank, path) for rank in sorted(logs) for path in logs[rank] if BROKEN_OFF.search(ends[path])]
    return Failure(*broken[0]) if broken else Failure(named, main)


def _named(text: str) -> tuple[int | None, str]:
    """The rank that torchrun or srun names, and the signal it died of, "" for none that matters."""
    if found := _TORCHRUN.search(text):
        code = int(found[2])
        known = -code in {item.value for item in signal.Signals}
        fatal = code < 0 and known and signal.Signals(-code) not in _CONSEQUENCES
        return int(found[1]), signal.Signals(-code).name if fatal else ""
    tasks = list(_SRUN.finditer(text))
    deaths = [(int(task[1]), _SRUN_DEATHS[task[2].strip()]) for task in tasks if task[2].strip() in _SRUN_DEATHS]
    exits = [int(task[1]) for task in tasks if task[2].startswith("Exited")]
    if exits:
        return exits[0], ""  # a step is killed as a whole when one task exits
    if deaths:
        return deaths[0]
    return (int(tasks[0][1]), "") if tasks else (None, "")


def _late(logs: dict[int, list[Path]], ends: dict[Path, str]) -> Failure | None:
    """NCCL ends a process that waits in vain, and can't say for whom: for those that weren't ended so."""
    waiting = {rank: path for rank in logs for path in logs[rank] if _NCCL_TIMEOUT.search(ends[path])}
    if not waiting:
        return None
    path = waiting[min(waiting)]
    absent = sorted(set(logs) - set(waiting))
    who = f"rank {', '.join(map(str, absent[:8]))} didn't come to" if absent else "the ranks wait for each other in"
    return Failure(
        absent[0] if absent else min(waiting), path, f"failed: {who} a collective operation in time (NCCL's watchdog)"
    )


def _fullest(paths: list[Path], otherwise: Path) -> Path:
    found = [path for path in paths if path.is_file() and path.stat().st_size]
    return found[0] if found else otherwise


def last_lines(path: Path, count: int = TAIL_LINES) -> str:
    """The end of a log. Where the phase printed an `error: ` of this package, only that."""
    text = read_end(path).rstrip()
    own = [match.start() for match in OWN_ERROR.finditer(text)]
    if own:
        return "\n".join(text[own[0] :].splitlines()[: 2 * count])
    return "\n".join(text.splitlines()[-count:])


def read_end(path: Path, size: int = 20_000) -> str:
    """The last `size` bytes of a file as text; "" where it can't be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
