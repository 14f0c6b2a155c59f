"""Directories of sandboxes on the host: one each, locked while its driver lives, so that a later driver can tell and
remove what a killed one left. All drivers of one user share one base directory, so that a later one looks there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox import cgroup
from megatron_t1.environment.sandbox.disk import mount_bounded, tmpfs_options, unmount
from megatron_t1.environment.sandbox.keeper import Keeper
from megatron_t1.environment.sandbox.process import host_identity
from megatron_t1.environment.sandbox.root import remove_tree
from megatron_t1.errors import T1Error

BASE = "t1-sandboxes"
PREFIX = "t1-sandbox-"
LOCK = "lock"
DISK = "disk"  # what the sandbox's processes write to
MOUNT = "mount"  # where an overlay of it and a base may be mounted


class ScratchDirectory:
    """A new private directory below `base`; `remove` deletes it with all content.

    Args:
        disk_mb, max_files: bound of `disk` where this process may mount; elsewhere `disk` is a plain directory.

    Attributes:
        path: for the driver alone.
        disk: what the sandbox's processes write to.
        mount: where an overlay may be mounted; `remove` takes it away.
        keeper: the namespace that `disk` and `mount` are in, where this driver may mount only in one.
        bounded: whether `disk` is a file system of its own.
    """

    def __init__(self, base: str, disk_mb: int, max_files: int):
        _sweep(base)
        with _locked(base):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path.chmod(0o711)
        self.disk, self.mount, self.keeper = self.path / DISK, self.path / MOUNT, None
        try:
            self.bounded = mount_bounded(self.disk, disk_mb, max_files)
        except OSError:
            self.remove()
            raise
        if not self.bounded and os.geteuid() != 0:
            with contextlib.suppress(OSError):  # no user namespaces: bwrap will say so
                self.keeper = Keeper(self.disk, tmpfs_options(disk_mb, max_files))
                self.disk, self.mount = self.keeper.seen(self.disk), self.keeper.seen(self.mount)
                self.bounded = True

    def limit(self, config: SandboxConfig) -> cgroup.ControlGroups:
        """New control groups, which go with this directory. Raises OSError."""
        memory_mb = config.memory_mb + (config.disk_mb if self.bounded else 0)  # a tmpfs is charged to who fills it
        parents = cgroup.find_parents(config)
        paths = cgroup.group_paths(parents, self.path.name)
        (self.path / cgroup.LIST).write_text("".join(f"{path}\n" for path in paths))  # before there is one to be lost
        return cgroup.ControlGroups(
            parents,
            self.path.name,
            memory_bytes=memory_mb << 20,
            max_processes=config.max_processes,
            cpus=config.cpus,
        )

    def remove(self) -> None:
        try:
            if self.keeper is not None:
                self.keeper.close()
            _release(self.path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def shared_base(directory: str | Path | None, owner: int | None) -> str:
    """The base of this user's sandboxes, made if missing, below the first reachable directory (see `reachable`).

    Raises:
        T1Error: there is none, or somebody else's directory stands in its place.
    """
    path = Path(reachable(directory, owner)) / f"{BASE}-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o711)
        path.chmod(0o711)  # whatever the umask
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise T1Error(
            "the directory for sandboxes is not this user's own",
            where=str(path),
            remedy="remove it, or name another place with env.sandbox.scratch_dir",
        )
    return str(path)


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


def clear_abandoned(config: SandboxConfig) -> None:
    """Remove what killed drivers left on this machine: a sandbox's disk lies in memory, and no next driver may come."""
    with contextlib.suppress(T1Error, OSError):  # said where a sandbox is wanted
        remove_abandoned(shared_base(config.scratch_dir, host_identity(config)))


def remove_abandoned(base: str) -> int:
    """Remove sandbox directories below `base` whose driver is dead, with their mounts; returns how many."""
    with _locked(base):  # nobody is between making a directory and locking it
        abandoned = [(path, lock) for path in Path(base).glob(f"{PREFIX}*") if (lock := _take(path)) is not None]
    removed = 0
    for path, lock in abandoned:
        with contextlib.suppress(OSError):  # another driver was faster
            _release(path)
            removed += 1
        if lock >= 0:
            os.close(lock)
    return removed


def _release(path: Path) -> None:
    """A sandbox's mounts, files and control groups. Raises OSError."""
    groups = []
    with contextlib.suppress(FileNotFoundError):
        groups = [Path(line) for line in (path / cgroup.LIST).read_text().splitlines()]
    unmount(path / MOUNT)
    unmount(path / DISK)
    cgroup.remove_groups([group for group in groups if group.name == path.name])
    remove_tree(path)  # with the list of groups, which a later driver needs if one could not be removed


def _take(path: Path) -> int | None:
    """The lock of an abandoned directory (-1: its driver died before it had one); None: its driver lives."""
    try:
        lock = os.open(path / LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


@contextlib.contextmanager
def _locked(base: str) -> Iterator[None]:
    """Held only while directories are made and locked, or looked through."""
    lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@cache
def _sweep(base: str) -> None:
    """Once in a process for each base."""
    remove_abandoned(base)
