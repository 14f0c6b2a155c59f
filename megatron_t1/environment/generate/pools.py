"""The words tasks are made of. Pools are small so that a tiny tokenizer turns each word into one token.

Two sizes: `small` is what a model of two million parameters learns to copy within a few minutes on two cores; `full`
needs about three times the demonstrations.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEMS = (
    "notes report draft index table users orders stock plan memo ledger budget "
    "roster agenda summary journal catalog invoice paper letter backup archive config daily"
)
_WORDS = (
    "apple banana cherry lemon mango peach grape melon olive onion carrot pepper "
    "tomato potato garlic ginger basil mint clove honey sugar flour butter cream"
)
_DIRECTORIES = "alpha beta gamma delta omega sigma kappa theta lambda zeta north south east west"
_KEYS = "port host mode level size color speed limit"


@dataclass(frozen=True)
class Pool:
    """Words for file stems, contents, directories and configuration keys; families used when none are named."""

    stems: tuple[str, ...]
    words: tuple[str, ...]
    directories: tuple[str, ...]
    keys: tuple[str, ...]
    families: tuple[str, ...]  # empty: all


_SMALL_FAMILIES = ("create", "append", "rename", "copy", "count_lines", "sort_lines", "chmod", "make_tree")

POOLS = {
    "small": Pool(
        tuple(_STEMS.split()[:12]),
        tuple(_WORDS.split()[:12]),
        tuple(_DIRECTORIES.split()[:8]),
        tuple(_KEYS.split()),
        _SMALL_FAMILIES,
    ),
    "full": Pool(tuple(_STEMS.split()), tuple(_WORDS.split()), tuple(_DIRECTORIES.split()), tuple(_KEYS.split()), ()),
}
