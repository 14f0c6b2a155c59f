"""Refuse a pickle that could run code: names of everything it would import are compared with a list of allowed ones.

torch reads a checkpoint's `.metadata` with the plain pickle module, so the file is checked before torch sees it. The
check only walks the opcodes; nothing is built.
"""

from __future__ import annotations

import pickletools
from pathlib import Path

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
    except (OSError, ValueError, IndexError) as error:
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
