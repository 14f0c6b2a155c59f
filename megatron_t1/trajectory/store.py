"""A directory of records: one file per finished trajectory while a phase runs, sealed into shards when it ends.

    DIR/<id>.safetensors                 one record (trajectory.record)
    DIR/<name>.shard.safetensors         many records; the file's own header is the index
    DIR/<id>.damaged                     one that was changed before it was sealed; its episode is played again
    DIR/exchange.<name>.log              what the engine was asked and answered (trajectory.exchange)

A shard appears whole by one rename and only then are its single files removed, so a reader that lists single files
first and shards second meets every trajectory, and counts one that is in both places once. There is no central index to
lose: several writers may add to one directory at once. An id belongs to one record: two shards that both hold it, or
one that holds it twice, are an error of whoever reads them, never a matter of order.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1 import atomic
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.paths import within
from megatron_t1.phase import WrittenFile
from megatron_t1.trajectory import record, tensorfile
from megatron_t1.trajectory.exchange import is_log, log_names
from megatron_t1.trajectory.exchange_reader import read_exchange, seal_abandoned
from megatron_t1.trajectory.record import SCHEMA_VERSION, Header, Trajectory
from megatron_t1.trajectory.typed import anything, check, text

SUFFIX = ".safetensors"
DAMAGED_SUFFIX = ".damaged"  # in place of SUFFIX
SHARD_SUFFIX = ".shard.safetensors"
SHARD_FORMAT = "megatron-t1 shard"
SHARD_SIZE = 128
INDEX_BYTES = 50_000_000  # of a shard's index, half of what a file's header may have
NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of a directory, over a network
INDEX_SHAPE = [{"header": {"trajectory_id": text, None: anything}, "digest": text}]
DUPLICATE_REMEDY = "remove the file that doesn't belong there; ids must be unique in a store"
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@,-]{0,199}")


def check_id(trajectory_id: str) -> str:
    """Return the id if it is a plain file name; raise T1Error otherwise (no id leaves its directory)."""
    if not _ID.fullmatch(trajectory_id) or trajectory_id.endswith((".shard", atomic.TEMPORARY_SUFFIX)):
        raise T1Error(
            f"{trajectory_id!r} can't be a trajectory id",
            remedy="use 1 to 200 letters, digits and ._=+@,- that start with a letter, a digit or _",
        )
    return trajectory_id


class DuplicateError(IncompleteError):
    """Two records of one id: nobody can say which one is meant."""


@dataclass
class Survey:
    """What a store holds where files may be damaged.

    Attributes:
        places: id -> name of the file that is read for it, sorted by id.
        unreadable: name of a file -> what is wrong with it.
        duplicates: what is wrong with an id that several files hold.
    """

    places: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, T1Error] = field(default_factory=dict)
    duplicates: list[DuplicateError] = field(default_factory=list)


@dataclass(frozen=True)
class _Item:
    """One trajectory of a shard."""

    index: int
    header: dict[str, Any]
    digest: str


class _Shard:
    def __init__(self, path: Path):
        self.file = tensorfile.TensorFile(path)
        record.require_format(self.file, SHARD_FORMAT)
        self.items: dict[str, _Item] = {}
        try:
            entries = check(record.json_header(self.file, "records"), INDEX_SHAPE, "records")
        except ValueError as error:
            raise IncompleteError(f"the shard's index is damaged: {error}", where=str(path)) from error
        for index, raw in enumerate(entries):
            trajectory_id = check_id(raw["header"]["trajectory_id"])
            if trajectory_id in self.items:
                raise DuplicateError(f"it holds {trajectory_id!r} twice", where=str(path), remedy=DUPLICATE_REMEDY)
            self.items[trajectory_id] = _Item(index, raw["header"], raw["digest"])

    def load(self, trajectory_id: str, *, verify: bool) -> Trajectory:
        item = self.items[trajectory_id]
        return record.assemble(
            item.header,
            item.digest,
            self.file,
            prefix=f"{item.index}/",
            where=f"{self.file.path} ({trajectory_id})",
            verify=verify,
        )


class RolloutStore:
    """The records of one directory, which is created when the first one is added.

    Trajectories are visited in the order of their ids, whether sealed or not. Arrays are views of mapped files.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._shards: dict[str, _Shard] = {}  # shards never change, so an index is read once
        self._places: dict[str, str] = {}  # id -> shard, of the shards called `_indexed`
        self._indexed: set[str] = set()
        self._digests: dict[str, str] = {}  # file name -> SHA-256 computed while this process wrote it

    def add(self, trajectory: Trajectory) -> Path:
        """Store one record as a file of its own, complete or absent; adding the same record again changes nothing.

        Raises:
            T1Error: the id is no plain name, another record has it already, or the disk is full.
        """
        trajectory_id = check_id(trajectory.header.trajectory_id)
        path = self._single(trajectory_id)
        if trajectory_id in self:
            self._require_same(trajectory)
            return path
        record.save(trajectory, path)
        return path

    def add_many(self, trajectories: Iterable[Trajectory], *, shard_size: int = SHARD_SIZE) -> None:
        """Store records directly in shards, for example demonstrations by the thousand.

        One process at a time does so in a directory; all ids are looked at before anything is written.

        Raises:
            T1Error: an id is no plain name, occurs twice or belongs to another record (nothing was written then), or
                the disk is full.
        """
        trajectories = list(trajectories)
        if not trajectories:
            return
        for trajectory in trajectories:
            check_id(trajectory.header.trajectory_id)
        with self._alone():
            known, fresh, seen = set(self.ids()), [], set()
            for trajectory in trajectories:
                trajectory_id = trajectory.header.trajectory_id
                if trajectory_id in seen:
                    raise self._taken(trajectory_id)
                seen.add(trajectory_id)
                if trajectory_id in known:
                    self._require_same(trajectory)
                else:
                    fresh.append(trajectory)
            for batch in _batches(fresh, shard_size):
                self._write_shard(batch)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process writes shards here; goes without where the file system has no locks."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield
        finally:
            os.close(descriptor)

    def seal(self, shard_size: int = SHARD_SIZE) -> None:
        """Merge all single files into shards and seal the exchange logs that killed writers left.

        For when nobody writes any more. Killed anywhere and repeated, it ends in the same state.

        Raises:
            T1Error: a single file is unreadable, was changed or contradicts a shard, or the disk is full; nothing was
                removed then.
        """
        seal_abandoned(self._logs())
        singles = self._list_singles()
        sealed = set(self._sealed())
        for trajectory_id in [trajectory_id for trajectory_id in singles if trajectory_id in sealed]:
            self._require_same(self._load_single(trajectory_id))
            self._single(trajectory_id).unlink(missing_ok=True)
        remaining = [trajectory_id for trajectory_id in singles if trajectory_id not in sealed]
        for batch in _batches((self._load_single(name, verify=True) for name in remaining), shard_size):
            self._write_shard(batch)
            names = [trajectory.header.trajectory_id for trajectory in batch]
            batch.clear()  # files are mapped
            for name in names:
                self._single(name).unlink(missing_ok=True)

    def discard(self, trajectory_id: str) -> bool:
        """Remove a record that is not sealed yet; whether there was one. Sealed records are never removed."""
        path = self._single(check_id(trajectory_id))
        if not path.is_file():
            return False
        path.unlink()
        return True

    def set_aside_damaged(self) -> dict[str, IncompleteError]:
        """Rename unsealed records that were changed, out of the store: id -> what is wrong. Sealed ones stay."""
        found: dict[str, IncompleteError] = {}
        for trajectory_id in self._list_singles():
            try:
                self._load_single(trajectory_id, verify=True)
            except IncompleteError as error:
                with suppress(FileNotFoundError):  # another worker did it
                    os.replace(self._single(trajectory_id), self.directory / f"{trajectory_id}{DAMAGED_SUFFIX}")
                    found[trajectory_id] = error
        return found

    def ids(self) -> list[str]:
        """Ids of all trajectories, sorted."""
        singles = self._list_singles()  # before the shards: see the module's docstring
        return sorted({*singles, *self._sealed()})

    def sealed_ids(self, shard: str) -> list[str]:
        """Ids of the trajectories in the shard of that file name, sorted. Raises IncompleteError when there is none."""
        if shard not in self._list_shards():
            raise IncompleteError("there is no such shard", where=str(self.directory / shard))
        return sorted(self._list_shards()[shard].items)

    def survey(self, only: str = "") -> Survey:
        """What can be read where files are damaged.

        Args:
            only: name of the one file to look at.
        """
        found = Survey()
        try:
            names = [only] if only else self._files()
        except OSError as error:
            found.unreadable[self.directory.name] = IncompleteError(f"the directory can't be read: {error.strerror}")
            return found
        for name in sorted(names, key=lambda name: name.endswith(SHARD_SUFFIX)):  # a single file is read first
            try:
                held = self._open_shard(name).items if name.endswith(SHARD_SUFFIX) else [self._id_of(name)]
            except DuplicateError as error:
                found.duplicates.append(DuplicateError(f"{name}: {error.problem}", where=error.where))
                continue
            except T1Error as error:
                found.unreadable[name] = error
                continue
            for trajectory_id in held:
                other = found.places.setdefault(trajectory_id, name)
                if other != name and not self._is_sealed_copy(trajectory_id, other, name):
                    found.duplicates.append(_twice(trajectory_id, other, name, self.directory))
        found.places = dict(sorted(found.places.items()))
        return found

    def _is_sealed_copy(self, trajectory_id: str, single: str, shard: str) -> bool:
        """Whether a single file is the record that was sealed into a shard, about to be removed."""
        if single.endswith(SHARD_SUFFIX):
            return False
        try:
            found = tensorfile.TensorFile(self.directory / single).metadata.get("digest")
        except IncompleteError:  # gone, or said to be unreadable by whoever loads it
            return True
        return found == self._open_shard(shard).items[trajectory_id].digest

    def _id_of(self, name: str) -> str:
        return check_id(name.removesuffix(SUFFIX))

    def load_from(self, name: str, trajectory_id: str, *, verify: bool = False) -> Trajectory:
        """The record in the file of that name (see `survey`), or where it was sealed since. Raises as `load`."""
        if name.endswith(SHARD_SUFFIX):
            return self._open_shard(name).load(trajectory_id, verify=verify)
        try:
            return self._load_single(trajectory_id, verify=verify)
        except IncompleteError:
            now = self.survey().places.get(trajectory_id, name)
            if now == name:
                raise
            return self.load_from(now, trajectory_id, verify=verify)

    def __contains__(self, trajectory_id: str) -> bool:
        return self._single(check_id(trajectory_id)).is_file() or self._shard_of(trajectory_id) is not None

    def __len__(self) -> int:
        return len(self.ids())

    def __iter__(self) -> Iterator[Trajectory]:
        for trajectory_id in self.ids():
            yield self.load(trajectory_id)

    def load(self, trajectory_id: str, *, verify: bool = False) -> Trajectory:
        """One record. Raises IncompleteError when there is none of this id, otherwise as `record.load`."""
        path = self._single(check_id(trajectory_id))
        if path.is_file():
            try:
                return self._load_single(trajectory_id, verify=verify)
            except IncompleteError:
                if path.is_file():  # otherwise it was sealed a moment ago
                    raise
        shard = self._shard_of(trajectory_id)
        if shard is None:
            raise IncompleteError(f"there is no trajectory {trajectory_id!r}", where=str(self.directory))
        return shard.load(trajectory_id, verify=verify)

    def headers(self) -> dict[str, Header]:
        """id -> header of every trajectory, in the order of ids, without reading arrays."""
        found: dict[str, Header] = {}
        for trajectory_id in self._list_singles():
            path = self._single(trajectory_id)
            try:
                found[trajectory_id] = record.load_header(path)
            except IncompleteError:
                if path.is_file():
                    raise
        for trajectory_id, name in self._sealed().items():
            if trajectory_id not in found:
                item = self._shards[name].items[trajectory_id]
                found[trajectory_id] = record.parse_header(item.header, where=f"{name} ({trajectory_id})")
        return dict(sorted(found.items()))

    def written_files(self, run_dir: str | Path) -> list[WrittenFile]:
        """Every file of the store, relative to `run_dir`, with its digest.

        The digest is the one computed while this process wrote the file. Of a file that another process wrote it is
        computed now, after its records were compared with their own digests: damage never gets a digest that fits.

        Raises:
            IncompleteError: a record was changed after it was written.
        """
        found = []
        for path in [*(self.directory / name for name in self._files()), *self._logs()]:
            digest = self._digests.get(path.name)
            if digest is None:
                self._verify(path.name)
                digest = atomic.sha256_file(path)
            found.append(WrittenFile(str(within(path, run_dir)), path.stat().st_size, digest))
        return found

    def _verify(self, name: str) -> None:
        if is_log(name):
            read_exchange(self.directory / name)
        elif name.endswith(SHARD_SUFFIX):
            shard = self._list_shards()[name]
            for trajectory_id in shard.items:
                shard.load(trajectory_id, verify=True)
        else:
            self._load_single(name.removesuffix(SUFFIX), verify=True)

    def _single(self, trajectory_id: str) -> Path:
        return self.directory / f"{trajectory_id}{SUFFIX}"

    def _load_single(self, trajectory_id: str, *, verify: bool = False) -> Trajectory:
        path = self._single(trajectory_id)
        trajectory = record.load(path, verify=verify)
        if trajectory.header.trajectory_id != trajectory_id:
            raise IncompleteError(
                f"the file holds trajectory {trajectory.header.trajectory_id!r}",
                where=str(path),
                remedy="give the file its own name back",
            )
        return trajectory

    def _list_singles(self) -> list[str]:
        return [self._id_of(name) for name in self._files() if not name.endswith(SHARD_SUFFIX)]

    def _list_shards(self) -> dict[str, _Shard]:
        for name in self._files():
            if name.endswith(SHARD_SUFFIX):
                self._open_shard(name)
        return self._shards

    def _sealed(self) -> dict[str, str]:
        """Id -> name of its shard, of all shards; raises DuplicateError where two hold one id."""
        shards = self._list_shards()
        if shards.keys() != self._indexed:
            places: dict[str, str] = {}
            for name, shard in sorted(shards.items()):
                for trajectory_id in shard.items:
                    if (other := places.setdefault(trajectory_id, name)) != name:
                        raise _twice(trajectory_id, other, name, self.directory)
            self._places, self._indexed = places, set(shards)
        return self._places

    def _open_shard(self, name: str) -> _Shard:
        if name not in self._shards:
            self._shards[name] = _Shard(self.directory / name)
        return self._shards[name]

    def _files(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.directory) if name.endswith(SUFFIX))
        except FileNotFoundError:
            return []

    def _logs(self) -> list[Path]:
        return [self.directory / name for name in log_names(self.directory)]

    def _shard_of(self, trajectory_id: str) -> _Shard | None:
        name = self._sealed().get(trajectory_id)
        return None if name is None else self._shards[name]

    def _require_same(self, trajectory: Trajectory) -> None:
        trajectory_id = trajectory.header.trajectory_id
        shard = self._shard_of(trajectory_id)
        if shard is not None:
            stored = shard.items[trajectory_id].digest
        else:
            stored = self._load_single(trajectory_id).digest
        if stored != trajectory.digest:
            raise self._taken(trajectory_id)

    def _taken(self, trajectory_id: str) -> T1Error:
        return T1Error(
            f"another record is stored under the id {trajectory_id!r} already",
            where=str(self.directory),
            remedy="ids must be unique in a store; use a fresh directory for a new rollout",
        )

    def _write_shard(self, trajectories: list[Trajectory]) -> None:
        tensors: dict[str, np.ndarray] = {}
        records = []
        for index, trajectory in enumerate(trajectories):
            records.append(_index_entry(trajectory))
            tensors.update({f"{index}/{name}": array for name, array in trajectory.arrays().items()})
        content = hashlib.sha256("".join(item["digest"] for item in records).encode()).hexdigest()
        # Named by content: a repeated seal writes the same file.
        path = self.directory / f"{content[:24]}{SHARD_SUFFIX}"
        metadata = {
            "format": SHARD_FORMAT,
            "schema": str(SCHEMA_VERSION),
            "records": record.dump(records),
        }
        self._digests[path.name] = tensorfile.write(path, tensors, metadata)


def _batches(trajectories: Iterable[Trajectory], shard_size: int) -> Iterator[list[Trajectory]]:
    """In their order, at most `shard_size` at a time, and no more than fit the index of one shard."""
    batch: list[Trajectory] = []
    size = 0
    for trajectory in trajectories:
        needed = len(json.dumps(record.dump(_index_entry(trajectory))))  # text within a JSON header
        if batch and (len(batch) == shard_size or size + needed > INDEX_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(trajectory)
        size += needed
    if batch:
        yield batch


def _index_entry(trajectory: Trajectory) -> dict[str, Any]:
    return {"header": trajectory.header.to_json(), "digest": trajectory.digest}


def _twice(trajectory_id: str, one: str, other: str, directory: Path) -> DuplicateError:
    return DuplicateError(
        f"{one} and {other} both hold {trajectory_id!r}", where=str(directory), remedy=DUPLICATE_REMEDY
    )
