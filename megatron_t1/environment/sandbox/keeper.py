"""Mounts for a driver that is no root: a process that holds a user and a mount namespace in which it may mount.

The sandbox's disk is then a tmpfs of its own, which nobody else sees, and an overlay of a base can be mounted on it.
The driver looks into the namespace through /proc/PID/root; bwrap is started in it. When the driver dies, however it
does, the keeper's standard input ends, and with its last process the namespace and all that is mounted in it are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SCRIPT = 'mount -t tmpfs -o "$2" tmpfs "$1" && echo ready && exec cat'


class Keeper:
    """A namespace with a tmpfs mounted on `disk`.

    Args:
        disk: an empty directory, as it is called inside and outside of the namespace.
        options: of the tmpfs.

    Raises:
        OSError: EPERM where this user can't have such a namespace, with the reason in words.
    """

    def __init__(self, disk: Path, options: str):
        programs = [shutil.which(name) for name in ("unshare", "nsenter", "mount", "umount")]
        if not all(programs):
            raise OSError(errno.EPERM, "unshare, nsenter, mount or umount is not installed (util-linux)", str(disk))
        unshare, self._nsenter, self._mount, self._umount = programs
        command = [unshare, "--user", "--map-root-user", "--mount", "--propagation", "private", "--"]
        self._process = subprocess.Popen(
            [*command, "/bin/sh", "-c", _SCRIPT, "t1-keeper", str(disk), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        )
        self._root = f"/proc/{self._process.pid}/root"
        if self._process.stdout.readline() != b"ready\n" or not os.access(self.seen(disk), os.W_OK):
            reason = self._process.stderr.read(500) if self._process.poll() is not None else b"it can't be looked into"
            self.close()
            raise OSError(
                errno.EPERM, f"no namespace to mount in: {reason.decode(errors='replace').strip()}", str(disk)
            )

    def seen(self, path: Path) -> Path:
        """Where the driver finds what is called `path` in the namespace."""
        return Path(f"{self._root}{path}")

    def entered(self, command: Sequence[str]) -> list[str]:
        """The command run in the namespace, with paths as they are called there."""
        enter = [self._nsenter, f"--target={self._process.pid}", "--user", "--mount", "--preserve-credentials", "--"]
        return [*enter, *(word.replace(self._root, "") for word in command)]

    def mount(self, kind: str, path: Path, options: str) -> None:
        """Raises OSError (EPERM) with what mount says."""
        self._run([self._mount, "-t", kind, "-o", f"{options},nosuid,nodev", kind, str(path)])

    def unmount(self, path: Path) -> None:
        while os.path.ismount(path):
            self._run([self._umount, "--lazy", str(path)])

    def close(self) -> None:
        """Its processes other than the keeper must be dead. May be called twice."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(self.entered(command), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(errno.EPERM, done.stderr.strip()[-300:], command[-1])
