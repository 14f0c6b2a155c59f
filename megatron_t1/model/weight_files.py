"""Are the safetensors files of a Hugging Face directory there and whole? Reads their headers only, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_t1.errors import IncompleteError
from megatron_t1.regular import open_regular
from megatron_t1.safetensors_header import HeaderEntry, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # of a checkpoint without an index
SHOWN = 5  # names in a message
TRAINED_TYPES = ("F32", "BF16", "F16")  # that weights are trained from, by the format's names


def weight_problems(model_dir: str | Path) -> list[str]:
    """One line for each file of weights that is missing, cut off, or no safetensors file; also for a bad index."""
    directory = Path(model_dir)
    names = {path.name for path in directory.glob("*.safetensors")}
    problems = []
    if has_index(directory):
        try:
            listed = set(read_index(directory).values())
        except IncompleteError as error:
            return [f"{error.where}: {error.problem}"]
        problems += [f"{directory / INDEX_FILE} lists {name}, which is missing" for name in sorted(listed - names)]
        names &= listed
    found: dict[str, str] = {}
    for name in sorted(names):
        try:
            entries = read_entries(directory / name)
        except ValueError as error:
            problems.append(f"{directory / name}: {error}")
            continue
        problems += stored_twice(found, name, entries)
    return problems


def stored_twice(found: dict[str, str], file: str, tensors: Iterable[str]) -> list[str]:
    """A line where tensors of `file` are in an earlier one too; they are noted in `found`, tensor -> file."""
    twice = [name for name in tensors if name in found]
    wrong = [f"{len(twice)} tensors of {file} are in another file too: {', '.join(twice[:SHOWN])}"] if twice else []
    found |= {name: file for name in tensors}
    return wrong


def has_index(directory: Path) -> bool:
    """Whether a directory has an index, of whatever kind the file is."""
    return os.path.lexists(directory / INDEX_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        ValueError: it can't be read, isn't a regular file, or holds no object.
    """
    try:
        with open_regular(path) as file:
            value = json.loads(file.read())
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value


def read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor, by the index of a Hugging Face directory.

    Raises:
        IncompleteError: no readable index, or it names files outside its directory.
    """
    index = directory / INDEX_FILE
    try:
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError("weight_map names no files")
        if strange := [name for name in files.values() if not _is_plain(name)]:
            raise ValueError(
                f"weight_map names files outside its directory, or no safetensors files: {strange[:SHOWN]}"
            )
    except ValueError as error:
        raise IncompleteError(
            f"no readable index: {error}", where=str(index), remedy="export or download the checkpoint again"
        ) from error
    return files


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not {"/", "\0"} & set(name)


def read_entries(path: Path) -> dict[str, HeaderEntry]:
    """Every tensor in a safetensors file, by its header.

    Raises:
        ValueError: the file is no safetensors file, is cut off, or can't be read.
    """
    try:
        with open_regular(path) as file:
            return read_header(file, os.fstat(file.fileno()).st_size)[1]
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror or error}") from error
