"""JSON objects that say of themselves whether they are what was written: a digest over everything else in them.

A file holds one of them, or one in each line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.regular import open_regular

SEAL = "sha256"  # key of the digest


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
