"""JSON objects that say of themselves whether they are what was written: a digest over everything else in them.

A file holds one of them, or one in each line. Lines that were appended by `append` also say their number and the seal
of the line before, so that those which are gone are missed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.errors import naming
from megatron_t1.regular import open_regular

SEAL = "sha256"  # key of the digest
NUMBER, BEFORE = "number", "before"  # keys of an appended line: its place from 1 on, and the seal of the one before


def digest(value: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, whatever its layout in a file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write(path: str | Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by this object and its seal, atomically."""
    atomic.write_json(path, {**value, SEAL: digest(value)})


def read(path: str | Path) -> dict[str, Any]:
    """The object in `path`, without its seal.

    Raises:
        OSError: it can't be read, or isn't a regular file.
        ValueError: it isn't a JSON object, has no seal, or isn't what was sealed.
    """
    with open_regular(path) as file:
        return opened(file.read())


def line(value: Mapping[str, Any]) -> bytes:
    """This object and its seal as a line of a file."""
    return json.dumps({**value, SEAL: digest(value)}).encode() + b"\n"


def opened(text: bytes) -> dict[str, Any]:
    """The object in a sealed text, without its seal. Raises ValueError as `read`."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    recorded = value.pop(SEAL, None)
    if recorded is None:
        raise ValueError(f"it has no {SEAL}, so nothing says that it is whole")
    if recorded != digest(value):
        raise ValueError(f"its content isn't what its {SEAL} was made of")
    return value


@dataclass
class Lines:
    """A file of appended lines.

    Attributes:
        values: what its good lines hold, in their order, without seals and places.
        places: the number and the seal of each of them.
        damaged: lines that aren't what was written.
        gaps: before a good line, as its index: how many lines are missing there that were whole once.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[int, str]] = field(default_factory=list)
    damaged: int = 0
    gaps: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> tuple[int, str]:
        return self.places[-1] if self.places else (0, "")


def append(path: str | Path, value: Mapping[str, Any]) -> None:
    """Append a line to a file of such lines; after one that a crash has cut short, on a new one.

    Raises:
        OSError: it can't be written; names the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), open(path, "ab+") as file:
        with contextlib.suppress(OSError):  # a file system without locks: two may get one number, which is seen
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        number, before = _lines(text).last
        torn = text[-1:] not in (b"", b"\n")
        file.write(b"\n" * torn + line({**value, NUMBER: number + 1, BEFORE: before}))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: str | Path) -> Lines:
    """What a file of appended lines holds, as far as it can be trusted; nothing where there is none.

    Raises:
        OSError: it can't be read, or isn't a regular file.
    """
    try:
        with open_regular(path) as file:
            return _lines(file.read())
    except FileNotFoundError:
        return Lines()


def _lines(text: bytes) -> Lines:
    found, unsure = Lines(), 0  # unsure: damaged lines since the last good one, each of which may be a missing one
    for raw in text.splitlines():
        try:
            value = opened(raw)
            number, before = value.pop(NUMBER), value.pop(BEFORE)
            if type(number) is not int:
                raise ValueError("its number is none")
        except (ValueError, KeyError):
            found.damaged, unsure = found.damaged + 1, unsure + 1
            continue
        last, seal = found.last
        missing = max(0, number - last - 1 - unsure)
        if not missing and not unsure and (number <= last or before != seal):
            missing = 1  # one that isn't the successor of the one before: another one was
        if missing:
            found.gaps[len(found.values)] = missing
        found.values.append(value)
        found.places.append((number, json.loads(raw)[SEAL]))
        unsure = 0
    return found
