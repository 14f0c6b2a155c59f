"""Who writes into a run right now: the kernel says it (inotify), within a fraction of a millisecond."""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path

from megatron_t1.atomic import TEMPORARY_SUFFIX

CREATED, MODIFIED, IS_DIRECTORY, NONBLOCK = 0x100, 0x2, 0x40000000, 0o4000
EVENT = struct.Struct("iIII")
_OWN_NAME = re.compile(rf"\.(\d+){re.escape(TEMPORARY_SUFFIX)}\Z")
_LIBC = ctypes.CDLL(None, use_errno=True)


class Writes:
    """Watches the directories below `root`, also those that are made later; a context manager."""

    def __init__(self, root: Path):
        self.root = root
        self._directories: dict[int, Path] = {}

    def __enter__(self) -> Writes:
        self._descriptor = _LIBC.inotify_init1(NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watch(self.root)
        return self

    def __exit__(self, *_) -> None:
        os.close(self._descriptor)

    def _watch(self, directory: Path) -> None:
        number = _LIBC.inotify_add_watch(self._descriptor, os.fsencode(directory), CREATED | MODIFIED)
        if number < 0:
            return  # it is gone already
        self._directories[number] = directory
        for entry in os.scandir(directory) if directory.is_dir() else ():
            if entry.is_dir(follow_symlinks=False):
                self._watch(Path(entry.path))

    def next(self, wanted: Callable[[Path], bool], timeout_s: float) -> Path | None:
        """The next path that is created or written and `wanted`; None where there is none in that time."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._descriptor], [], [], min(left, 0.5))[0]:
                continue
            data, position = os.read(self._descriptor, 65536), 0
            while position < len(data):
                number, mask, _, length = EVENT.unpack_from(data, position)
                name = data[position + EVENT.size : position + EVENT.size + length].rstrip(b"\0")
                position += EVENT.size + length
                path = self._directories.get(number, self.root) / os.fsdecode(name)
                if mask & IS_DIRECTORY:
                    self._watch(path)
                elif wanted(path):
                    return path
        return None


def is_kept(path: Path) -> bool:
    """Whether a file is more than the log of a process."""
    return path.suffix != ".log" or path.name.startswith("exchange.")


def writer_of(path: Path) -> int | None:
    """The process that a half-written file names."""
    found = _OWN_NAME.search(path.name)
    return int(found[1]) if found else None
