"""Values of other people's JSON: what isn't exactly representable in a record is refused, never changed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.regular import open_regular

FLOAT32_MAX = float(np.finfo(np.float32).max)
COUNT_MAX = 2**31 - 1
LOGPROB_MAX = 1e-3  # of rounding, as `trajectory.validation` allows


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON document in which no object holds one name twice. Raises T1Error for anything else."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise T1Error(f"can't be read as JSON: {error}", where=where) from error


def read_json(path: Path) -> Any:
    """See `parse_json`; of a regular file."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise T1Error(f"can't be read: {error.strerror or error}", where=str(path)) from error
    return parse_json(content, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field {name!r} stands twice in one object")
        found[name] = value
    return found


def label(value: Any, what: str, where: str) -> str | None:
    """A name: text, or a whole number as text; None stays None.

    Raises:
        T1Error: anything else, text that is empty or no valid Unicode (half of a surrogate pair).
    """
    if value is None:
        return None
    good = type(value) is str and value != "" or type(value) is int and value.bit_length() <= 64
    if not good or not _is_unicode(str(value)):
        raise T1Error(f"{what} is {shown(value)}, expected text or a whole number", where=where)
    return str(value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def float32_problem(value: float) -> str:
    """Why a number can't be kept as a float32; "" when it can, rounded to its precision."""
    if not abs(value) <= FLOAT32_MAX:
        return "no finite float32"
    return "0 as a float32" if value and np.float32(value) == 0 else ""


def token_ids(values: Any, what: str, where: str) -> np.ndarray:
    """int32 [n]. Raises T1Error for anything but a list of token ids."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise T1Error(f"{what} is not a list of token ids", where=where)
    return np.array(values, np.int32)


def numbers(values: Any, what: str, where: str) -> np.ndarray:
    """float32 [n], None becoming NaN. Raises T1Error for anything but a list of finite numbers and nulls."""
    good = isinstance(values, list) and all(value is None or type(value) in (int, float) for value in values)
    if not good:
        raise T1Error(f"{what} is not a list of numbers", where=where)
    for index, value in enumerate(values):
        if value is not None and (problem := float32_problem(value)):
            raise T1Error(
                f"{what}: number {index} is {shown(value)}, which is {problem}",
                where=where,
                remedy="null stands for a number that isn't there",
            )
    return np.array([np.nan if value is None else value for value in values], np.float32)


def logprobs(values: Any, where: str, *, tokens: int | None = None) -> np.ndarray:
    """float32 [n], NaN where there is none (None: nowhere, of `tokens` tokens).

    Raises:
        T1Error: not a list of numbers, not one for each of `tokens`, or a positive one.
    """
    if values is None and tokens is not None:
        return np.full(tokens, np.nan, np.float32)
    found = numbers(values, "logprobs", where)
    if tokens is not None and len(found) != tokens:
        raise T1Error(f"logprobs has {len(found)} log-probabilities of {tokens} tokens", where=where)
    if (positive := np.flatnonzero(found > LOGPROB_MAX)).size:
        at = int(positive[0])
        raise T1Error(f"logprobs: number {at} is {found[at]}, a log-probability can't be positive", where=where)
    return found


def count(value: Any, what: str, where: str) -> int | None:
    """A whole number from 0 to COUNT_MAX, also written as 2.0; None stays None. Raises T1Error for anything else."""
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= COUNT_MAX or value != int(value):
        raise T1Error(f"{what} is {shown(value)}, expected a whole number from 0 to {COUNT_MAX}", where=where)
    return int(value)


def number(value: Any, what: str, where: str) -> float | None:
    """A finite number, in the range of float32; None stays None. Raises T1Error for anything else."""
    if value is None:
        return None
    if type(value) not in (int, float) or (problem := float32_problem(value)):
        found = f"{shown(value)}, which is {problem}" if type(value) in (int, float) else shown(value)
        raise T1Error(f"{what} is {found}, expected a finite number", where=where)
    return float(value)


def truth(value: Any, what: str, where: str) -> bool | None:
    """True or false; None stays None. Raises T1Error for anything else."""
    if value is not None and type(value) is not bool:
        raise T1Error(f"{what} is {shown(value)}, expected true or false", where=where)
    return value


def entry(value: Any, what: str, where: str) -> dict[str, Any]:
    """A JSON object; None stands for an empty one. Raises T1Error for anything else."""
    if value is not None and not isinstance(value, dict):
        raise T1Error(f"{what} is {shown(value)}, expected an object", where=where)
    return value or {}


def entries(value: Any, what: str, where: str) -> list[Any]:
    """A JSON list; None stands for an empty one. Raises T1Error for anything else."""
    if value is not None and not isinstance(value, list):
        raise T1Error(f"{what} is {shown(value)}, expected a list", where=where)
    return value or []


def shown(value: Any) -> str:
    """A value in a message: short, also of numbers with more digits than Python prints."""
    if type(value) is int and value.bit_length() > 128:
        return f"a number of about {int(value.bit_length() * math.log10(2))} digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
