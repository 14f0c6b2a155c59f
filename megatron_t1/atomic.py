"""Files that are either complete or absent: write to a temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_t1.errors import naming

TEMPORARY_SUFFIX = ".partial"
LATE_FILES_S = 90.0  # for another node's files: an NFS client remembers a directory for a minute
NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed over `path`, on failure removed.

    Its name is this writer's own: processes of several nodes or containers may have one number.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with naming(path):
            yield temporary
            fsync_path(temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with naming(path.parent):
        fsync_path(path.parent)


def temporaries(path: Path, process: int) -> list[Path]:
    """What a process of this number may have left of `path` when it was killed."""
    return list(path.parent.glob(f"{glob.escape(path.name)}.*.{process}{TEMPORARY_SUFFIX}"))


def look_anew(directory: Path) -> None:
    """Have a network file system ask its server what is in a directory: who changes it forgets what was remembered."""
    probe = directory / f".look.{os.urandom(4).hex()}.{os.getpid()}{TEMPORARY_SUFFIX}"
    with contextlib.suppress(OSError):
        probe.touch()
        probe.unlink()


def fsync_path(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk. Some network file systems know that of files only."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: str | Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    """As text that can be read; escaped where a string is no Unicode text (a file's name that isn't UTF-8)."""
    try:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, sort_keys=True).encode()
    write_bytes(path, text + b"\n")


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
