"""Process trees on Linux: who descends from whom, who dies with whom, and how to end them all.

Standard library only and without imports from the package: the engine's supervisor loads this file by its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

RUN_MARK = "T1_RUN"  # environment variable that every process of a run's launches inherits
LAUNCH_MARK = "T1_LAUNCH"  # the same for one launch
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent (the thread that started it) ends.

    Args:
        parent: its process id, where the caller knows it: when it has ended already, the signal is sent at once.
    """
    _prctl(PR_SET_PDEATHSIG, signal_number)
    if parent is not None and os.getppid() != parent:  # it ended before the request reached the kernel
        os.kill(os.getpid(), signal_number)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, so that none can leave its tree."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def stop_signal_numbers() -> list[signal.Signals]:
    """The signals that ask to stop; SIGHUP isn't one where the process was started to outlive its terminal (nohup)."""
    lasting = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if lasting else [signal.SIGHUP])]


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or only a zombie is left."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            after_name = Path(f"/proc/{entry.name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if after_name[0] not in "ZX":
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(0), ()):
            found.append(child)
            queue.append(child)
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def end_descendants(root: int, grace_s: float, ended: dict[int, int] | None = None) -> int:
    """SIGTERM to everything below `root`, SIGKILL to what is left after `grace_s`; returns how many had to be killed.

    Reaps its own children while it waits, so it may be called by a subreaper for itself; their wait statuses are added
    to `ended`.
    """
    ended = {} if ended is None else ended
    send(descendants(root), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        ended |= reap()
        if not descendants(root):
            ended |= reap()  # what became a zombie between the two lines above
            return 0
        time.sleep(0.02)
    killed: set[int] = set()
    for _ in range(250):  # a dying process may still be starting another
        alive = descendants(root)
        if not alive:
            break
        killed.update(alive)
        send(alive, signal.SIGKILL)
        time.sleep(0.02)
        ended |= reap()
    return len(killed)


def reap() -> dict[int, int]:
    """Collect ended children without blocking: pid -> wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def marked(name: str, value: str) -> list[int]:
    """Processes whose environment holds `name=value`: what is left of a launch, wherever it went."""
    needle = f"{name}={value}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry.name}/environ").read_bytes()
        except OSError:
            continue
        if needle in environment.split(b"\0"):
            found.append(int(entry.name))
    return found
