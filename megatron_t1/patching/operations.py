"""The four things `t1 patch` does to a checkout: status, apply, revert, diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from megatron_t1.patching.declaration import Patch
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.plan import Finding, Plan, Survey, chosen, plan_apply, plan_revert
from megatron_t1.patching.record import RECORD, Record
from megatron_t1.patching.transaction import commit, interrupted, locked, recover
from megatron_t1.patching.tree import Tree

__all__ = ["apply", "diff", "interrupted", "revert", "status"]


def status(tree: Tree, patches: Mapping[str, Patch], only: Iterable[str] = ()) -> list[Finding]:
    """What each patch is to the checkout, the ones that can be applied taken together."""
    survey = Survey.of(tree)
    return survey.find(patches, chosen(patches, survey, only, with_required=False))[0]


def apply(
    tree: Tree, patches: Mapping[str, Patch], only: Iterable[str] = (), *, dry_run: bool = False
) -> tuple[Plan, list[Finding]]:
    """Apply all patches that fit (or those in `only`, and what they require), or nothing.

    Returns:
        What was done, and what each of them had been to the checkout.

    Raises:
        PatchError: a place isn't as expected, somebody else changes the checkout, a file was edited meanwhile.
    """
    with _held(tree, dry_run):
        survey = Survey.of(tree)
        plan, findings = plan_apply(survey, patches, only)
        if plan.patches and not dry_run:
            commit(tree, plan.changes, plan.record.encode())
    return plan, findings


def revert(tree: Tree, patches: Mapping[str, Patch], only: Iterable[str] = (), *, dry_run: bool = False) -> Plan:
    """Take back all applied patches (or those in `only`): the files are byte for byte what they were.

    Raises:
        PatchError: patched lines were edited since, or a patch that stays needs one that goes.
    """
    with _held(tree, dry_run):
        survey = Survey.of(tree)
        plan = plan_revert(survey, patches, only)
        stale = survey.record == Record() and tree.has(RECORD)
        if (plan.patches or stale) and not dry_run:
            commit(tree, plan.changes, plan.record.encode())
    return plan


def diff(tree: Tree, patches: Mapping[str, Patch], only: Iterable[str] = ()) -> str:
    """A unified diff of what the patches change: those applied against the files without them, the others as planned.

    For a file whose patched lines were edited since, the edits against the file as it was patched.
    """
    _refuse_interrupted(tree)
    survey = Survey.of(tree)
    names = chosen(patches, survey, only, with_required=True)
    findings, after = survey.find(patches, names)
    lost = {file for file, base in survey.bases.items() if base is None}
    if lost:
        known = survey.record.files
        return "".join(unified(f, known[f].patched, survey.now[f] or b"", "as patched", "now") for f in sorted(lost))
    applied = [finding.name for finding in findings if finding.state == "applied"]
    without = plan_revert(survey, patches, applied).changes if applied else {}
    before = {file: contents for file, (_, contents) in without.items()}
    parts = []
    for file in sorted({*before, *after}):
        now = tree.read(file)
        parts.append(unified(file, before.get(file, now), after[file].module.bytes if file in after else now))
    return "".join(parts)


def unified(file: str, before: bytes, after: bytes, old: str = "", new: str = "") -> str:
    """A unified diff that `git apply` and `patch -p1` read."""

    def lines(data: bytes) -> list[str]:
        return data.decode("utf-8", "surrogateescape").splitlines(keepends=True)

    made = difflib.unified_diff(lines(before), lines(after), f"a/{file}", f"b/{file}", old, new)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


@contextmanager
def _held(tree: Tree, dry_run: bool) -> Iterator[None]:
    if dry_run:
        _refuse_interrupted(tree)
        yield
        return
    with locked(tree):
        recover(tree)
        yield


def _refuse_interrupted(tree: Tree) -> None:
    if interrupted(tree):
        raise PatchError(
            "a change of this checkout was cut off, or is being made right now",
            where=str(tree.root),
            remedy="`t1 patch apply` or `t1 patch revert` takes back what was cut off",
        )
