"""The private root directory of a sandbox, written by the driver, over a read-only system.

The driver may be root while the content is the agent's. What is written by path lies at the top of the root, or is
written while no process of the sandbox is alive; everything else goes through `inside`.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

from megatron_t1.environment.image import CopyFiles
from megatron_t1.environment.sandbox.changes import Snapshot
from megatron_t1.environment.sandbox.inside import Inside, read_regular
from megatron_t1.environment.sandbox.keeper import Keeper

SKELETON = {  # directory below the root -> permission bits; parents first
    "dev": 0o755, "etc": 0o755, "home": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o755, "root": 0o700, "run": 0o755,
    "srv": 0o755, "tmp": 0o1777, "usr": 0o755, "var": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into usr on a merged-/usr system
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
ETC_MOUNTS = ("ld.so.cache", "alternatives")  # the part of /etc that the system's programs depend on


class PrivateRoot:
    """Directory `path` with the system's directories bound over it.

    Args:
        owner: uid and gid of its content; None: whoever runs the driver.
        system: the file system that /usr comes from: this host's, or a base's.
        keeper: the namespace that `path` is in, if it isn't the driver's own.

    Attributes:
        files: access to its content.
    """

    def __init__(self, path: Path, owner: int | None, system: Path = Path("/"), keeper: Keeper | None = None):
        self.path, self.owner, self.system, self.keeper = path, owner, system, keeper
        self._pristine = False
        self._etc_mounts = [name for name in ETC_MOUNTS if (system / "etc" / name).exists()]
        apart = {name for name in MERGED if self._is_apart(name)}
        self.files = Inside(path, owner, frozenset({"dev", "proc", "usr", *apart}))

    @property
    def description(self) -> str:
        name = "this host's /usr" if self.system == Path("/") else f"/usr of {self.system}"
        return f"{name}, read-only, also for RUN"

    def snapshot(self) -> Snapshot:
        """To be taken when the build is done, with no process alive."""
        return Snapshot(self.files)

    def seal(self) -> None:
        """The build is done: from here on the system is read-only. No process of it may be alive."""
        self._restore_system()
        self._pristine = True

    def reset(self) -> None:
        """Make the root what it is before any task: the skeleton and nothing else. No process of it may be alive.

        What is already right stays, because making and removing directories is what a reset costs.
        """
        root = str(self.path)
        if not os.path.isdir(root):
            os.mkdir(root)
            self._own(root)
        os.chmod(root, 0o755)
        kept = {
            name: {child.partition("/")[2] for child in SKELETON if child.startswith(f"{name}/")} for name in SKELETON
        }
        kept["etc"] = {*ETC, *self._etc_mounts}
        self._keep_only(root, {*SKELETON, *(name for name in MERGED if (self.system / name).is_dir())})
        for name, mode in SKELETON.items():
            path = f"{root}/{name}"
            if not os.path.isdir(path):
                remove_tree(path)
                os.mkdir(path)
                self._own(path)
                os.chmod(path, mode)
            else:
                if stat.S_IMODE(os.lstat(path).st_mode) != mode:
                    os.chmod(path, mode)
                self._keep_only(path, kept[name])
        for name, text in ETC.items():
            path = f"{root}/etc/{name}"
            if not _is_plain(path, text.encode()):
                remove_tree(path)
                self._write(path, text.encode(), 0o644)
        self._restore_system()
        self._pristine = True

    def prepare_run(self) -> None:
        """To be called before every start of processes on the root: puts the system's part right again."""
        if not self._pristine:
            os.chmod(self.path, 0o755)
            self._restore_system()
        self._pristine = False

    def _keep_only(self, path: str, names: set[str]) -> None:
        """Remove every entry of a directory that has no skeleton's name, or is a link that takes its place."""
        with os.scandir(path) as entries:
            wrong = [
                entry.path
                for entry in entries
                if entry.name not in names or (entry.is_symlink() and entry.name not in MERGED)
            ]
        for child in wrong:
            remove_tree(child)

    def _restore_system(self) -> None:
        """Put back what makes the system trusted: links into /usr, mount points, no preloaded library.

        Nothing that an earlier session planted there takes part in the next one (a false /lib64 would even replace the
        loader of the verifier's Python).
        """
        for name in MERGED:
            if (self.system / name).is_symlink():
                target, path = os.readlink(self.system / name).lstrip("/"), self.path / name
                if not os.path.islink(path) or os.readlink(path) != target:
                    remove_tree(path)
                    os.symlink(target, path)
                    self._own(path)
            elif self._is_apart(name):
                self._plain_directory(name)
        for name in ("dev", "proc", "usr", "etc"):  # mount points
            self._plain_directory(name)
        for name in self._etc_mounts:
            path = self.path / "etc" / name
            if (self.system / "etc" / name).is_dir():
                self._plain_directory(f"etc/{name}")
            elif not _is_plain(path, b""):
                remove_tree(path)
                self._write(path, b"", 0o644)
        remove_tree(self.path / "etc" / "ld.so.preload")

    def fresh_mount_point(self, name: str) -> None:
        """An empty plain directory at the top of the root, whatever stood there."""
        remove_tree(self.path / name)
        self._plain_directory(name)

    def system_mounts(self) -> list[str]:
        """bwrap options that bind the system read-only."""
        options = []
        for name in ("usr", *filter(self._is_apart, MERGED), *(f"etc/{name}" for name in self._etc_mounts)):
            options += ["--ro-bind", str(self.system / name), f"/{name}"]
        return options

    def _is_apart(self, name: str) -> bool:
        """Whether the system has this directory beside /usr, not as a link into it."""
        return (self.system / name).is_dir() and not (self.system / name).is_symlink()

    def make_directory(self, inside: str) -> None:
        """Raises OSError."""
        self.files.make_directory(inside)

    def copy(self, step: CopyFiles) -> None:
        """Raises OSError."""
        for inside in step.directories:
            self.files.make_directory(inside)
        for inside, target in step.links.items():
            self.files.link(inside, target)
        for inside, (content, mode) in step.files.items():
            self.files.write(inside, content, mode)

    def remove(self) -> None:
        """Raises OSError."""
        remove_tree(self.path)

    def _plain_directory(self, name: str) -> None:
        path = self.path / name
        if path.is_symlink() or not path.is_dir():
            remove_tree(path)
            os.mkdir(path)
            os.chmod(path, 0o755)
            self._own(path)
        elif (mode := stat.S_IMODE(path.stat().st_mode)) & 0o700 != 0o700:
            os.chmod(path, mode | 0o700)

    def _write(self, path: str | Path, content: bytes, mode: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            if self.owner is not None:
                os.fchown(descriptor, self.owner, self.owner)
            os.fchmod(descriptor, mode)

    def _own(self, path: str | Path) -> None:
        if self.owner is not None:
            os.lchown(path, self.owner, self.owner)


def _is_plain(path: str | Path, content: bytes) -> bool:
    """Whether a regular file with this content and mode 644 stands there."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != 0o644:
            return False
        return status.st_size == len(content) and read_regular(path, len(content)) == content
    except (OSError, ValueError):
        return False


def remove_tree(path: str | Path) -> None:
    """Remove a file, link or tree, also one nested too deep for Python or without its owner's permissions."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(path)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--", str(path)], stderr=subprocess.DEVNULL, check=False)
        if os.path.lexists(path):
            raise
