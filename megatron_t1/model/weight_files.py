"""Are the safetensors files of a Hugging Face directory there and whole? Reads their headers only, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_t1.errors import IncompleteError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # of a checkpoint without an index
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def weight_problems(model_dir: str | Path) -> list[str]:
    """One line for each file of weights that is missing, cut off, or no safetensors file; also for a bad index."""
    directory = Path(model_dir)
    names = {path.name for path in directory.glob("*.safetensors")}
    problems = []
    if (directory / INDEX_FILE).is_file():
        try:
            listed = set(read_index(directory).values())
        except IncompleteError as error:
            return [f"{error.where}: {error.problem}"]
        problems += [f"{directory / INDEX_FILE} lists {name}, which is missing" for name in sorted(listed - names)]
        names &= listed
    return problems + [f"{directory / name}: {wrong}" for name in sorted(names) if (wrong := _damage(directory / name))]


def read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor, by the index of a Hugging Face directory.

    Raises:
        IncompleteError: no readable index, or it names files outside its directory.
    """
    index = directory / INDEX_FILE
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files.values()):
            raise ValueError("weight_map names no files, or files outside its directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IncompleteError(
            f"no readable index: {error}", where=str(index), remedy="export or download the checkpoint again"
        ) from error
    return dict(files)


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(type code, shape) of every tensor in a safetensors file.

    Raises:
        ValueError: the file is no safetensors file, or cut off.
    """
    if damage := _damage(path):
        raise ValueError(damage)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        code, shape = entry.get("dtype"), entry.get("shape")
        if not isinstance(code, str) or not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise ValueError(f"its header has no type or shape of {name}")
        tensors[name] = (code, tuple(shape))
    return tensors


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
