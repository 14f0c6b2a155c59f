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
from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.keeper import Keeper
from megatron_t1.environment.sandbox.settings import SETTING_BYTES, copy_tree, system_settings

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
        self._aside = path.with_name("settings")  # beside the root: no process inside can reach it
        self._settings = system_settings(system)
        self._sources: dict[str, Path] = {}
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

        Nothing of the root before stays, directories included: their attributes and times could carry a message.
        """
        remove_tree(self.path)
        os.mkdir(self.path)
        for name, mode in {"": 0o755, **SKELETON}.items():
            path = f"{self.path}/{name}"
            if name:
                os.mkdir(path)
            self._own(path)
            os.chmod(path, mode)
        for name, text in ETC.items():
            self._write(f"{self.path}/etc/{name}", text.encode(), 0o644)
        self._collect_settings()
        self._restore_system()
        self._pristine = True

    def prepare_run(self) -> None:
        """To be called before every start of processes on the root: puts the system's part right again."""
        if not self._pristine:
            os.chmod(self.path, 0o755)
            self._restore_system()
        self._pristine = False

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
        for name, source in self._sources.items():
            self._mount_point(f"etc/{name}", source.is_dir())
        remove_tree(self.path / "etc" / "ld.so.preload")

    def fresh_mount_point(self, name: str) -> None:
        """An empty plain directory at the top of the root, whatever stood there."""
        remove_tree(self.path / name)
        self._plain_directory(name)

    def system_mounts(self) -> list[str]:
        """bwrap options that bind the system read-only."""
        options = []
        for name in ("usr", *filter(self._is_apart, MERGED)):
            options += ["--ro-bind", str(self.system / name), f"/{name}"]
        return [*options, *self._settings_mounts()]

    def _settings_mounts(self) -> list[str]:
        return [word for name, source in self._sources.items() for word in ("--ro-bind", str(source), f"/etc/{name}")]

    def _collect_settings(self) -> None:
        """Where the content of each of `system_settings` lies: in the system, or aside, empty where there is none."""
        self._sources.clear()
        remove_tree(self._aside)
        self._aside.mkdir()
        self._aside.chmod(0o755)
        content = Inside(self.system, None)
        for name, is_directory in self._settings.items():
            self._sources[name] = self._setting(content, name, is_directory)

    def _setting(self, content: Inside, name: str, is_directory: bool) -> Path:
        source = self.system / "etc" / name
        if source.is_dir() if is_directory else source.is_file():
            if not any(
                path.is_symlink()
                for path in (source, *source.parents)
                if path.is_relative_to(self.system) and path != self.system
            ):
                return source
        return self._kept_aside(content, name, is_directory)

    def _kept_aside(self, content: Inside, name: str, is_directory: bool) -> Path:
        """A copy of what stands at /etc/`name`, or something empty in its place."""
        copy = self._aside / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if is_directory:
            copy_tree(content, f"etc/{name}", copy)
        else:
            try:
                copy.write_bytes(content.read(f"/etc/{name}", SETTING_BYTES))
            except (OSError, ValueError):
                copy.write_bytes(b"")
            copy.chmod(0o644)
        return copy

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

    def _mount_point(self, name: str, is_directory: bool) -> None:
        """Something to mount over at a path of the root, with nothing but plain directories above it."""
        parents = name.split("/")
        for depth in range(1, len(parents) + is_directory):
            self._plain_directory("/".join(parents[:depth]))
        if not is_directory:
            path = self.path / name
            if not os.path.lexists(path) or not stat.S_ISREG(path.lstat().st_mode):
                remove_tree(path)
                self._write(path, b"", 0o644)

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
