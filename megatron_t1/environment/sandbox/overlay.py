"""A root over a base system, writable everywhere while it is built: an overlay on the sandbox's disk.

What a build wrote to /usr becomes, with the base, the system: read-only for the agent and the verifier, so that neither
the agent's programs nor its libraries take part in the verdict.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatron_t1.environment.sandbox.changes import Snapshot
from megatron_t1.environment.sandbox.disk import NOSUID_NODEV, mount, unmount
from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.keeper import Keeper
from megatron_t1.environment.sandbox.root import ETC, MERGED, PrivateRoot, remove_tree
from megatron_t1.environment.sandbox.scratch import ScratchDirectory
from megatron_t1.environment.sandbox.settings import linked_settings, system_settings

UPPER, WORK = "upper", "work"


class OverlayRoot(PrivateRoot):
    """See `PrivateRoot`.

    Args:
        scratch: where the overlay gets mounted, with what is written to it on the sandbox's disk.
        system: the base, which belongs to `owner`.
    """

    def __init__(self, scratch: ScratchDirectory, owner: int | None, system: Path):
        super().__init__(scratch.mount, owner, system, scratch.keeper)
        self._layers = scratch.disk
        self._sealed = False
        self.files = Inside(self.path, owner, frozenset({"dev", "proc"}))

    @property
    def description(self) -> str:
        return f"overlay of {self.system}, /usr read-only once it is built"

    def reset(self) -> None:
        self.remove()
        for name in (UPPER, WORK):
            (self._layers / name).mkdir()
        self._own(self._layers / UPPER)
        (self._layers / UPPER).chmod(0o755)
        self.path.mkdir()
        _mount(self.system, self._layers, self.path, self.keeper)
        for name in ("dev", "proc"):
            self._plain_directory(name)
        for name in ("hosts", "hostname"):
            self.files.write(f"/etc/{name}", ETC[name].encode(), 0o644)
        self._sealed, self._pristine = False, True

    def seal(self) -> None:
        """Settings that the build left are kept aside: an agent could move /etc away."""
        self._settings = {**linked_settings(self._layers / UPPER, self.path), **system_settings(self.system)}
        self._collect_settings()
        self._sealed = True
        super().seal()

    def _setting(self, content: Inside, name: str, is_directory: bool) -> Path:
        if os.path.lexists(self._layers / UPPER / "etc" / name):
            return self._kept_aside(self.files, name, is_directory)
        return super()._setting(content, name, is_directory)

    def snapshot(self) -> Snapshot:
        return Snapshot(Inside(self._layers / UPPER, None, self.files.sealed), Inside(self.system, None))

    def remove(self) -> None:
        _unmount(self.path, self.keeper)
        for path in (self.path, self._layers / UPPER, self._layers / WORK):
            remove_tree(path)

    def _restore_system(self) -> None:
        if self._sealed:
            super()._restore_system()

    def system_mounts(self) -> list[str]:
        if not self._sealed:
            return []
        options = []
        for name in ("usr", *filter(self._is_apart, MERGED)):
            options += ["--ro-bind", str(self.path / name), f"/{name}"]
        return [*options, *self._settings_mounts()]


def may_mount_overlays(base: Path, scratch: ScratchDirectory) -> bool:
    """Whether this driver can put an overlay of `base` on a sandbox's disk; tried once for each base.

    Raises:
        OSError: it failed for another reason than permission or a kernel without such overlays.
    """
    if base not in _answers:
        folders = (scratch.mount, scratch.disk / UPPER, scratch.disk / WORK)
        for folder in folders:
            folder.mkdir()
        try:
            _mount(base, scratch.disk, scratch.mount, scratch.keeper)
            _unmount(scratch.mount, scratch.keeper)
            _answers[base] = True
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENODEV, errno.EINVAL):
                raise
            _answers[base] = False
        finally:
            for folder in folders:
                remove_tree(folder)
    return _answers[base]


_answers: dict[Path, bool] = {}


def _mount(base: Path, layers: Path, path: Path, keeper: Keeper | None) -> None:
    options = f"lowerdir={base},upperdir={layers / UPPER},workdir={layers / WORK}"
    if keeper is None:
        mount("overlay", path, options, NOSUID_NODEV)
    else:
        keeper.mount("overlay", path, f"{options},userxattr")


def _unmount(path: Path, keeper: Keeper | None) -> None:
    if keeper is None:
        unmount(path)
    else:
        keeper.unmount(path)
