"""Refuse a torch_dist checkpoint that could run code. It holds three kinds of pickles, each checked before it is read.

`.metadata` is read by torch with the plain pickle module: the names of everything it would import are compared with a
list of allowed ones, by a walk over the opcodes that builds nothing. `common.pt` and objects among the shards, which
torch reads without restriction in some versions and places, must load with torch's restricted unpickler first.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_t1.errors import IncompleteError, T1Error

ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}


def imported_names(data: bytes) -> list[tuple[str, str]]:
    """(module, name) of every global that unpickling `data` would look up.

    Raises:
        ValueError: the bytes aren't a pickle, or take a name from a place this walk can't follow.
    """
    names: list[tuple[str, str]] = []
    memo: dict[int, str | None] = {}
    recent: list[str | None] = []  # values pushed last: the text of strings, None for anything else
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("GLOBAL", "INST"):
            module, name = str(argument).split(" ", 1)
            names.append((module, name))
            recent.append(None)
        elif opcode.name == "STACK_GLOBAL":
            if len(recent) < 2 or recent[-1] is None or recent[-2] is None:
                raise ValueError("a global's name isn't a literal string")
            names.append((recent[-2], recent[-1]))
            recent.append(None)
        elif opcode.name in ("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"):
            raise ValueError(f"opcode {opcode.name}")
        elif opcode.name in _STRINGS:
            recent.append(str(argument))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = recent[-1] if recent else None
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = recent[-1] if recent else None
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            recent.append(memo.get(argument))
        elif opcode.name not in ("PROTO", "FRAME"):
            recent.append(None)
        del recent[:-2]
    return names


def require_harmless_pickle(path: Path) -> None:
    """Raise unless the pickle in `path` imports nothing but what a torch_dist metadata file needs.

    Raises:
        IncompleteError: not a readable pickle.
        T1Error: it would import something else.
    """
    try:
        names = imported_names(path.read_bytes())
    except (OSError, ValueError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise IncompleteError(
            f"the checkpoint's metadata can't be read: {error}", where=str(path), remedy="load an older checkpoint"
        ) from error
    wrong = sorted(
        {
            f"{module}.{name}"
            for module, name in names
            if name not in ALLOWED.get(module, ()) and not _is_dtype(module, name)
        }
    )
    if wrong:
        raise T1Error(
            f"the checkpoint's metadata would import {', '.join(wrong[:5])}",
            where=str(path),
            remedy="don't load checkpoints from an untrusted source",
        )


def require_harmless_checkpoint(directory: Path, known: Collection[str]) -> None:
    """Raise unless everything in a torch_dist checkpoint can be loaded without running code.

    Args:
        known: names of the checkpoint's files; its metadata may refer to no other.

    Raises:
        IncompleteError: a file isn't readable.
        T1Error: a file would import what it shouldn't, or the metadata refers to a file elsewhere.
    """
    import torch

    require_harmless_pickle(directory / ".metadata")
    if (directory / "common.pt").exists():
        _require_plain_objects((directory / "common.pt").read_bytes(), directory / "common.pt")
    stored, kinds = _entries(directory / ".metadata")
    foreign = sorted({info.relative_path for info in stored.values()} - set(known))
    if foreign:
        raise T1Error(
            f"the checkpoint's metadata refers to {', '.join(foreign[:5])}, which is none of its files",
            where=str(directory / ".metadata"),
            remedy="don't load checkpoints from an untrusted source",
        )
    objects = torch.distributed.checkpoint.metadata.BytesStorageMetadata
    for index, info in stored.items():
        if isinstance(kinds.get(index.fqn), objects):
            _require_plain_objects(_part(directory / info.relative_path, info), directory / info.relative_path)


def _entries(path: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Where each entry lies, and what kind each name is, of a metadata file that imports nothing it shouldn't.

    Raises:
        IncompleteError: it isn't made of what its names say.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    try:
        with open(path, "rb") as file:
            metadata = pickle.load(file)
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        stored, kinds = metadata.storage_data or {}, metadata.state_dict_metadata
        for index, info in stored.items():
            sizes = (info.offset, info.length) if isinstance(info, _StorageInfo) else ()
            if not (isinstance(index, MetadataIndex) and sizes and isinstance(info.relative_path, str)):
                raise TypeError(f"it has an entry of type {type(info).__name__}")
            if not all(type(size) is int and size >= 0 for size in sizes):
                raise ValueError(f"{index.fqn} lies at {info.offset!r} and has {info.length!r} bytes")
        return stored, dict(kinds)
    except Exception as error:  # whatever an unpickler of harmless names may meet
        raise IncompleteError(
            f"the checkpoint's metadata can't be read: {type(error).__name__}: {error}",
            where=str(path),
            remedy="load an older checkpoint",
        ) from error


def _part(path: Path, info: Any) -> bytes:
    with open(path, "rb") as file:
        file.seek(info.offset)
        return file.read(info.length)


def _require_plain_objects(data: bytes, path: Path) -> None:
    """Tensors, numbers, text and containers of them, by torch's restricted unpickler."""
    import torch

    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise T1Error(
            f"the checkpoint's objects are refused: {str(error).splitlines()[0]}",
            where=str(path),
            remedy="don't load checkpoints from an untrusted source",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise IncompleteError(
            f"the checkpoint's objects can't be read: {error}", where=str(path), remedy="load an older checkpoint"
        ) from error


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and name in {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    }
