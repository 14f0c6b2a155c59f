"""Directories of sandboxes on the host: one each, locked while its driver lives, so that a later driver can tell and
remove what a killed one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from functools import cache
from pathlib import Path

from megatron_t1.environment.sandbox.root import remove_tree

PREFIX = "t1-sandbox-"
LOCK = "lock"
SETTLED_S = 60.0  # a younger directory may not have its lock yet


class ScratchDirectory:
    """A new private directory below `base`; `remove` deletes it with all content."""

    def __init__(self, base: str):
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.chmod(self.path, 0o711)

    def remove(self) -> None:
        try:
            remove_tree(self.path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def reachable(directory: str | Path | None, owner: int | None) -> str:
    """`directory` (made if missing) when the sandbox's host user may pass through it, else the temporary directory."""
    if not directory:
        return tempfile.gettempdir()
    path = Path(directory).resolve()
    path.mkdir(parents=True, exist_ok=True)
    closed = owner is not None and any(not folder.stat().st_mode & 0o001 for folder in (path, *path.parents))
    return tempfile.gettempdir() if closed else str(path)


def remove_abandoned(base: str) -> int:
    """Remove sandbox directories below `base` whose driver is dead; returns how many."""
    removed = 0
    for path in Path(base).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or another driver was faster
            if time.time() - path.stat().st_mtime < SETTLED_S or path.is_symlink():
                continue
            lock = os.open(path / LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
                removed += 1
            finally:
                os.close(lock)
    return removed


@cache
def _sweep(base: str) -> None:
    """Once in a process for each base."""
    remove_abandoned(base)
