from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.patching.merge import merge

LINES = [b"line %d\n" % i for i in range(30)]


def changed(changes: dict[int, bytes]) -> bytes:
    """LINES with some of them replaced (b"" deletes, more lines insert)."""
    return b"".join(changes.get(i, line) for i, line in enumerate(LINES))


def test_changes_apart_are_both_kept():
    ours, theirs = {3: b"ours\n"}, {10: b"theirs\nmore\n", 20: b""}
    assert merge(changed({}), changed(ours), changed(theirs)) == changed(ours | theirs)


def test_changes_of_the_same_or_the_next_line_clash():
    assert merge(changed({}), changed({3: b"a\n"}), changed({3: b"b\n"})) is None
    assert merge(changed({}), changed({3: b"a\n"}), changed({4: b"b\n"})) is None


def test_a_change_both_made_counts_once():
    both = {3: b"both\n"}
    assert merge(changed({}), changed(both), changed(both | {9: b"theirs\n"})) == changed(both | {9: b"theirs\n"})


_CHANGES = st.dictionaries(st.integers(0, 29), st.sampled_from([b"", b"new\n", b"new\nnewer\n"]), max_size=4)


@given(_CHANGES, _CHANGES)
def test_a_merge_has_both_changes_or_is_refused(ours, theirs):
    merged = merge(changed({}), changed(ours), changed(theirs))
    apart = all(abs(a - b) > 1 for a in ours for b in theirs)
    if apart:
        assert merged == changed(ours | theirs)
    assert merge(changed({}), changed({}), changed(theirs)) == changed(theirs)
    assert merge(changed({}), changed(ours), changed({})) == changed(ours)


@given(_CHANGES, _CHANGES)
def test_taking_a_change_back_gives_the_edits_on_the_original(ours, edits):
    if all(abs(a - b) > 1 for a in ours for b in edits):
        patched, now = changed(ours), changed(ours | edits)
        assert merge(patched, changed({}), now) == changed(edits)
