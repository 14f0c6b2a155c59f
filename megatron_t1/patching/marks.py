"""Our own lines in a checkout, by the comment above them: what is known of patches whose record is lost."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from megatron_t1.patching.declaration import Patch
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.tree import Tree

MARK = "# t1 patch: "
_MARKED = re.compile(rb"^[ \t]*# t1 patch: ([a-z][a-z0-9_]*)[ \t]*\r?$", re.MULTILINE)


def find_marks(tree: Tree, patches: Mapping[str, Patch]) -> dict[str, tuple[str, ...]]:
    """Name of a patch -> files in which a comment names it, sorted.

    Looked at are the Python files below the topmost folders that the patches change: a fork may have moved code within.
    A patch that only adds arguments leaves no comment.
    """
    edits = [edit for patch in patches.values() for variant in patch.variants for edit in variant.edits]
    found: dict[str, list[str]] = {}
    for top in sorted({PurePosixPath(edit.file).parts[0] for edit in edits}):
        for file in _python_files(tree, top):
            try:
                names = {name.decode() for name in _MARKED.findall(tree.read(file))}
            except (OSError, PatchError):  # not to be read, or a link that leads out: no file of ours
                continue
            for name in names:
                found.setdefault(name, []).append(file)
    return {name: tuple(sorted(files)) for name, files in sorted(found.items())}


def _python_files(tree: Tree, top: str) -> list[str]:
    if top.endswith(".py"):
        return [top] if (tree.root / top).is_file() else []
    return [
        PurePosixPath(os.path.relpath(os.path.join(folder, name), tree.root)).as_posix()
        for folder, _, names in os.walk(tree.root / top)
        for name in names
        if name.endswith(".py")
    ]
