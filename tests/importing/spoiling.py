"""JSON documents with one value exchanged for another that may have no place there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ANYTHING = st.sampled_from([None, True, -1, 0, 2, 1e300, "", "x", "..", "a/b", [], [None], [[]], {}, {"a": 1}])


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value within a JSON document."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from leaves(inner, (*path, key))


@st.composite
def spoilt(draw: Any, document: Any) -> Any:
    at = draw(st.sampled_from(sorted(leaves(document), key=str)))
    if not at:
        return draw(ANYTHING)
    *parents, last = at
    owner = document = copy.deepcopy(document)
    for key in parents:
        owner = owner[key]
    owner[last] = draw(ANYTHING)
    return document
