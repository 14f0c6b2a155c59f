"""Safetensors directories: read slices of single tensors, write files as a stream while their digest is computed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.model.weight_files import (
    INDEX_FILE,
    SHOWN,
    SINGLE_FILE,
    TRAINED_TYPES,
    has_index,
    read_entries,
    read_index,
    stored_twice,
)
from megatron_t1.phase import WrittenFile
from megatron_t1.safetensors_header import METADATA, HeaderEntry

TRAINED_CODES = dict(zip((torch.float32, torch.bfloat16, torch.float16), TRAINED_TYPES, strict=True))
CODES = {
    **TRAINED_CODES,
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {code: dtype for dtype, code in CODES.items()}
BLOCK_ELEMENTS = 1 << 24  # converted, hashed and written at a time


@dataclass(frozen=True)
class TensorHeader:
    """What a file says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsDirectory:
    """The tensors of a Hugging Face directory, with or without an index; files are opened when first needed.

    Attributes:
        files: tensor name -> file name.

    Raises:
        IncompleteError: no weights, an unreadable index, a file that is missing or damaged, or a tensor that is stored
            twice.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._entries: dict[str, HeaderEntry] = {}
        self.files = self._find()

    def __enter__(self) -> SafetensorsDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    def _find(self) -> dict[str, str]:
        if has_index(self.directory):
            listed = read_index(self.directory)
            stored = self._read_headers(sorted(set(listed.values())))
            wrong = sorted(name for name in listed.keys() | stored.keys() if listed.get(name) != stored.get(name))
            if wrong:
                raise self._broken(INDEX_FILE, f"index and files disagree about {len(wrong)} tensors: {wrong[:SHOWN]}")
            return listed
        if (self.directory / SINGLE_FILE).exists():
            return self._read_headers([SINGLE_FILE])
        raise IncompleteError(
            f"neither {INDEX_FILE} nor {SINGLE_FILE} is there",
            where=str(self.directory),
            remedy="give a directory with safetensors weights",
        )

    def _read_headers(self, names: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            try:
                entries = read_entries(self.directory / name)
            except ValueError as error:
                raise self._broken(name, f"a file of the weights can't be read: {error}") from error
            if twice := stored_twice(found, name, entries):
                raise self._broken(name, twice[0])
            self._entries |= entries
        return found

    def _broken(self, name: str, problem: str) -> IncompleteError:
        return IncompleteError(
            problem, where=str(self.directory / name), remedy="export or download the checkpoint again"
        )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                opened = safe_open(self.directory / name, framework="pt")
            except Exception as error:  # the library raises its own and OSError
                raise self._broken(name, f"a file of the weights can't be read: {error}") from error
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._entries[tensor].shape

    def header(self, tensor: str) -> TensorHeader:
        """Shape and type of a tensor.

        Raises:
            MismatchError: a type that isn't known here.
        """
        code = self._entries[tensor].code
        if code not in _TYPES:
            raise self._type_error(tensor, code)
        return TensorHeader(tensor, self.shape(tensor), _TYPES[code])

    def trained_type(self, tensor: str) -> torch.dtype:
        """The type a tensor is stored in.

        Raises:
            MismatchError: it isn't fp32, bf16 or fp16 (quantised checkpoints).
        """
        dtype = self.header(tensor).dtype
        if dtype not in TRAINED_CODES:
            raise self._type_error(tensor, CODES[dtype])
        return dtype

    def _type_error(self, tensor: str, code: str) -> MismatchError:
        return MismatchError(
            f"{tensor} is stored as {code}; training loads {', '.join(TRAINED_CODES.values())}",
            where=str(self.directory / self.files[tensor]),
            remedy="start from an unquantised checkpoint",
        )

    def blocks(self, tensor: str) -> Iterator[Tensor]:
        """A whole tensor, in blocks of rows of a bounded size."""
        view = self._file(self.files[tensor]).get_slice(tensor)
        shape = view.get_shape()
        if not shape:
            yield self._file(self.files[tensor]).get_tensor(tensor)
            return
        rows = max(1, BLOCK_ELEMENTS * shape[0] // max(1, torch.Size(shape).numel()))
        for first in range(0, shape[0], rows):
            yield view[first : first + rows]

    def read(self, tensor: str, dimension: int, first: int, last: int, slot: int | None = None) -> Tensor:
        """Rows (dimension 0) or columns (dimension 1) first..last of a tensor; only they are read from disk.

        Args:
            slot: the tensor is a stack, and this number of its first dimension is meant.
        """
        view = self._file(self.files[tensor]).get_slice(tensor)
        cut = (slice(first, last),) if dimension == 0 else (slice(None), slice(first, last))
        return view[cut] if slot is None else view[slot, *cut]


class SafetensorsWriter:
    """Writes one safetensors file block by block, in the order announced, hashing what it writes.

    Args:
        path: file to create.
        tensors: every tensor, in the order in which they will come.
    """

    def __init__(self, path: Path, tensors: list[TensorHeader]):
        self.path = path
        self._hash = hashlib.sha256()
        self.size = 0
        self._left = [[tensor, torch.Size(tensor.shape).numel()] for tensor in reversed(tensors)]  # elements to come
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            end = offset + tensor.bytes
            header[tensor.name] = {
                "dtype": CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format aligns tensor data to 8 bytes
        self._file: BinaryIO = open(path, "wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: Any) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def write(self, name: str, block: Tensor) -> None:
        """The next rows of the tensor that is announced next; converted to its type, a bounded number at a time."""
        if not self._left or self._left[-1][0].name != name or self._left[-1][1] < block.numel():
            raise RuntimeError(f"{self.path}: {block.numel()} elements of {name} come out of turn")
        dtype = self._left[-1][0].dtype
        for part in block.detach().contiguous().flatten().split(BLOCK_ELEMENTS):
            flat = part.to(device="cpu", dtype=dtype)
            self._put(memoryview(flat.view(torch.uint8).numpy()))
        self._left[-1][1] -= block.numel()
        if not self._left[-1][1]:
            self._left.pop()

    @property
    def is_complete(self) -> bool:
        """Whether every announced tensor is written."""
        return not self._left

    def close(self) -> WrittenFile:
        """Flush to disk; the result's path is the bare file name.

        Raises:
            RuntimeError: announced tensors are missing.
        """
        if self._left:
            raise RuntimeError(f"{self.path}: {len(self._left)} announced tensors were not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return WrittenFile(self.path.name, self.size, self._hash.hexdigest())
