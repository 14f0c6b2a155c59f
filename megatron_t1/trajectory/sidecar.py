"""What training computes about records (old values, advantages, returns, log-probs), keyed by their digests.

    DIR/sidecar-00000-of-00002.safetensors     written by rank 0 of 2; arrays "<record digest>/<name>"

Records are immutable; a sidecar refers to exactly the content it was computed from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory import tensorfile

FORMAT = "megatron-t1 sidecar"
_NAME = re.compile(r"sidecar-(\d{5})-of-(\d{5})\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def write_sidecar(
    directory: str | Path, rank: int, arrays: Mapping[str, Mapping[str, np.ndarray]], *, ranks: int = 1
) -> Path:
    """Write one rank's arrays, complete or absent, replacing what this rank wrote before.

    Args:
        arrays: digest of a record -> name -> float32 array, usually [T].
        rank, ranks: of all the processes that write into `directory`; a reader insists on all of them.

    Raises:
        T1Error: a key that is no digest, an array that isn't float32, or no space left.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} isn't in 0..{ranks - 1}")
    path = Path(directory) / f"sidecar-{rank:05d}-of-{ranks:05d}.safetensors"
    tensors = {}
    for digest, named in arrays.items():
        if not _DIGEST.fullmatch(digest):
            raise T1Error(f"sidecars are keyed by record digest, got {digest!r}", where=str(path))
        for name, array in named.items():
            if array.dtype != np.float32:
                raise T1Error(
                    f"array {name!r} of record {digest[:16]} is {array.dtype}, expected float32", where=str(path)
                )
            tensors[f"{digest}/{name}"] = array
    tensorfile.write(path, tensors, {"format": FORMAT, "schema": "1"})
    return path


class Sidecar(Mapping[str, Mapping[str, np.ndarray]]):
    """digest -> name -> float32 array (read-only views of mapped files). Made by `read_sidecar`."""

    def __init__(self, directory: Path, entries: dict[str, dict[str, tensorfile.TensorFile]]):
        self._directory = directory
        self._entries = entries

    def __getitem__(self, digest: str) -> Mapping[str, np.ndarray]:
        """Raises IncompleteError when the record has no entry: it was never computed, or the record changed."""
        if digest not in self._entries:
            raise IncompleteError(
                f"there is no entry for record {digest[:16]}...",
                where=str(self._directory),
                remedy="run the phase that computes it again on the same rollouts",
            )
        return {name: file[f"{digest}/{name}"] for name, file in self._entries[digest].items()}

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def array(self, digest: str, name: str, length: int) -> np.ndarray:
        """The array `name` of a record of `length` tokens. Raises IncompleteError when absent or of another length."""
        named = self[digest]
        if name not in named or len(named[name]) != length:
            found = (
                f"{len(named[name])} rows, expected {length}" if name in named else f"only {', '.join(sorted(named))}"
            )
            raise IncompleteError(f"array {name!r} of record {digest[:16]}...: {found}", where=str(self._directory))
        return named[name]


def read_sidecar(directory: str | Path) -> Sidecar:
    """Open what all ranks wrote.

    Raises:
        IncompleteError: no sidecar, a rank's file is missing or damaged, or files of differently many ranks are mixed.
        T1Error: two ranks wrote the same array of the same record.
    """
    directory = Path(directory)
    names = sorted(path.name for path in directory.glob("sidecar-*.safetensors")) if directory.is_dir() else []
    parsed = [match for name in names if (match := _NAME.fullmatch(name))]
    sizes = sorted({int(match[2]) for match in parsed})
    if len(sizes) != 1:
        found = f"files written by {' and by '.join(map(str, sizes))} ranks" if sizes else "no sidecar file"
        raise IncompleteError(
            f"found {found}", where=str(directory), remedy="empty the directory and run the phase that writes it again"
        )
    missing = sorted(set(range(sizes[0])) - {int(match[1]) for match in parsed})
    if missing:
        raise IncompleteError(
            f"the files of rank(s) {', '.join(map(str, missing))} of {sizes[0]} are missing",
            where=str(directory),
            remedy="run the phase that writes them again",
        )
    entries: dict[str, dict[str, tensorfile.TensorFile]] = {}
    for match in parsed:
        file = tensorfile.TensorFile(directory / match[0])
        if file.metadata.get("format") != FORMAT:
            raise IncompleteError("this file is no sidecar", where=str(file.path))
        for key in file.entries:
            digest, _, name = key.partition("/")
            named = entries.setdefault(digest, {})
            if name in named:
                raise T1Error(
                    f"array {name!r} of record {digest[:16]}... was written twice",
                    where=f"{named[name].path} and {file.path}",
                    remedy="every record belongs to one rank; empty the directory and run the phase again",
                )
            named[name] = file
    return Sidecar(directory, entries)
