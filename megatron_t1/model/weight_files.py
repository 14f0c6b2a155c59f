"""Are the safetensors files of a Hugging Face directory there and whole? Reads their headers only, without torch."""

from __future__ import annotations

import json
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def weight_problems(model_dir: str | Path) -> list[str]:
    """One line for each file of weights that is missing, cut off, or no safetensors file; also for a bad index."""
    directory = Path(model_dir)
    index = directory / INDEX_FILE
    names = {path.name for path in directory.glob("*.safetensors")}
    problems = []
    if index.is_file():
        try:
            listed = set(json.loads(index.read_bytes())["weight_map"].values())
            if not listed or not all(isinstance(name, str) and Path(name).name == name for name in listed):
                raise ValueError("weight_map names no files beside it")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{index}: no readable index: {error}"]
        problems += [f"{index} lists {name}, which is missing" for name in sorted(listed - names)]
        names &= listed
    return problems + [f"{directory / name}: {wrong}" for name in sorted(names) if (wrong := _damage(directory / name))]


def _damage(path: Path) -> str:
    """What is wrong with one file by its header and size; "" when nothing is."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            return f"not a safetensors file, or cut off ({size} bytes)"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            return f"its header can't be read: {error}"
    expected = 8 + length + end
    return "" if size == expected else f"{size} bytes, its header says {expected}: it was cut off or changed"
