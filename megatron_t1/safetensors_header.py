"""The header of a safetensors file, believed only as far as it fits the file. Needs neither torch nor numpy.

Format: 8 bytes of header length, a JSON header, raw little-endian data without gaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
LARGEST = 1 << 62  # of a size or offset
MOST_DIMENSIONS = 64  # that numpy and torch can hold
METADATA = "__metadata__"
# Bytes of an element by the format's name of its type. Types it may have besides are not measured.
WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class HeaderEntry:
    """What a header says of one tensor.

    Attributes:
        code: the format's name of its type, "F32" for example.
        start, stop: bytes from the start of the file.
    """

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, HeaderEntry]]:
    """Metadata and tensors of a file of `size` bytes that is open at its start.

    Raises:
        ValueError: it is no safetensors file, it was cut off, or header and data don't fit each other.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(f"not a safetensors file, or cut off ({size} bytes)")
    base = 8 + length
    if base > size:
        raise ValueError(f"cut off: its header needs {base} bytes, the file has {size}")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header can't be read: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header holds {type(header).__name__}, not an object")
    metadata = header.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its header's {METADATA} isn't text by name")
    entries = {name: _entry(name, raw, base) for name, raw in header.items()}
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"{name} begins at byte {entry.start}, expected {end}")
        end = entry.stop
    if end != size:
        what = "cut off" if end > size else "has bytes after its last tensor"
        raise ValueError(f"{what}: the tensors end at byte {end}, the file has {size}")
    return metadata, entries


def _entry(name: str, raw: Any, base: int) -> HeaderEntry:
    code, shape, offsets = (
        (raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")) if isinstance(raw, dict) else (None,) * 3
    )
    if not isinstance(code, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"its header has no type, shape or place of {name}")
    size = needed = offsets[1] - offsets[0]
    if width := WIDTHS.get(code):
        needed = math.prod(shape) * width
    if size < 0 or size != needed:
        raise ValueError(f"{name}, {list(shape)} of {code}, takes {needed} bytes, and has {size} by its header")
    return HeaderEntry(code, tuple(shape), base + offsets[0], base + offsets[1])


def _are_counts(value: Any) -> bool:
    """Whether it is a list of sizes that a tensor, or a file, may have."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(number) is int and 0 <= number < LARGEST for number in value)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
