"""A Megatron tree on disk: its root, its version, and files that are read and named safely."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from megatron_t1.patching.errors import PatchError

CORE = "megatron/core"
PACKAGE_INFO = f"{CORE}/package_info.py"


class Tree:
    """A Megatron-LM checkout, or a directory that holds an installed `megatron/core`.

    Attributes:
        root: its resolved path. No file outside it is read or written, through symbolic links neither.
        version: of megatron-core by its package_info.py (read, not run); None where that says none.

    Raises:
        PatchError: there is no megatron/core in it.
    """

    def __init__(self, directory: str | Path):
        given = Path(directory)
        try:
            self.root = given.resolve(strict=True)
        except OSError as error:
            raise PatchError("no such directory", where=str(given), remedy="name a Megatron checkout") from error
        if not (self.root / CORE).is_dir():
            inner = next((up for up in (self.root, *self.root.parents) if (up / CORE).is_dir()), None)
            raise PatchError(
                f"there is no {CORE} in this directory",
                where=str(self.root),
                remedy=f"give --checkout {inner}" if inner else "give a checkout's root, or a site-packages directory",
            )
        self.version = self._read_version()

    def path(self, file: str) -> Path:
        """Where a file of the tree really lies.

        Raises:
            PatchError: the path leads out of the tree, or to something that is no file.
        """
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise PatchError(f"{file!r} isn't a path inside the checkout", where=str(self.root))
        real = Path(os.path.realpath(self.root / relative))
        if not real.is_relative_to(self.root):
            raise PatchError(
                f"{file} leads out of the checkout, to {real}",
                where=str(self.root),
                remedy="replace the symbolic link by the files themselves, or patch the tree that it points to",
            )
        if real.exists() and not stat.S_ISREG(real.stat().st_mode):
            raise PatchError(f"{file} isn't a file", where=str(self.root))
        return real

    def has(self, file: str) -> bool:
        return self.path(file).is_file()

    def read(self, file: str) -> bytes:
        return self.path(file).read_bytes()

    def _read_version(self) -> Version | None:
        if not self.has(PACKAGE_INFO):
            return None
        numbers: dict[str, object] = {}
        try:
            for node in ast.parse(self.read(PACKAGE_INFO)).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    numbers.update({t.id: node.value.value for t in node.targets if isinstance(t, ast.Name)})
            return Version("{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**numbers))
        except (SyntaxError, ValueError, KeyError, InvalidVersion):
            return None
