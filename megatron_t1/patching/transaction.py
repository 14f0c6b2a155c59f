"""Changing several files of a checkout all or nothing, also when the process is killed at any moment.

A journal with the old contents is written first. Then each file is replaced by a rename, and the record of applied
patches last: that is the moment the change counts. Whoever comes next and finds a journal looks at the record: either
the change counts, and only the journal was left; or all files get their old contents back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.atomic import TEMPORARY_SUFFIX, replacing, temporaries
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.record import RECORD, pack, sha256, unpack
from megatron_t1.patching.tree import Tree

JOURNAL = ".t1-patches.journal"
LOCK = ".t1-patches.lock"


@contextlib.contextmanager
def locked(tree: Tree) -> Iterator[None]:
    """Hold the checkout; nobody else can apply or revert. A killed owner's lock is free at once.

    Raises:
        PatchError: somebody else holds it, or the directory can't be written.
    """
    path = tree.root / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise PatchError(
                "another `t1 patch` is changing this checkout", where=str(tree.root), remedy="wait for it; try again"
            ) from None
        if _is_same(descriptor, path):
            break
        os.close(descriptor)  # its last owner removed the file after it was opened here
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def interrupted(tree: Tree) -> bool:
    """Whether a change was cut off, or is being made right now."""
    return tree.has(JOURNAL)


def commit(tree: Tree, changes: Mapping[str, tuple[bytes, bytes]], record: bytes | None) -> None:
    """Give files new contents and the checkout a new record (None: none), or change nothing.

    Call it while the lock is held, after `recover`.

    Args:
        changes: (contents now, contents then) by path relative to the root.

    Raises:
        PatchError: a file isn't what `changes` says it is now.
        OSError: writing failed; what was written has been taken back.
    """
    journal = {
        "pid": os.getpid(),
        "record_sha256": None if record is None else sha256(record),
        "files": {
            file: {"before_zlib_base64": pack(before), "before_sha256": sha256(before), "after_sha256": sha256(after)}
            for file, (before, after) in changes.items()
        },
    }
    unwritten = set(changes)
    try:
        _write(tree, JOURNAL, json.dumps(journal).encode())
        for file, (before, after) in changes.items():
            if tree.read(file) != before:
                raise PatchError("the file changed while it was about to be patched", where=str(tree.root / file))
            unwritten.discard(file)
            _write(tree, file, after)
        _write(tree, RECORD, record)
    except BaseException:
        recover(tree, unwritten)
        raise
    _write(tree, JOURNAL, None)


@dataclass(frozen=True)
class Journal:
    """What a change that isn't over was about to do.

    Attributes:
        files: SHA-256 of their contents before and after, by path.
        before: their old contents.
        counts: whether the record says that the change is made; only the journal is left then.
        temporaries: what its writer may have left beside the files.
    """

    files: Mapping[str, Mapping[str, str]]
    before: Mapping[str, bytes]
    counts: bool
    temporaries: tuple[Path, ...]


def read_journal(tree: Tree) -> Journal:
    """The journal of a checkout that has one.

    Raises:
        PatchError: it is damaged.
    """
    try:
        raw = json.loads(tree.read(JOURNAL))
        files = raw["files"]
        for entry in files.values():
            if not all(isinstance(entry[key], str) for key in ("before_sha256", "after_sha256")):
                raise TypeError("a file's SHA-256 is no text")
        process = int(raw["pid"])
        paths = [tree.path(file) for file in files]
        return Journal(
            files=files,
            before={file: unpack(entry["before_zlib_base64"]) for file, entry in files.items()},
            counts=raw["record_sha256"] == (sha256(tree.read(RECORD)) if tree.has(RECORD) else None),
            temporaries=tuple(found for path in paths for found in temporaries(path, process)),
        )
    except Exception as error:
        raise PatchError(
            f"the journal of an interrupted change is damaged: {type(error).__name__}: {error}",
            where=str(tree.root / JOURNAL),
            remedy="bring the files back with git, then delete the journal",
        ) from error


def recover(tree: Tree, unwritten: Collection[str] = ()) -> bool:
    """Finish or take back a change that was cut off. Call it while the lock is held.

    Args:
        unwritten: files of the change that are known to be as they were, or as somebody else made them.

    Returns:
        Whether files were given their old contents back.

    Raises:
        PatchError: a file was edited since the change was cut off, or the journal is damaged.
    """
    for temporary in tree.root.glob(f".t1-patches.*{TEMPORARY_SUFFIX}"):
        temporary.unlink()
    if not tree.has(JOURNAL):
        return False
    where = str(tree.root / JOURNAL)
    journal = read_journal(tree)
    restore = {}
    for file, entry in journal.files.items() if not journal.counts else ():
        now = sha256(tree.read(file)) if tree.has(file) else None
        if file in unwritten:
            continue
        if now == entry["after_sha256"]:
            restore[file] = journal.before[file]
        elif now != entry["before_sha256"]:
            raise PatchError(
                "the file was edited after a change of it was cut off",
                where=str(tree.root / file),
                remedy=f"bring it back with git, delete {where}, and apply again",
            )
    for file, contents in restore.items():
        _write(tree, file, contents)
    for temporary in journal.temporaries:
        temporary.unlink(missing_ok=True)
    _write(tree, JOURNAL, None)
    return bool(restore)


def _write(tree: Tree, file: str, contents: bytes | None) -> None:
    """Replace a file by a rename, keeping its permissions; None removes it."""
    path = tree.path(file)
    if contents is None:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)  # never write through a link that lies there
        temporary.write_bytes(contents)
        if path.exists():
            shutil.copymode(path, temporary)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
