"""Safetensors directories: read slices of single tensors, write files as a stream while their digest is computed."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.phase import WrittenFile

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SafetensorsDirectory:
    """The tensors of a Hugging Face directory, with or without an index; files are opened when first needed.

    Raises:
        IncompleteError: no weights, an unreadable index, or a file that is missing or damaged.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self.files = self._find()  # tensor name -> file name

    def __enter__(self) -> SafetensorsDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    def _find(self) -> dict[str, str]:
        index, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        if index.is_file():
            try:
                files = dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise IncompleteError(f"the index of the weights can't be read: {error!r}", where=str(index)) from error
            outside = sorted({name for name in files.values() if Path(name).name != name})
            if outside:
                raise IncompleteError(f"the index names files outside its directory: {outside[:3]}", where=str(index))
            stored = {name: file for file in sorted(set(files.values())) for name in self._file(file).keys()}
            wrong = sorted(name for name in files.keys() | stored.keys() if files.get(name) != stored.get(name))
            if wrong:
                raise IncompleteError(
                    f"index and files disagree about {len(wrong)} tensors: {', '.join(wrong[:5])}",
                    where=str(index),
                    remedy="export or download the checkpoint again",
                )
            return files
        if single.is_file():
            return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        raise IncompleteError(
            f"neither {INDEX_FILE} nor {SINGLE_FILE} is there",
            where=str(self.directory),
            remedy="give a directory with safetensors weights",
        )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.directory / name
            try:
                self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # the library raises its own and OSError
                raise IncompleteError(
                    f"a file of the weights can't be read: {error}",
                    where=str(path),
                    remedy="export or download the checkpoint again",
                ) from error
        return self._open[name]

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._file(self.files[tensor]).get_slice(tensor).get_shape())

    def require_float(self, tensor: str) -> None:
        """Raise MismatchError when the tensor isn't stored in fp32, bf16 or fp16 (quantised checkpoints)."""
        code = self._file(self.files[tensor]).get_slice(tensor).get_dtype()
        if code not in CODES.values():
            raise MismatchError(
                f"{tensor} is stored as {code}; training loads {', '.join(CODES.values())}",
                where=str(self.directory / self.files[tensor]),
                remedy="start from an unquantised checkpoint",
            )

    def read(self, tensor: str, dimension: int, first: int, last: int) -> Tensor:
        """Rows (dimension 0) or columns (dimension 1) first..last of a tensor; only they are read from disk."""
        view = self._file(self.files[tensor]).get_slice(tensor)
        return view[first:last] if dimension == 0 else view[:, first:last]


class SafetensorsWriter:
    """Writes one safetensors file tensor by tensor, in the order announced, hashing what it writes.

    Args:
        path: file to create.
        tensors: (name, shape) of every tensor, in the order in which they will come.
        dtype: of all of them.
    """

    def __init__(self, path: Path, tensors: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype):
        self.path, self.dtype = path, dtype
        self._expected = list(tensors)
        self._hash = hashlib.sha256()
        self.size = 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in tensors:
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format aligns tensor data to 8 bytes
        self._file: BinaryIO = open(path, "wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: Any) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next announced tensor; converted to the file's dtype."""
        expected = self._expected.pop(0)
        if expected != (name, tuple(tensor.shape)):
            raise RuntimeError(f"{self.path}: expected {expected}, got {(name, tuple(tensor.shape))}")
        flat = tensor.detach().to(device="cpu", dtype=self.dtype).contiguous().flatten()
        self._put(memoryview(flat.view(torch.uint8).numpy()))

    def close(self) -> WrittenFile:
        """Flush to disk; the result's path is the bare file name.

        Raises:
            RuntimeError: announced tensors are missing.
        """
        if self._expected:
            raise RuntimeError(f"{self.path}: {len(self._expected)} announced tensors were not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return WrittenFile(self.path.name, self.size, self._hash.hexdigest())
