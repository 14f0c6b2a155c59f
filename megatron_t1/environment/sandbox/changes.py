"""What an agent changed: a sandbox's files now against those that its build left.

The kernel sets the change time of an inode and nobody inside can set it back (no CAP_SYS_TIME), so a file is modified
when its change time is later than the snapshot; only the names have to be kept.
"""

from __future__ import annotations

import os
import stat
import time
import zlib
from collections.abc import Iterator

from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.interface import Change

CLOCK_REALTIME_COARSE = 5  # linux/time.h: the clock of change times
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")  # on a directory that hides the one below it


class Snapshot:
    """Names of everything in `tree`, and the moment.

    Args:
        tree: the sandbox's root, or the upper layer of its overlay.
        below: the overlay's read-only layer.
    """

    def __init__(self, tree: Inside, below: Inside | None = None):
        self._tree, self._below = tree, below
        names = "\0".join(path for path, _ in tree.walk())
        self._names = zlib.compress(names.encode(errors="surrogateescape"), 1)
        self._moment = time.time_ns()

    def settle(self) -> None:
        """Return when what is written from now on has a later change time than the snapshot (milliseconds)."""
        while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= self._moment:
            time.sleep(0.001)

    def changes(self) -> list[Change]:
        before = set(zlib.decompress(self._names).decode(errors="surrogateescape").split("\0"))
        found, seen = set(), set()
        for path, status in self._tree.walk():
            if _is_whiteout(status):
                if self._existed(path, before):
                    found.add(Change(f"/{path}", "removed"))
                if self._below is not None:
                    found |= {Change(f"/{below}", "removed") for below, _ in self._below.walk(path)}
                continue
            seen.add(path)
            if not self._existed(path, before):
                found.add(Change(f"/{path}", "added", _entry(status.st_mode)))
            elif status.st_ctime_ns > self._moment and _entry(status.st_mode) != "directory":
                found.add(Change(f"/{path}", "modified", _entry(status.st_mode)))
            if self._below is not None and stat.S_ISDIR(status.st_mode) and self._is_opaque(path):
                found |= {Change(f"/{hidden}", "removed") for hidden in self._hidden(path, before)}
        gone = {path for path in before - seen - {""} if self._below is None or self._below.status(path) is None}
        return sorted(found | {Change(f"/{path}", "removed") for path in gone}, key=lambda change: change.path)

    def _existed(self, path: str, before: set[str]) -> bool:
        return path in before or (self._below is not None and self._below.status(path) is not None)

    def _hidden(self, path: str, before: set[str]) -> Iterator[str]:
        if path in before:
            return  # the build hid it already
        for below, _ in self._below.walk(path):
            if self._tree.status(below) is None:
                yield below

    def _is_opaque(self, path: str) -> bool:
        for name in OPAQUE:
            try:
                with self._tree.folder(path) as descriptor:
                    if os.getxattr(f"/proc/self/fd/{descriptor}", name) == b"y":
                        return True
            except OSError:
                continue
        return False


def _entry(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory" if os.geteuid() == 0 or mode & 0o500 == 0o500 else "closed"
    if stat.S_ISREG(mode):
        return "file" if mode & 0o200 else "locked"
    return "link" if stat.S_ISLNK(mode) else "other"


def _is_whiteout(status: os.stat_result) -> bool:
    """How an overlay notes in its upper layer that something of a lower one is gone: a character device 0, 0."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
