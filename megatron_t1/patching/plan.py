"""What each patch is to a checkout, and what applying or reverting would write. Nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_t1.patching.attempt import attempt
from megatron_t1.patching.declaration import Patch
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.merge import merge
from megatron_t1.patching.record import RECORD, AppliedPatch, PatchedFile, Record, read_record
from megatron_t1.patching.syntax import Source
from megatron_t1.patching.tree import Tree

_REPLACED = f"where the files were replaced as a whole (another branch, a reinstall), delete {RECORD}"
_OUTDATED = "by a version of megatron-t1 with another declaration: revert all patches, then apply again"
State = Literal["applied", "outdated", "damaged", "interrupted", "there", "not needed", "applicable", "conflict"]


@dataclass(frozen=True)
class Finding:
    """One patch on one checkout.

    Attributes:
        state: "applied": by this tool, recorded. "outdated": recorded, and its declaration is another one now.
            "damaged": recorded, but its lines were changed since.
            "interrupted": a change of its files was cut off, or is being made. The others are those of an `Attempt`.
        files: that it would change, or has changed.
    """

    name: str
    state: State
    detail: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A change of a checkout.

    Attributes:
        changes: (contents now, contents then) by path.
        record: afterwards.
        patches: names of those newly applied, or taken back.
        kept: files edited since they were patched, whose edits stay.
    """

    changes: Mapping[str, tuple[bytes, bytes]]
    record: Record
    patches: tuple[str, ...]
    kept: tuple[str, ...] = ()


@dataclass
class Survey:
    """A checkout's record, and what its patched files are now.

    Attributes:
        record: empty when every patched file is back at its original by other means (git checkout).
        now: patched files as they are; None where one is gone.
        bases: what they would be without any patch, with the edits made since; None where that can't be told.
    """

    tree: Tree
    record: Record = Record()
    now: dict[str, bytes | None] = field(default_factory=dict)
    bases: dict[str, bytes | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Tree) -> Survey:
        """Raises PatchError when the record is damaged, or names files outside the checkout."""
        record = read_record(tree)
        now = {file: tree.read(file) if tree.has(file) else None for file in record.files}
        bases = {file: _without_patches(known, now[file]) for file, known in record.files.items()}
        if all(now[file] is not None and bases[file] == now[file] for file in record.files):
            return cls(tree)
        return cls(tree, record, now, bases)

    @property
    def edited(self) -> set[str]:
        return {file for file, known in self.record.files.items() if self.now[file] != known.patched}

    def find(self, patches: Mapping[str, Patch], names: Iterable[str]) -> tuple[list[Finding], dict[str, Source]]:
        """What each of the named patches is to this checkout, and all files as the applicable ones would leave them.

        They are tried in order, each on what those before it leave.
        """
        after: dict[str, Source] = {}
        parsed: dict[str, Source] = {}

        def read(file: str) -> Source:
            if file not in after and file not in parsed:
                parsed[file] = Source.parse(self.tree.read(file), str(self.tree.root / file))
            return after.get(file) or parsed[file]

        findings = []
        for name in names:
            if name in self.record.names():
                findings.append(self._applied(name, patches.get(name)))
                continue
            result = attempt(patches[name], self.tree, read)
            after.update(result.after)
            findings.append(Finding(name, result.state, result.detail, tuple(sorted(result.after))))
        return findings, after

    def _stands(self, file: str) -> bool:
        """Whether all patched lines of a file are there still."""
        known, base = self.record.files[file], self.bases[file]
        return base is not None and merge(known.original, known.patched, base) == self.now[file]

    def _applied(self, name: str, known: Patch | None) -> Finding:
        recorded = next(patch for patch in self.record.patches if patch.name == name)
        files = recorded.files
        lost = [file for file in files if not self._stands(file)]
        if lost:
            detail = f"changed since, where it was patched: {', '.join(lost)}\n{_REPLACED}"
            return Finding(name, "damaged", detail, files)
        edited = sorted(self.edited & set(files))
        detail = f"edited since, elsewhere: {', '.join(edited)}" if edited else ""
        if known is not None and known.digest != recorded.digest:
            return Finding(name, "outdated", "\n".join(filter(None, (_OUTDATED, detail))), files)
        return Finding(name, "applied", detail, files)


def _without_patches(known: PatchedFile, now: bytes | None) -> bytes | None:
    if now is None or now == known.patched:
        return None if now is None else known.original
    return merge(known.patched, known.original, now)


def chosen(patches: Mapping[str, Patch], survey: Survey, only: Iterable[str], *, with_required: bool) -> list[str]:
    """Names of the patches meant, in order: those in `only`, or all that are known or applied.

    Raises:
        PatchError: there is no patch of that name.
    """
    every = [*patches, *(patch.name for patch in survey.record.patches if patch.name not in patches)]
    names = set(only) or set(every)
    if unknown := sorted(names - set(every)):
        raise PatchError(f"there is no patch {', '.join(unknown)}", remedy=f"patches: {', '.join(every)}")
    while with_required:
        more = {required for name in names & set(patches) for required in patches[name].requires} - names
        if not more:
            break
        names |= more
    return [name for name in every if name in names]


def plan_apply(survey: Survey, patches: Mapping[str, Patch], only: Iterable[str] = ()) -> tuple[Plan, list[Finding]]:
    """What applying all (or only some) patches would write. Those that are applied or there already stay as they are.

    Raises:
        PatchError: a patch conflicts or is damaged; lists all of them, with expected and found.
    """
    findings, after = survey.find(patches, chosen(patches, survey, only, with_required=True))
    wrong = [f"{f.name}: {f.detail}" for f in findings if f.state in ("conflict", "damaged")]
    wrong += [f"{file}: its patched lines were edited" for file in after if survey.bases.get(file, b"") is None]
    if wrong:
        raise PatchError(
            "nothing was applied; these patches don't fit this checkout:\n\n" + "\n\n".join(wrong) + "\n",
            where=f"{survey.tree.root} (megatron-core {survey.tree.version or 'of unknown version'})",
            remedy="`--only NAME` applies the others",
        )
    changes = {file: (survey.tree.read(file), source.module.bytes) for file, source in after.items()}
    files = dict(survey.record.files)
    for file, (before, contents) in changes.items():
        base = survey.bases.get(file)
        files[file] = PatchedFile(before if base is None else base, contents)
    new = tuple(f for f in findings if f.state == "applicable")
    applied = [AppliedPatch(f.name, patches[f.name].digest, f.files) for f in new]
    record = Record((*survey.record.patches, *applied), files)
    return Plan(changes, record, tuple(f.name for f in new)), findings


def plan_revert(survey: Survey, patches: Mapping[str, Patch], only: Iterable[str] = ()) -> Plan:
    """What taking back all (or only some) applied patches would write.

    A file that was edited since keeps its edits where they lie apart from patched lines. The patches that stay are done
    again on the original, in their order.

    Raises:
        PatchError: a patched line was edited, a patch that stays needs one that goes, or can't be done again.
    """
    names = set(chosen(patches, survey, only, with_required=False)) & survey.record.names()
    gone = [patch for patch in survey.record.patches if patch.name in names]
    stay = [patch for patch in survey.record.patches if patch.name not in names]
    for patch in stay:
        needed = set(patches[patch.name].requires) & names if patch.name in patches else set()
        if needed:
            raise PatchError(f"{patch.name} is applied and needs {', '.join(sorted(needed))}", remedy="revert both")
    touched = {file for patch in gone for file in patch.files}
    again: dict[str, bytes] = {}
    if any(touched & set(patch.files) for patch in stay):
        again = _done_again(stay, patches, survey)
    lost = sorted(file for file in {*touched, *again} if survey.bases[file] is None)
    if lost:
        raise PatchError(
            "nothing was reverted; files were edited since, in or beside the patched lines: " + ", ".join(lost),
            where=str(survey.tree.root),
            remedy="`t1 patch diff` shows these edits; take them back (or bring the files back with git), then revert; "
            + _REPLACED,
        )
    files = {file: known for file, known in survey.record.files.items() if file not in touched}
    changes = {}
    for file in sorted(touched):
        base, now = survey.bases[file], survey.now[file]
        contents = again.get(file, base)
        if file in again:
            files[file] = PatchedFile(base, contents)
        if contents != now:
            changes[file] = (now, contents)
    kept = tuple(sorted(touched & survey.edited))
    return Plan(changes, Record(tuple(stay), files), tuple(patch.name for patch in gone), kept)


def _done_again(stay: Iterable[AppliedPatch], patches: Mapping[str, Patch], survey: Survey) -> dict[str, bytes]:
    """The files with only these patches, done anew on what they are without any."""
    after: dict[str, Source] = {}

    def read(file: str) -> Source:
        if file in after:
            return after[file]
        base = survey.bases.get(file)
        return Source.parse(survey.tree.read(file) if base is None else base, str(survey.tree.root / file))

    for applied in stay:
        known = patches.get(applied.name)
        if known is None or known.digest != applied.digest:
            problem = "its declaration has changed since it was applied"
        else:
            result = attempt(known, survey.tree, read)
            after.update(result.after)
            problem = "" if result.state == "applicable" else f"it can't be done again: {result.detail or result.state}"
        if problem:
            raise PatchError(
                f"{applied.name} would stay, and {problem}",
                where=str(survey.tree.root),
                remedy="revert all patches, then apply those you want",
            )
    return {file: source.module.bytes for file, source in after.items()}
