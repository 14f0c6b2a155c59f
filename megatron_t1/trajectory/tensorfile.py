"""Safetensors files written as a stream and read by mapping: no copy in either direction, and no trust in what is read.

The safetensors package returns copies of tensors and needs a whole file in memory to write it. A shard of long
trajectories is several gigabytes, so the format's few lines (`safetensors_header`) are read and written here; files of
either side open in the other.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1 import atomic
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.regular import open_regular
from megatron_t1.safetensors_header import MAX_HEADER_BYTES, METADATA, HeaderEntry, read_header

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WRITE_BLOCK_BYTES = 1 << 22
THREAD_FROM_BYTES = 1 << 22
MAP_FROM_BYTES = (
    1 << 20
)  # smaller files are read: a mapping holds a file descriptor, and small files come by the thousand

if sys.byteorder != "little":
    raise ImportError("megatron_t1 reads and writes little-endian tensors and needs a little-endian machine")


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Write a safetensors file that is complete or absent; return the SHA-256 of its bytes.

    Tensors are streamed, so that mapped inputs are never all in memory.

    Raises:
        T1Error: a dtype the format doesn't know, a header larger than the format allows, or no space left.
    """
    head, order = _head(path, tensors, metadata)
    parts = [head, *(_bytes_of(tensors[name]) for name in order)]
    size = sum(len(part) for part in parts)
    with _writing(path, size) as file:
        return _write_and_hash(file, parts, threaded=size >= THREAD_FROM_BYTES)


def write_describing(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    name: str,
    describe: Callable[[], str],
    length: int,
) -> None:
    """`write` with one more metadata entry, that is worked out from the tensors while they are written.

    Args:
        name: of the entry.
        describe: its value, ASCII of `length` characters; called in a thread where the file is large.
    """
    head, order = _head(path, tensors, {**metadata, name: "0" * length})
    parts = [_bytes_of(tensors[name]) for name in order]
    size = len(head) + sum(len(part) for part in parts)
    with _writing(path, size) as file, ThreadPoolExecutor(1) as pool:
        value = pool.submit(describe) if size >= THREAD_FROM_BYTES else None
        file.seek(len(head))
        for part in parts:
            _write_all(file, memoryview(part))
        known = describe() if value is None else value.result()
        head, _ = _head(path, tensors, {**metadata, name: known})
        file.seek(0)
        _write_all(file, memoryview(head))


def _head(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Length and JSON header, and the names of the tensors in the order of their bytes."""
    for name, array in tensors.items():
        if array.dtype not in NAMES:
            raise T1Error(f"tensor {name!r} has dtype {array.dtype}, which safetensors can't hold", where=str(path))
    # Wide dtypes first, as the safetensors package does: then every tensor is aligned to its item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:  # nobody could read it
        raise T1Error(
            f"its header would have {len(text)} bytes, at most {MAX_HEADER_BYTES} can be read",
            where=str(path),
            remedy="nothing was written; shorten what its metadata states",
        )
    return len(text).to_bytes(8, "little") + text, order


@contextmanager
def _writing(path: str | Path, size: int) -> Iterator[Any]:
    """A file that appears as `path` when the block ends well."""
    try:
        with atomic.replacing(path) as temporary, open(temporary, "wb", buffering=0) as file:
            yield file
    except OSError as error:
        raise T1Error(
            f"can't write {size} bytes: {error.strerror or error}",
            where=str(path),
            remedy="free space or choose another run directory; everything written before is intact",
        ) from error


def _write_and_hash(file, parts: list[memoryview | bytes], *, threaded: bool) -> str:
    """Write the parts; return their SHA-256, computed beside the writing where that pays for a thread."""
    digest = hashlib.sha256()
    views = [memoryview(part) for part in parts]
    blocks = [
        view[start : start + WRITE_BLOCK_BYTES] for view in views for start in range(0, len(view), WRITE_BLOCK_BYTES)
    ]
    if not threaded:
        for block in blocks:
            digest.update(block)
            _write_all(file, block)
        return digest.hexdigest()
    with ThreadPoolExecutor(1) as hasher:
        hashing = [hasher.submit(digest.update, block) for block in blocks]
        try:
            for block in blocks:
                _write_all(file, block)
        except BaseException:
            hasher.shutdown(cancel_futures=True)
            raise
        for future in hashing:
            future.result()
    return digest.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview | bytes:
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _write_all(file, block: memoryview) -> None:
    while len(block):
        block = block[file.write(block) :]


@dataclass(frozen=True)
class Entry:
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


class TensorFile:
    """A safetensors file: its metadata, and read-only arrays that are views of the mapped (if small: the read) file.

    Raises (at construction):
        IncompleteError: truncated, or not a safetensors file at all, or no regular file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                self.metadata, entries = read_header(file, size)
        except OSError as error:
            raise IncompleteError(f"can't read: {error.strerror or error}", where=str(path)) from error
        except ValueError as error:
            raise _broken(self.path, str(error)) from error
        self.entries = {name: _entry(self.path, name, found) for name, found in entries.items()}
        self._size = size
        self._buffer: mmap.mmap | bytes | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        """The array called `name`: read-only, shares memory with the file; KeyError when there is none.

        Raises:
            IncompleteError: the file is gone, or has changed, since it was opened.
        """
        entry = self.entries[name]
        if entry.start == entry.stop:
            return np.empty(entry.shape, entry.dtype)
        if self._buffer is None:
            self._buffer = self._contents()
        if len(self._buffer) != self._size:
            raise _broken(
                self.path, f"the file changed from {self._size} to {len(self._buffer)} bytes while it was open"
            )
        count = (entry.stop - entry.start) // entry.dtype.itemsize
        return np.frombuffer(self._buffer, entry.dtype, count=count, offset=entry.start).reshape(entry.shape)

    def _contents(self) -> mmap.mmap | bytes:
        try:
            with open_regular(self.path) as file:
                small = self._size < MAP_FROM_BYTES
                return file.read() if small else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            problem = error.strerror if isinstance(error, OSError) else error
            raise IncompleteError(f"can't read: {problem}", where=str(self.path)) from error


def _entry(path: Path, name: str, found: HeaderEntry) -> Entry:
    if found.code not in DTYPES:
        raise _broken(path, f"tensor {name!r} has type {found.code!r}, and only {', '.join(DTYPES)} are read here")
    return Entry(DTYPES[found.code], found.shape, found.start, found.stop)


def _broken(path: Path, problem: str) -> IncompleteError:
    return IncompleteError(
        problem, where=str(path), remedy="restore the file, or delete it and repeat the step that made it"
    )
