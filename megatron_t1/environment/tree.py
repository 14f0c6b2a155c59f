"""Files of a task's directory, which others wrote: only regular files are opened, and never more than a limit of them.

A pipe would be waited for, a sparse file of 200 GB would fill the memory, a tree can be deeper than Python recurses.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.regular import open_regular

MAX_ENTRIES = 200_000  # of a tree
MAX_TREE_BYTES = 16 << 30  # of a tree that is hashed or copied
MAX_MEMORY_BYTES = 1 << 30  # of what is read into memory together


@dataclass(frozen=True)
class Entry:
    """Attributes: name: relative to the tree, with "/"; mode: kind and permission bits, a link's own; size: bytes."""

    name: str
    path: str
    mode: int
    size: int


def walk(directory: str | Path, ignored: Collection[str] = ()) -> Iterator[Entry]:
    """Everything below a directory: each folder's entries sorted by name, then its folders'. No link is followed.

    Args:
        ignored: names of folders that are left out.

    Raises:
        OSError: a folder can't be read, or there are more than MAX_ENTRIES.
    """
    pending, count = [""], 0
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(directory, prefix)) as found:
            entries = []
            for entry in found:
                if (count := count + 1) > MAX_ENTRIES:
                    raise _too_much(f"more than {MAX_ENTRIES} files", directory)
                if entry.name not in ignored or not entry.is_dir(follow_symlinks=False):
                    entries.append(entry)
        folders = []
        for entry in sorted(entries, key=lambda entry: entry.name):
            status = entry.stat(follow_symlinks=False)
            yield Entry(prefix + entry.name, entry.path, status.st_mode, status.st_size)
            if stat.S_ISDIR(status.st_mode):
                folders.append(f"{prefix}{entry.name}/")
        pending += reversed(folders)


def bounded(directory: str | Path, ignored: Collection[str] = ()) -> list[Entry]:
    """`walk` as a list, after a look at the sizes. Raises OSError also for more than MAX_TREE_BYTES."""
    entries = list(walk(directory, ignored))
    if sum(entry.size for entry in entries if stat.S_ISREG(entry.mode)) > MAX_TREE_BYTES:
        raise _too_much(f"more than {MAX_TREE_BYTES >> 30} GiB of files", directory)
    return entries


class Reader:
    """Reads files into memory, up to a limit over all that it reads."""

    def __init__(self, limit: int = MAX_MEMORY_BYTES):
        self.limit = self.left = limit

    def read(self, path: str | Path) -> tuple[bytes, int]:
        """Content and permission bits of a regular file, or of what a link leads to. Raises OSError."""
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size > self.left:
                raise _too_much(f"more than {self.limit:,} bytes to be read into memory", path)
            content = file.read(status.st_size)
        self.left -= len(content)
        return content, stat.S_IMODE(status.st_mode)


def _too_much(problem: str, path: str | Path) -> OSError:
    return OSError(errno.EFBIG, problem, str(path))
