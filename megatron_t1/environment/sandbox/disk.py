"""The disk of a sandbox: a size-limited tmpfs where the driver may mount one, and whether a file system has room.

Without a bound of its own, one agent could fill the file system that other episodes write to, and their verifiers would
count what failed for want of space. So nothing is concluded from an episode whose file system was seen full.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig

FULL = "the scratch file system was full"
NOSUID_NODEV = 2 | 4  # MS_NOSUID | MS_NODEV
_DETACH_NOFOLLOW = 2 | 8  # MNT_DETACH | UMOUNT_NOFOLLOW
_FREE_SHARE = 16  # a small file system is full when less than this part of it is free
_FREE_FILES = 1024


def mount_bounded(path: Path, size_mb: int, max_files: int) -> bool:
    """Make directory `path` and mount a tmpfs of so many bytes and inodes on it; False: this driver may not mount.

    Raises:
        OSError: the mount failed for another reason.
    """
    path.mkdir()
    try:
        mount("tmpfs", path, tmpfs_options(size_mb, max_files), NOSUID_NODEV)
        return True
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
    path.chmod(0o711)
    return False


def tmpfs_options(size_mb: int, max_files: int) -> str:
    return f"size={size_mb}m,nr_inodes={max_files},mode=711"


def mount(kind: str, path: Path, options: str, flags: int) -> None:
    """mount(2) of a file system that has no device. Raises OSError."""
    name = kind.encode()
    if _libc().mount(name, os.fsencode(path), name, ctypes.c_ulong(flags), os.fsencode(options)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def unmount(path: Path) -> None:
    """Take away what is mounted on `path`, however busy; nothing mounted there is no error."""
    while os.path.ismount(path):
        if _libc().umount2(os.fsencode(path), _DETACH_NOFOLLOW) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


def has_room(path: Path, config: SandboxConfig) -> bool:
    """Whether one file of the largest size allowed still fits (of a small file system: whether a 16th is free)."""
    status = os.statvfs(path)
    needed = min(config.file_size_mb << 20, status.f_blocks * status.f_frsize // _FREE_SHARE)
    if status.f_bavail * status.f_frsize < needed:
        return False
    # Some file systems make inodes as they need them and state none.
    return status.f_files == 0 or status.f_favail >= min(_FREE_FILES, status.f_files // _FREE_SHARE)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
