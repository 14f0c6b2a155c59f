"""What COPY and ADD take from environment/: files that match, read with their permission bits."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import stat
from collections.abc import Sequence
from pathlib import Path

from megatron_t1.environment.tree import MAX_ENTRIES, Reader, walk

_WILDCARDS = "*?["


class BuildContext:
    """Bounds what all of a Dockerfile's instructions read together, as one may copy the same files again and again."""

    def __init__(self, directory: Path):
        self._root, self._reader, self._entries = directory.resolve(), Reader(), 0

    def ignores_files(self) -> bool:
        """Whether .dockerignore says anything. Raises OSError, ValueError: it can't be read."""
        try:
            lines = self._reader.read(self._root / ".dockerignore")[0].decode().splitlines()
        except FileNotFoundError:
            return False
        return any(line.strip() and not line.startswith("#") for line in lines)

    def collect(
        self, patterns: Sequence[str], target: str, into_directory: bool
    ) -> tuple[dict[str, tuple[bytes, int]], dict[str, str], tuple[str, ...]]:
        """Files, links and directories by their absolute path in the image, as in `CopyFiles`.

        Args:
            target: absolute path of the destination.
            into_directory: a file keeps its name below `target`.

        Raises:
            ValueError: a source is not there, or lies outside of environment/.
            OSError: one can't be read, is no regular file, or they come to too much.
        """
        files: dict[str, tuple[bytes, int]] = {}
        links: dict[str, str] = {}
        directories: list[str] = []
        for source in self._sources(patterns):
            if not source.is_dir() or source.is_symlink():
                self._count()
                files[posixpath.join(target, source.name) if into_directory else target] = self._reader.read(source)
                continue
            directories.append(target)
            for entry in walk(source):
                self._count()
                path = posixpath.normpath(posixpath.join(target, entry.name))
                if stat.S_ISLNK(entry.mode):
                    links[path] = os.readlink(entry.path)
                elif stat.S_ISDIR(entry.mode):
                    directories.append(path)
                elif stat.S_ISREG(entry.mode):
                    files[path] = self._reader.read(entry.path)
        return files, links, tuple(directories)

    def _count(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} files")

    def _sources(self, patterns: Sequence[str]) -> list[Path]:
        found = []
        for pattern in patterns:
            relative = posixpath.normpath(pattern.lstrip("/"))
            if any(character in relative for character in _WILDCARDS):
                matches = self._matching(relative.split("/"))
            else:
                matches = [self._root / relative]
            matches = [match for match in matches if os.path.lexists(match)]
            if not matches:
                raise ValueError(f"{pattern} does not exist in environment/")
            for match in matches:
                if not match.resolve().is_relative_to(self._root):
                    raise ValueError(f"{pattern} lies outside environment/")
            found += matches
        return found

    def _matching(self, parts: list[str]) -> list[Path]:
        """Like docker, a part of the pattern for each folder (`**` is `*`), and through no link."""
        if ".." in parts or any("\\" in part for part in parts):
            raise ValueError(f"{'/'.join(parts)} is a pattern that is not supported")
        found = [self._root]
        for part in parts:
            folders = [folder for folder in found if folder.is_dir() and not folder.is_symlink()]
            found = []
            for folder in folders:
                for name in sorted(os.listdir(folder)):
                    self._count()
                    if fnmatch.fnmatchcase(name, part.replace("[^", "[!")):
                        found.append(folder / name)
        return found
