"""Text of others, made safe for a terminal: what would be obeyed, or can't be encoded, is shown by its number."""

from __future__ import annotations

import unicodedata

OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control characters, directions, lone surrogates, line separators


def printable(text: object) -> str:
    r"""`text` with escape sequences, line ends, changes of direction and bytes that are no text as \x1b, \u202e, ..."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) if unicodedata.category(character) in OBEYED else character for character in text)


def _shown(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
