"""The private root directory of a sandbox, written by the driver.

The driver may be root while the content is the agent's: every path is therefore resolved inside the root, link by link,
and nothing is written while a process of the sandbox is alive. System files come from the host's own /usr, read-only.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

from megatron_t1.environment.image import CopyFiles
from megatron_t1.errors import T1Error

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
MAX_LINKS = 40


class PrivateRoot:
    """Directory `path`, owned by `owner` (uid and gid; None: whoever runs the driver)."""

    def __init__(self, path: Path, owner: int | None):
        self.path, self.owner = path, owner
        self._pristine = False
        self._etc_mounts = [name for name in ("ld.so.cache", "alternatives") if os.path.exists(f"/etc/{name}")]

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
        self._keep_only(root, {*SKELETON, *(name for name in MERGED if os.path.isdir(f"/{name}"))})
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
            if os.path.islink(f"/{name}"):
                target, path = os.readlink(f"/{name}").lstrip("/"), self.path / name
                if not os.path.islink(path) or os.readlink(path) != target:
                    remove_tree(path)
                    os.symlink(target, path)
                    self._own(path)
            elif os.path.isdir(f"/{name}"):
                self._plain_directory(name)
        for name in ("dev", "proc", "usr", "etc"):  # mount points
            self._plain_directory(name)
        for name in self._etc_mounts:
            path = self.path / "etc" / name
            if os.path.isdir(f"/etc/{name}"):
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
        """bwrap options that bind the host's system read-only."""
        options = ["--ro-bind", "/usr", "/usr"]
        for name in MERGED:
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
                options += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in self._etc_mounts:
            options += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        return options

    def make_directory(self, inside: str) -> None:
        self._existing_directory(inside)

    def copy(self, step: CopyFiles) -> None:
        for inside in step.directories:
            self._existing_directory(inside)
        for inside, target in step.links.items():
            path = self._place(inside)
            remove_tree(path)
            os.symlink(target, path)
            self._own(path)
        for inside, (content, mode) in step.files.items():
            path = self._place(inside)
            if path.is_symlink() or path.exists():
                if path.is_dir() and not path.is_symlink():
                    raise T1Error(f"COPY can't replace the directory {inside}", where="environment/Dockerfile")
                path.unlink()
            self._write(path, content, mode)

    def is_directory(self, inside: str) -> bool:
        try:
            return self.resolve(inside).is_dir()
        except OSError:
            return False

    def resolve(self, inside: str) -> Path:
        """Host path of a path of the sandbox, following links as a process inside would; never leaves the root.

        Raises:
            OSError: a chain of links without end.
        """
        pending, resolved, links = list(reversed(inside.split("/"))), [], 0
        while pending:
            name = pending.pop()
            if name in ("", "."):
                continue
            if name == "..":
                resolved = resolved[:-1]
                continue
            path = self.path.joinpath(*resolved, name)
            if path.is_symlink():
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), inside)
                target = os.readlink(path)
                resolved = [] if target.startswith("/") else resolved
                pending += reversed(target.split("/"))
            else:
                resolved.append(name)
        return self.path.joinpath(*resolved)

    def _place(self, inside: str) -> Path:
        """Where the last component of `inside` lies, its folders made."""
        folder, _, name = inside.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise T1Error(f"{inside!r} names no file", where="environment/Dockerfile")
        return self._existing_directory(folder) / name

    def _existing_directory(self, inside: str) -> Path:
        missing = []
        path = self.resolve(inside)
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        if missing and path.is_relative_to(self.path / "usr"):
            raise T1Error(f"{inside} lies in the read-only system", where="environment/Dockerfile")
        for path in reversed(missing):
            os.mkdir(path)
            os.chmod(path, 0o755)
            self._own(path)
        return missing[0] if missing else path

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


def read_regular(path: str | Path, limit: int) -> bytes:
    """Content of a file that someone untrusted left.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a link, a special file, or more than `limit` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError("is a symbolic link" if error.errno == errno.ELOOP else error.strerror) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is not a regular file")
        content = bytearray()
        while len(content) <= limit and (block := os.read(descriptor, limit + 1 - len(content))):
            content += block
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return bytes(content)
