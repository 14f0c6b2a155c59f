"""Words of a Dockerfile: how its instructions split them, and what quotes, escapes and variables in them stand for.

The rules are those of BuildKit's shell lexer, the part of docker build that does this before any shell is involved:

    '...'        as it is                    $A ${A}      the variable, nothing when it is not set
    "..."        escapes \\" \\$ \\\\ and $        ${A:-x}      x when it is unset or empty; ${A-x}: when it is unset
    \\x           x                           ${A:+x}      x when it is set and not empty; ${A+x}: when it is set
                                             ${A:?x}      refused with x when it is unset or empty; ${A?x}: unset

Words in ${...} may hold all of this again. Cutting and replacing (`${A#x}`, `${A%x}`, `${A/x/y}`) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from megatron_t1.environment.exec_limits import MAX_WORD_BYTES

Lookup = Callable[[str], str | None]  # value of a variable; None where it is not set

MAX_DEPTH = 50  # of ${...} in ${...}
_SPECIAL = "@*#?-$!"
_PLAIN = re.compile(r"[^'\"$\\}]+")
_NAME = re.compile(rf"\d+|[{re.escape(_SPECIAL)}]|[^\W\d]\w*")
_HERE_DOCUMENT = re.compile(r"\d*<<(-?)([^<]+)")


def split_words(text: str) -> list[str]:
    """Words between blanks outside of quotes, quotes and escapes kept: as ENV and ARG split them."""
    words, word, quote, position = [], [], "", 0
    while position < len(text):
        character = text[position]
        if character == "\\" and quote != "'" and position + 1 < len(text):
            word.append(text[position : position + 2])
            position += 2
            continue
        if character.isspace() and not quote:
            words += ["".join(word)] if word else []
            word = []
        else:
            if quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            word.append(character)
        position += 1
    return [*words, "".join(word)] if word else words


def literal(text: str) -> str:
    """A word that stands for the text as it is. Raises ValueError for a line break, which no word can hold."""
    if re.search("[\r\n\0]", text):
        raise ValueError(f"{text[:40]!r} holds a line break or NUL, which a Dockerfile can't say")
    return "'" + text.replace("'", "'\"'\"'") + "'"


def has_here_document(text: str) -> bool:
    """Whether docker would take the lines that follow as the content of a file or a script."""
    return any(_HERE_DOCUMENT.fullmatch(word) for word in split_words(text))


def here_documents_end(text: str, lines: Sequence[str], first: int) -> int:
    """Number of the line after the here-documents of an instruction, whose first line is `lines[first]`."""
    for found in filter(None, map(_HERE_DOCUMENT.fullmatch, split_words(text))):
        delimiter = re.sub(r"['\"\\]", "", found[2])
        while first < len(lines):
            line, first = lines[first].rstrip("\r\n"), first + 1
            if (line.lstrip("\t") if found[1] else line) == delimiter:
                break
    return first


def expanded(text: str, lookup: Lookup) -> str:
    """One word without its quotes, with the values of its variables.

    Raises:
        ValueError: a quote or brace is never closed, a form of ${...} is unknown, or the result is too long.
    """
    return _Scanner(text, lookup).until("", 0)


class _Scanner:
    def __init__(self, text: str, lookup: Lookup):
        self.text, self.lookup, self.position = text, lookup, 0

    def until(self, end: str, depth: int) -> str:
        """Up to the closing character `end` ("": the end of the text; '"': inside double quotes), which is taken."""
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} ${{...}} in one another")
        parts, size = [], 0
        while character := self._take():
            if character == end:
                return "".join(parts)
            if character == "$":
                part = self._variable(depth)
            elif character == "\\":
                part = self._escaped(end)
            elif character == '"' and end != '"':
                part = self.until('"', depth + 1)
            elif character == "'" and end != '"':
                part = self._literal()
            else:
                more = _PLAIN.match(self.text, self.position)
                part = character + (more[0] if more else "")
                self.position += len(part) - 1
            size += len(part)
            if size > MAX_WORD_BYTES:
                raise ValueError(f"{self.text[:40]!r}... is longer than {MAX_WORD_BYTES} bytes with its variables")
            parts.append(part)
        if end:
            raise ValueError(f"{self.text[:80]!r}: {'a quote' if end == chr(34) else '${'} is never closed")
        return "".join(parts)

    def _take(self) -> str:
        character = self.text[self.position : self.position + 1]
        self.position += len(character)
        return character

    def _literal(self) -> str:
        end = self.text.find("'", self.position)
        if end < 0:
            raise ValueError(f"{self.text[:80]!r}: a quote is never closed")
        start, self.position = self.position, end + 1
        return self.text[start:end]

    def _escaped(self, end: str) -> str:
        following = self.text[self.position : self.position + 1]
        if end == '"' and following not in ('"', "$", "\\"):
            return "\\" if following else ""
        return self._take()

    def _name(self) -> str:
        found = _NAME.match(self.text, self.position)
        self.position += len(found[0]) if found else 0
        return found[0] if found else ""

    def _variable(self, depth: int) -> str:
        if self.text[self.position : self.position + 1] != "{":
            name = self._name()
            return (self.lookup(name) or "") if name else "$"
        start, self.position = self.position - 1, self.position + 1
        name, form = self._name(), self._take()
        empty_counts = form == ":"
        form = self._take() if empty_counts else form
        value = self.lookup(name)
        if not name or form not in ("}", "-", "+", "?") or (empty_counts and form == "}"):
            raise ValueError(f"{self.text[start : start + 80]!r} is a form of ${{...}} that is not supported")
        if form == "}":
            return value or ""
        word = self.until("}", depth + 1)
        missing = value is None or (empty_counts and not value)
        if form == "?" and missing:
            raise ValueError(f"{name} is not set: {word[:80]}")
        if form == "+":
            return "" if missing else word
        return word if missing else value
