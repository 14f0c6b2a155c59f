"""Reading a checkpoint's config.json, which others have written: every value of its type and in its range, or named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_t1.errors import IncompleteError
from megatron_t1.model.weight_files import read_json

CONFIG_FILE = "config.json"
LARGEST = 1 << 31  # of a size: more than any model has, and less than arithmetic on sizes can bear
SHOWN = 60  # characters of a wrong value
_ABSENT = object()


def read_config(path: Path) -> dict[str, Any]:
    """The object in `path`.

    Raises:
        IncompleteError: there is none, or none that can be read.
    """
    try:
        return read_json(path)
    except ValueError as error:
        raise IncompleteError(
            f"no readable {path.name}: {error}", where=str(path), remedy="give a Hugging Face model directory"
        ) from error


class Fields:
    """Values by name, each taken in its type and range. What is wrong is collected, so that all of it is said at once.

    A null counts as absent, as in transformers. A value that is missing or wrong is taken as 1, so that whoever reads
    on meets no second error for it.

    Attributes:
        missing: names that have to be there and aren't.
        problems: one line for each value that can't be.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.missing: list[str] = []
        self.problems: list[str] = []

    def size(self, name: str, default: Any = _ABSENT, *, least: int = 1) -> int:
        """A whole number from `least` on."""
        value = self._get(name, default)
        if type(value) is int and least <= value < LARGEST:
            return value
        return self._wrong(name, value, f"a whole number from {least} to {LARGEST - 1}")

    def number(self, name: str, default: Any = _ABSENT, *, most: float = math.inf) -> float:
        """A finite number above 0, and `most` at most."""
        value = self._get(name, default)
        if type(value) in (int, float) and 0 < value <= most and value < math.inf:
            return float(value)
        return self._wrong(name, value, "a number above 0" + ("" if most == math.inf else f", at most {most:g}"))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        return value if isinstance(value, bool) else bool(self._wrong(name, value, "true or false"))

    def names(self, name: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self._get(name, [])
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        self._wrong(name, value, "a list of names")
        return []

    def part(self, name: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        value = self._get(name, {})
        if isinstance(value, dict):
            return value
        self._wrong(name, value, "an object")
        return {}

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _wrong(self, name: str, value: Any, expected: str) -> int:
        if value is _ABSENT:
            self.missing.append(name)
        else:
            self.problems.append(f"{name} is {shown(value)}, and must be {expected}")
        return 1


def shown(value: Any) -> str:
    """A value in a message, whatever its size."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"no {type(value).__name__} that can be shown"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
