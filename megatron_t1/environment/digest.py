"""SHA-256 over the files of a task directory: is it still the task that was proven?"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

_IGNORED = ("__pycache__", ".git")


def task_digest(directory: str | Path) -> str:
    """Over names, kinds, execution bits and contents; the order of the file system plays no part.

    Raises:
        OSError: a file can't be read.
    """
    directory, digest = Path(directory), hashlib.sha256()
    for folder, names, leaves in os.walk(directory):
        names[:] = sorted(name for name in names if name not in _IGNORED)
        for name in sorted(leaves + [name for name in names if os.path.islink(os.path.join(folder, name))]):
            path = Path(folder, name)
            digest.update(f"{path.relative_to(directory).as_posix()}\0".encode(errors="surrogateescape"))
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                digest.update(b"link\0" + os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
                digest.update(f"file {mode & 0o111 != 0} {len(content)}\0".encode() + content)
            else:
                digest.update(b"other\0")
    return digest.hexdigest()
