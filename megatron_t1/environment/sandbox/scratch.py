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
from megatron_t1.errors import T1Error

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
    """`directory` (made if missing), or else a temporary directory: the first that the sandbox's host user may enter.

    A job's own TMPDIR often admits nobody else.

    Raises:
        T1Error: there is none.
    """
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
    candidates = [Path(path).resolve() for path in (directory, tempfile.gettempdir(), "/tmp", "/var/tmp") if path]
    for path in candidates:
        if owner is None or all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents)):
            return str(path)
    raise T1Error(
        "the user that sandboxes run as can enter none of these directories",
        where=", ".join(map(str, candidates)),
        remedy="name one with env.sandbox.scratch_dir that everybody may enter (chmod o+x, also above it)",
    )


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
