"""Three-way merge of lines: take our change back from a file that somebody has edited since."""

from __future__ import annotations

import difflib

Change = tuple[int, int, tuple[bytes, ...]]  # lines [start, end) of the base become these


def merge(base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """`base` with the changes of both sides; None where they touch the same or adjoining lines.

    A change that both sides made alike counts once. With base = the patched file, ours = the original and theirs = the
    file as it is now, this is the original with the edits made since.
    """
    lines = _lines(base)
    our_changes, their_changes = _changes(lines, _lines(ours)), _changes(lines, _lines(theirs))
    alike = set(our_changes) & set(their_changes)
    for ours_start, ours_end, _ in set(our_changes) - alike:
        for start, end, _ in set(their_changes) - alike:
            if start <= ours_end and ours_start <= end:
                return None
    merged: list[bytes] = []
    position = 0
    for start, end, new in sorted({*our_changes, *their_changes}):
        if start < position:  # an alike change that overlaps another one
            return None
        merged += [*lines[position:start], *new]
        position = end
    return b"".join([*merged, *lines[position:]])


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _changes(base: list[bytes], other: list[bytes]) -> list[Change]:
    matcher = difflib.SequenceMatcher(None, base, other, autojunk=False)
    return [(i, j, tuple(other[k:n])) for tag, i, j, k, n in matcher.get_opcodes() if tag != "equal"]
