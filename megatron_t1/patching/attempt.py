"""One patch on the files of a tree: what it comes to, and the files after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from megatron_t1.patching.declaration import Edit, Patch, Variant
from megatron_t1.patching.edits import Outcome, perform
from megatron_t1.patching.errors import MissingError, PatchError
from megatron_t1.patching.syntax import Source
from megatron_t1.patching.tree import CORE, Tree

ReadSource = Callable[[str], Source]


@dataclass(frozen=True)
class Attempt:
    """What a patch comes to.

    Attributes:
        state: "there": its change is in the source, done by hand or by the release. "not needed": not for this version
            or this kind of tree. "applicable": it can be applied, with `after` as the result. "conflict": the source
            isn't as expected.
        detail: why; for a conflict, expected and found.
        after: the changed files.
    """

    state: Literal["there", "not needed", "applicable", "conflict"]
    detail: str = ""
    after: dict[str, Source] = field(default_factory=dict)


def attempt(patch: Patch, tree: Tree, read: ReadSource) -> Attempt:
    """Try a patch without writing anything.

    Args:
        tree: says the version and which files exist.
        read: gives a file's source, as earlier patches would leave it.
    """
    variants = patch.variants_for(tree.version)
    if not variants:
        return Attempt("not needed", f"for megatron-core {patch.versions}; this is {tree.version}")
    attempts = []
    for variant in variants:
        attempts.append(result := _attempt_variant(patch, variant, tree, read))
        if result.state != "conflict":
            return result
    return attempts[0]


def _attempt_variant(patch: Patch, variant: Variant, tree: Tree, read: ReadSource) -> Attempt:
    missing = sorted({edit.file for edit in variant.edits if not tree.has(edit.file)})
    if any(file.startswith(f"{CORE}/") for file in missing):
        return Attempt("conflict", f"expected: {', '.join(missing)}\nfound:    no such file")
    if missing:
        return Attempt("not needed", f"for full Megatron-LM checkouts; this tree has no {', '.join(missing)}")
    after: dict[str, Source] = {}
    present: list[str] = []
    done: list[str] = []
    for edit in variant.edits:
        try:
            file, outcome = _perform(edit, patch, tree, lambda file: after.get(file) or read(file))
        except PatchError as error:
            return Attempt("conflict", str(error))
        if outcome.source is not None:
            after[file] = outcome.source
        # What only strengthens a change isn't missed where somebody made the change by hand.
        if outcome.present or (outcome.source is not None and not edit.strengthens):
            (present if outcome.present else done).append(f"{file} ({edit.target or 'file'})")
    if not done:
        return Attempt("there", "by hand, or by this release")
    if present:
        return Attempt(
            "conflict",
            f"expected: all of the change, or nothing of it\nfound:    there already: {', '.join(present)}; "
            f"not there: {', '.join(done)}\n"
            "  remedy: complete it by hand, or take out what is there and apply the patch",
        )
    return Attempt("applicable", after=after)


def _perform(edit: Edit, patch: Patch, tree: Tree, read: ReadSource) -> tuple[str, Outcome]:
    """Do an edit; in the file that the declared one imports the target from, where a fork has moved it there."""
    source = read(edit.file)
    try:
        return edit.file, perform(edit, source, patch.name)
    except MissingError:
        moved = _moved_to(edit, source, tree)
        if moved is not None:
            return moved, perform(edit, read(moved), patch.name)
        if edit.optional:
            return edit.file, Outcome(None)
        raise


def _moved_to(edit: Edit, source: Source, tree: Tree) -> str | None:
    found = source.imported_from(edit.target.partition(".")[0])
    if found is None:
        return None
    module, level = found
    folder = PurePosixPath(*PurePosixPath(edit.file).parts[:-level]) if level else PurePosixPath()
    path = folder.joinpath(*module.split(".")) if module else folder
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        if tree.has(candidate):
            return candidate
    return None
