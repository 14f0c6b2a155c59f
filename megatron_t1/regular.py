"""Opening files of others: what isn't a regular file (a FIFO, a device) is refused, as reading it may never end."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading bytes.

    Raises:
        OSError: it is something else, or can't be opened.
    """
    require_regular(path)
    # Looked at again once it is open, without waiting for a writer: another file may have taken the name in between.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sha256_regular(path: str | Path) -> str:
    """SHA-256 of a regular file's bytes, in hexadecimal. Raises as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_regular(path: str | Path) -> None:
    """Raise OSError unless this is a regular file, or a link to one."""
    _require_regular(os.stat(path).st_mode, path)


def _require_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
