"""SHA-256 over the files of a task directory: is it still the task that was proven?"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from megatron_t1.environment.tree import bounded
from megatron_t1.regular import open_regular

BLOCK_BYTES = 1 << 20
_IGNORED = ("__pycache__", ".git")


def task_digest(directory: str | Path) -> str:
    """Over names, kinds, execution bits and contents; the order of the file system plays no part.

    Raises:
        OSError: a file can't be read, or they come to more than `tree.MAX_TREE_BYTES`.
    """
    digest = hashlib.sha256()
    for entry in bounded(directory, _IGNORED):
        if stat.S_ISDIR(entry.mode):
            continue
        digest.update(f"{entry.name}\0".encode(errors="surrogateescape"))
        if stat.S_ISLNK(entry.mode):
            digest.update(b"link\0" + os.fsencode(os.readlink(entry.path)))
        elif stat.S_ISREG(entry.mode):
            digest.update(f"file {entry.mode & 0o111 != 0} {entry.size}\0".encode())
            with open_regular(entry.path) as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
        else:
            digest.update(b"other\0")
    return digest.hexdigest()
