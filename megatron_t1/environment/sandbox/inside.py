"""Files below a directory whose content is somebody else's, also while their processes change it.

Every path is walked component by component with descriptors, links resolved as a process inside would: there is no
moment at which a link put in a directory's place could lead the driver (which may be root) out of the root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_t1.environment.sandbox.interface import RESULT_LIMIT_BYTES

MAX_LINKS = 40
MAX_DEPTH = 256  # directories of a walk; what lies deeper is not looked at
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Inside:
    """The tree below `path`.

    Args:
        owner: uid and gid of what is written; None: whoever runs the driver.
        sealed: names at the top where something else is mounted for the processes inside: never entered.
    """

    def __init__(self, path: Path, owner: int | None, sealed: frozenset[str] = frozenset()):
        self.path, self.owner, self.sealed = path, owner, sealed

    def is_directory(self, inside: str) -> bool:
        """Whether a process inside could enter it. True also for what is sealed: that is the system's."""
        try:
            with self.folder(inside):
                return True
        except OSError as error:
            return error.errno == errno.EROFS

    def real(self, inside: str, links: int = MAX_LINKS) -> str:
        """The path with its links followed, as far as there is something."""
        path, rest = inside.rstrip("/"), ""
        while path:
            try:
                with self._folder(path, make=False) as (descriptor, names):
                    place, target = "/" + "/".join(names), ""
                    with contextlib.suppress(OSError):
                        target = os.readlink(rest[1:], dir_fd=descriptor)
                break
            except OSError as error:
                if error.errno == errno.EROFS:
                    return inside
            path, _, name = path.rpartition("/")
            rest = f"/{name}{rest}"
        else:
            return inside
        return self.real(posixpath.join(place, target), links - 1) if target and links else f"{place.rstrip('/')}{rest}"

    @contextlib.contextmanager
    def folder(self, inside: str, make: bool = False) -> Iterator[int]:
        """A descriptor (O_PATH) of the directory `inside`, with `make` made where missing.

        Raises:
            OSError: missing, no directory, a chain of links without end, or (EROFS) in what is sealed.
        """
        with self._folder(inside, make) as (descriptor, _):
            yield descriptor

    @contextlib.contextmanager
    def _folder(self, inside: str, make: bool) -> Iterator[tuple[int, list[str]]]:
        """`folder`, and the names that lead to it without a link."""
        opened, names = [os.open(self.path, _FOLDER)], []
        pending, links = list(reversed(inside.split("/"))), 0
        try:
            while pending:
                name = pending.pop()
                if name in ("", "."):
                    continue
                if name == "..":
                    if names:
                        names.pop()
                        os.close(opened.pop())
                    continue
                if not names and name in self.sealed:
                    raise OSError(errno.EROFS, "lies in the read-only system", inside)
                try:
                    opened.append(os.open(name, _FOLDER, dir_fd=opened[-1]))
                    names.append(name)
                except FileNotFoundError:
                    if not make:
                        raise
                    self._make_directory(name, opened[-1])
                    pending.append(name)
                except NotADirectoryError:
                    target, links = _readlink(name, opened[-1]), links + 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), inside) from None
                    if target.startswith("/"):
                        while names:
                            names.pop()
                            os.close(opened.pop())
                    pending += reversed(target.split("/"))
            yield opened[-1], names
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def make_directory(self, inside: str) -> None:
        """With all directories above it. Raises OSError."""
        with self.folder(inside, make=True):
            pass

    def write(self, inside: str, content: bytes, mode: int) -> None:
        """A regular file, complete or not at all; replaces a file or link, never a directory. Raises OSError."""
        folder, name = _split(inside)
        with self.folder(folder, make=True) as parent:
            temporary = f".t1-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600, dir_fd=parent)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    if self.owner is not None:
                        os.fchown(descriptor, self.owner, self.owner)
                    os.fchmod(descriptor, mode)
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError as error:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
                raise OSError(error.errno, error.strerror, inside) from error

    def link(self, inside: str, target: str) -> None:
        """A symbolic link in place of a file, link or nothing. Raises OSError."""
        folder, name = _split(inside)
        with self.folder(folder, make=True) as parent:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            os.symlink(target, name, dir_fd=parent)
            if self.owner is not None:
                os.chown(name, self.owner, self.owner, dir_fd=parent, follow_symlinks=False)

    def read(self, inside: str, limit: int) -> bytes:
        """Content of a regular file, links followed inside.

        Raises:
            OSError: missing, not readable, or in what is sealed.
            ValueError: a special file, or more than `limit` bytes.
        """
        for _ in range(MAX_LINKS):
            folder, name = _split(inside)
            with self.folder(folder) as parent:
                if folder.strip("/") == "" and name in self.sealed:
                    raise OSError(errno.EROFS, "lies in the read-only system", inside)
                try:
                    return _read_open(os.open(name, _READ, dir_fd=parent), limit)
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                target = _readlink(name, parent)
            inside = target if target.startswith("/") else f"{folder}/{target}"
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), inside)

    def walk(self, top: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Every entry below the directory `top` (relative, no links) that isn't sealed, parents first: its relative
        path and lstat. What can't be entered, or lies deeper than `MAX_DEPTH`, shows as its directory alone."""
        pending = [top]
        while pending:
            folder = pending.pop()
            try:
                names = self._names(folder)
            except OSError:
                continue
            for name, status in names:
                path = f"{folder}/{name}" if folder else name
                if path in self.sealed:
                    continue
                yield path, status
                if stat.S_ISDIR(status.st_mode) and path.count("/") < MAX_DEPTH:
                    pending.append(path)

    def status(self, relative: str) -> os.stat_result | None:
        """lstat of a relative path none of whose parents may be a link; None: there is nothing."""
        folder, _, name = relative.rpartition("/")
        try:
            descriptor = self._plain(folder)
        except OSError:
            return None
        try:
            return os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(descriptor)

    def _names(self, folder: str) -> list[tuple[str, os.stat_result]]:
        opened = self._plain(folder)
        try:
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=opened)
        finally:
            os.close(opened)
        found = []
        try:
            for name in os.listdir(readable):
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, os.stat(name, dir_fd=readable, follow_symlinks=False)))
        finally:
            os.close(readable)
        return found

    def _plain(self, relative: str) -> int:
        """Descriptor of a directory, no component of which is a link."""
        descriptor = os.open(self.path, _FOLDER)
        for name in filter(None, relative.split("/")):
            try:
                deeper = os.open(name, _FOLDER, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = deeper
        return descriptor

    def _make_directory(self, name: str, parent: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                if self.owner is not None:
                    os.fchown(descriptor, self.owner, self.owner)
                os.fchmod(descriptor, 0o755)
            finally:
                os.close(descriptor)


def read_regular(path: str | Path, limit: int) -> bytes:
    """Content of a file that someone untrusted left in a directory of the driver's.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a link, a special file, or more than `limit` bytes.
    """
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError("is a symbolic link" if error.errno == errno.ELOOP else error.strerror) from error
    return _read_open(descriptor, limit)


def read_results(directory: Path, names: Iterable[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """What a verifier left in a directory of the driver's: name -> content, and name -> why it was not read."""
    files, problems = {}, {}
    for name in names:
        try:
            files[name] = read_regular(directory / name, RESULT_LIMIT_BYTES)
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            problems[name] = str(error)
    return files, problems


def _read_open(descriptor: int, limit: int) -> bytes:
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is not a regular file")
        content = bytearray()
        while len(content) <= limit and (block := os.read(descriptor, min(1 << 20, limit + 1 - len(content)))):
            content += block
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return bytes(content)


def _split(inside: str) -> tuple[str, str]:
    folder, _, name = inside.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or "\0" in inside:
        raise OSError(errno.EINVAL, "names no file", inside)
    return folder, name


def _readlink(name: str, parent: int) -> str:
    """Raises NotADirectoryError for what is no link (asked because it could not be entered)."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        number = errno.ENOTDIR if error.errno == errno.EINVAL else error.errno
        raise OSError(number, os.strerror(number), name) from error
