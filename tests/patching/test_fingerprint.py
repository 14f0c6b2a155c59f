from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.patching.fingerprint import form, local_names

FUNCTION = '''
def pick(scores, count=2):
    """Text."""
    best, rest = scores[:count], scores[count:]
    return take(best, rest, key=self.key)
'''


def fingerprint(code: str) -> str:
    return form(code, local_names(code)).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        FUNCTION.replace("best", "first").replace("scores", "values"),
        FUNCTION.replace('    """Text."""\n', ""),
        FUNCTION.replace("scores, count=2", "scores: list, count: int = 2").replace("):", ") -> list:"),
        FUNCTION.replace("best, rest =", "(best, rest) ="),
        FUNCTION.replace("take(best, rest, ", "take(\n        best,  # first\n        rest,\n        "),
        FUNCTION.replace("    ", "\t"),
    ],
)  # fmt: skip
def test_formatting_comments_annotations_docstrings_and_local_names_dont_count(other):
    assert other != FUNCTION
    assert fingerprint(other) == fingerprint(FUNCTION)


@pytest.mark.parametrize(
    "other",
    [
        FUNCTION.replace("count=2", "count=3"),
        FUNCTION.replace("take(best, rest", "take(rest, best"),
        FUNCTION.replace("take(", "give("),
        FUNCTION.replace("key=self", "order=self"),
        FUNCTION.replace("self.key", "self.order"),
        FUNCTION.replace("[:count]", "[:-count]"),
    ],
)
def test_what_the_code_does_counts(other):
    assert fingerprint(other) != fingerprint(FUNCTION)


def test_names_say_what_the_numbers_stand_for():
    assert form("mask = mask & ~other[0]", frozenset({"mask", "other"})).names == ("mask", "other")


def test_two_locals_that_become_one_are_another_form():
    local = frozenset("abc")
    assert form("a = b * c", local).fingerprint != form("a = b * b", local).fingerprint
    assert form("a = b * c", local).fingerprint == form("c = a * b", local).fingerprint


def test_globals_arent_locals():
    assert local_names("def f(a):\n    global b\n    b = 1\n    for c in a: pass") == {"a", "c"}


_NAMES = st.lists(st.from_regex(r"[a-z]{3,8}_v", fullmatch=True), min_size=4, max_size=4, unique=True)


@given(_NAMES)
def test_any_renaming_gives_the_same_form(names):
    renamed = FUNCTION
    for old, new in zip(("scores", "count", "best", "rest"), names, strict=True):
        renamed = renamed.replace(old, new)
    assert fingerprint(renamed) == fingerprint(FUNCTION)
