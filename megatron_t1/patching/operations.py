"""The four things `t1 patch` does to a checkout: status, apply, revert, diff."""

from __future__ import annotations

import difflib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from megatron_t1.patching.declaration import Patch
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.marks import find_marks
from megatron_t1.patching.plan import Finding, Plan, Survey, chosen, plan_apply, plan_revert
from megatron_t1.patching.record import RECORD, Record
from megatron_t1.patching.transaction import commit, interrupted, locked, read_journal, recover
from megatron_t1.patching.tree import Tree

__all__ = ["apply", "diff", "interrupted", "revert", "status"]


LOST = f"applied by this tool, but {RECORD} is missing: `t1 patch revert` can't take it back, git can"


def status(tree: Tree, patches: Mapping[str, Patch], only: Iterable[str] = ()) -> list[Finding]:
    """What each patch is to the checkout, the ones that can be applied taken together.

    While a change isn't over, those that it may concern are "interrupted": nothing else about them is certain.
    """
    survey = Survey.of(tree)
    findings = survey.find(patches, chosen(patches, survey, only, with_required=False))[0]
    marks = _unrecorded(survey, patches)
    cut_off, why = _cut_off(tree)
    return [_with_circumstances(finding, patches, marks, cut_off, why) for finding in findings]


def _with_circumstances(
    finding: Finding,
    patches: Mapping[str, Patch],
    marks: Mapping[str, tuple[str, ...]],
    cut_off: Collection[str] | None,
    why: str,
) -> Finding:
    """A finding, corrected by what is known of a change that was cut off, or of a record that is lost."""
    name = finding.name
    marked = marks.get(name, ())
    if why and finding.state != "not needed":
        variants = patches[name].variants if name in patches else ()
        files = {*finding.files, *marked, *(edit.file for variant in variants for edit in variant.edits)}
        if cut_off is None or files & set(cut_off):
            return replace(finding, state="interrupted", detail=why)
    if marked and finding.state in ("there", "conflict"):
        detail = "" if finding.state == "there" else f"{finding.detail}\n"
        return replace(finding, detail=f"{detail}{LOST}\n{', '.join(marked)}", files=marked)
    return finding


def _cut_off(tree: Tree) -> tuple[Collection[str] | None, str]:
    """Files of a change that isn't over (None: nobody knows which), and what to say of it ("" : there is none)."""
    if not interrupted(tree):
        return (), ""
    try:
        return read_journal(tree).files, "its change was cut off, or is being made: it may be half applied"
    except PatchError as error:
        return None, f"{error.problem}\n{error.remedy}"


def _unrecorded(survey: Survey, patches: Mapping[str, Patch]) -> dict[str, tuple[str, ...]]:
    """Patches whose lines stand in the files though no record says so, with these files."""
    recorded = survey.record.names()
    return {name: files for name, files in find_marks(survey.tree, patches).items() if name not in recorded}


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
        PatchError: patched lines were edited since, a patch that stays needs one that goes, or the record is lost of
            all that was to be taken back.
    """
    with _held(tree, dry_run):
        survey = Survey.of(tree)
        plan = plan_revert(survey, patches, only)
        if not plan.patches:
            _refuse_lost(survey, patches, only)
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
    applied = [finding.name for finding in findings if finding.state in ("applied", "outdated")]
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
        # Only \n ends a line for git and patch; a form feed or U+2028 within one doesn't.
        return io.StringIO(data.decode("utf-8", "surrogateescape"), newline="\n").readlines()

    made = difflib.unified_diff(lines(before), lines(after), f"a/{file}", f"b/{file}", old, new)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


def _refuse_lost(survey: Survey, patches: Mapping[str, Patch], only: Iterable[str]) -> None:
    names = set(only)
    lost = {name: at for name, at in _unrecorded(survey, patches).items() if not names or name in names}
    if lost:
        files = " ".join(sorted({file for at in lost.values() for file in at}))
        raise PatchError(
            f"{', '.join(lost)}: applied by this tool, but {RECORD}, which says what the files were before, is missing",
            where=f"{survey.tree.root}: {files}",
            remedy=f"bring {RECORD} back and revert; or bring the files back: `git checkout -- {files}`, in an "
            "installed package by installing it again. Where a fork committed the patched files, nothing is to be done",
        )


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
