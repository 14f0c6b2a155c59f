"""The part of /etc that belongs to the system: what its programs load code from, or are told by which code to load.

/usr is read-only, but much of it leads into /etc: Debian's sitecustomize.py of Python and OpenSSL's openssl.cnf are
links there (the second names libraries that every program with OpenSSL in it loads, Python among them), and Perl looks
for modules in /etc/perl first. What is listed here is bound read-only, for the agent and for the verifier, also where
the system has nothing at that place. The rest of /etc is the agent's.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import threading
from functools import cache
from pathlib import Path

from megatron_t1.environment.sandbox.inside import Inside

SETTING_BYTES = 16 << 20  # of one file that is copied
SETTINGS_FILES = 4096  # of one directory that is copied
# Name below /etc -> whether it is a directory. Without a link in /usr: compiled into programs.
KNOWN = {"alternatives": True, "ld.so.cache": False, "perl": True, "ssl/openssl.cnf": False}
WHERE_PRESENT = {"crypto-policies": True, "pki/tls/openssl.cnf": False, "pki/tls/openssl.d": True}
# Data that tasks are about, though something in /usr leads to it: no program runs what stands there.
DATA = ("X11", "ca-certificates", "environment", "groff", "locale.alias", "localtime", "mtab", "os-release",
        "pki/ca-trust", "ssl/certs", "ssl/private")  # fmt: skip
SHARED = ("pki", "ssl")  # directories that hold data too: here a link protects the one thing that it leads to
_LINKING = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "local", "share")
_NO_CODE = ("share/doc", "share/info", "share/locale", "share/man", "lib/modules", "lib/systemd")


_looking = threading.Lock()


def system_settings(system: Path) -> dict[str, bool]:
    """Names below /etc of a system that doesn't change -> whether it is a directory. Looked for once, which takes
    about a second for a large /usr: sandboxes that start at the same time wait for the first one's answer."""
    with _looking:
        return _system_settings(system)


@cache
def _system_settings(system: Path) -> dict[str, bool]:
    present = {
        name: kind for name, kind in WHERE_PRESENT.items() if (system / "etc" / posixpath.dirname(name)).is_dir()
    }
    known = {name: kind for name, kind in KNOWN.items() if kind or (system / "etc" / name).exists() or "/" in name}
    return {**known, **present, **linked_settings(system)}


def linked_settings(root: Path, whole: Path | None = None) -> dict[str, bool]:
    """What links in /usr of a file system lead to in /etc.

    Args:
        whole: the file system that the links are followed in, where `root` is a layer of it.
    """
    found = {}
    for folder in _LINKING:
        pending = [f"usr/{folder}"]
        while pending:
            place = pending.pop()
            try:
                with os.scandir(root / place) as entries:
                    for entry in entries:
                        path = f"{place}/{entry.name}"
                        if entry.is_symlink():
                            found |= _unit(
                                whole or root, posixpath.normpath(posixpath.join("/", place, os.readlink(entry.path)))
                            )
                        elif entry.is_dir(follow_symlinks=False) and path.removeprefix("usr/") not in _NO_CODE:
                            pending.append(path)
            except OSError:
                continue
    return found


def _unit(root: Path, target: str) -> dict[str, bool]:
    """What to protect because of a link's target: mostly the whole directory of /etc that it lies in."""
    if not target.startswith("/etc/"):
        return {}
    name = target.removeprefix("/etc/")
    if any(name == data or name.startswith(f"{data}/") for data in DATA):
        return {}
    first = name.partition("/")[0]
    if first in SHARED or first == name:
        return {name: (root / "etc" / name).is_dir()}
    return {first: True}


def copy_tree(content: Inside, top: str, copy: Path) -> None:
    """Regular files, directories and links below `top` of somebody else's tree, into a new directory; nothing where
    `top` is no directory. Raises OSError for what can't be written."""
    copy.mkdir()
    copy.chmod(0o755)
    for number, (path, status) in enumerate(content.walk(top)):
        if number >= SETTINGS_FILES:
            return
        place = copy / path.removeprefix(f"{top}/")
        if stat.S_ISDIR(status.st_mode):
            place.mkdir()
            place.chmod(0o755)
        elif stat.S_ISLNK(status.st_mode):
            with content.folder(f"/{posixpath.dirname(path)}") as folder:
                place.symlink_to(os.readlink(posixpath.basename(path), dir_fd=folder))
        elif stat.S_ISREG(status.st_mode):
            with contextlib.suppress(ValueError):  # larger than any setting
                place.write_bytes(content.read(f"/{path}", SETTING_BYTES))
                place.chmod(0o755 if status.st_mode & 0o100 else 0o644)
