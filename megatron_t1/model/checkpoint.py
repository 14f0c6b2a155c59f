"""Checkpoints of one role: model, optimizer and counters, complete or absent (Automodel#3261, verl#7952).

    DIRECTORY/checkpoint.json     what it is, and every file with size and SHA-256; written last
    DIRECTORY/state.json          counters, learning rate and whatever else the trainer passes
    DIRECTORY/*.distcp, .metadata, common.pt, metadata.json     Megatron's torch_dist format
    DIRECTORY/rank_N_NAME         what the trainer passes for rank N alone

Everything is written into a directory beside it and renamed. Model and optimizer can be loaded in any other parallel
layout; the state of a DistributedOptimizer in those that Megatron allows (optimizer_state).

A save is over when it returns. Megatron's asynchronous one isn't offered: a phase ends with its save, so nothing could
go on meanwhile, and a writer process that outlives a killed phase would write beside the next attempt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import __version__ as core_version
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.nn import Module

from megatron_t1 import atomic, sealed
from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.errors import IncompleteError, MismatchError, T1Error, naming
from megatron_t1.model.chunks import bare_chunks
from megatron_t1.model.collective import on_first_rank, together
from megatron_t1.model.directories import make_empty, publish_directory
from megatron_t1.model.optimizer_state import OptimizerLoader, optimizer_entries, optimizer_identity
from megatron_t1.model.pickle_check import require_harmless_checkpoint
from megatron_t1.model.stored import require_equal_architecture
from megatron_t1.paths import within
from megatron_t1.phase import WrittenFile
from megatron_t1.regular import open_regular

MARKER_FILE = "checkpoint.json"
STATE_FILE = "state.json"
FORMAT_VERSION = 2
LITTLE_SPACE = 16 * 2**20  # bytes; torch's archive writer raises a RuntimeError on a full disk


class SynchronousSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by torch's own writer in this process.

    Megatron's writer forks and starts a manager process even for a synchronous save; a phase that is killed would leave
    them behind.
    """

    def save(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> None:
        entries, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(entries, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, single_file_per_rank=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save_checkpoint(
    directory: str | Path,
    chunks: list[Module],
    optimizer: Any | None,
    state: dict[str, Any],
    *,
    relative_to: str | Path | None = None,
    own: Mapping[str, bytes] | None = None,
) -> list[WrittenFile]:
    """Write a checkpoint; it appears under its name when it is complete, and replaces an earlier one. Collective.

    Args:
        directory: to create.
        chunks: model chunks, bare or wrapped (DDP).
        optimizer: a Megatron optimizer, or None for the model only.
        state: JSON values, equal on all ranks.
        relative_to: what the paths of the result are relative to; `directory` itself by default.
        own: name -> content of what this rank alone will ask for again (`read_own`).

    Returns:
        Every file with its size and SHA-256, on every rank.

    Raises:
        T1Error: a rank couldn't write.
    """
    final = Path(directory).resolve()
    prefix = Path() if relative_to is None else within(directory, relative_to)
    partial = final.with_name(final.name + atomic.TEMPORARY_SUFFIX)
    on_first_rank(lambda: make_empty(partial))
    bare = bare_chunks(chunks)
    entries = _model_entries(bare)
    if optimizer is not None:
        entries["optimizer"] = optimizer_entries(optimizer, entries)
    # Not `together`: Megatron's save is full of collectives, and a rank that fails alone between them (a disk that is
    # full when rank 0 writes common.pt) would wait for ranks that wait for it. It leaves, and the launcher ends all.
    _write(entries, partial, final)
    on_first_rank(lambda: atomic.write_json(partial / STATE_FILE, state))
    together(lambda: [_write_own(_own_path(partial, name), data) for name, data in (own or {}).items()])
    files = [file for of_rank in together(lambda: _digest_own(partial)) for file in of_rank]
    identity = {**_identity(bare), "optimizer": optimizer_identity(bare[0].config, optimizer)}
    marker = {"format": FORMAT_VERSION, "core": core_version, **identity, "files": [asdict(file) for file in files]}
    on_first_rank(lambda: sealed.write(partial / MARKER_FILE, marker))
    on_first_rank(lambda: publish_directory(partial, final))
    files.append(_digest(final / MARKER_FILE))
    return [WrittenFile(str(prefix / file.path), file.size, file.sha256) for file in files]


def read_own(directory: str | Path, name: str) -> bytes:
    """What this rank passed as `own` when the checkpoint was written, as one that was loaded is known to hold it.

    Raises:
        IncompleteError: there is nothing of this rank.
    """
    path = _own_path(Path(directory), name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise IncompleteError(f"the checkpoint has nothing of this rank: {error.strerror}", where=str(path)) from error


def files_of(directory: str | Path, *, relative_to: str | Path) -> list[WrittenFile]:
    """Every file of a complete checkpoint with its size and SHA-256, from its marker."""
    final = Path(directory).resolve()
    files = [WrittenFile(**file) for file in read_marker(final)["files"]]
    files.append(_digest(final / MARKER_FILE))
    prefix = within(directory, relative_to)
    return [WrittenFile(str(prefix / file.path), file.size, file.sha256) for file in files]


def load_checkpoint(
    directory: str | Path, chunks: list[Module], optimizer: Any | None, *, verify: bool = True
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint and return its `state`. Collective.

    Args:
        directory: of a complete checkpoint.
        chunks: model chunks of the checkpoint's role and architecture, in any layout.
        optimizer: None to load the model only.
        verify: compare every file with its digest (each rank reads a share); sizes are always compared.

    Raises:
        IncompleteError: a marker or file is missing, truncated or damaged.
        MismatchError: another role, architecture, type, or optimizer layout; names both values.
    """
    final = Path(directory).resolve()
    bare = bare_chunks(chunks)
    together(lambda: _require_usable(final, bare, optimizer, verify))
    entries = _model_entries(bare)
    loader = None
    if optimizer is not None:
        loader = OptimizerLoader(optimizer, entries)
        entries["optimizer"] = loader.entries
    together(lambda: _fill(entries, final, bare, loader))
    return json.loads((final / STATE_FILE).read_text())


def read_state(directory: str | Path) -> dict[str, Any]:
    """A complete checkpoint's `state`, without loading anything else of it. Needs no process group.

    Raises:
        IncompleteError: there is no readable marker, or the state isn't what it says.
    """
    path = Path(directory) / STATE_FILE
    recorded = {file["path"]: file["sha256"] for file in read_marker(directory)["files"]}
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise IncompleteError(f"the checkpoint has no state: {error.strerror}", where=str(path)) from error
    if hashlib.sha256(data).hexdigest() != recorded.get(STATE_FILE):
        raise IncompleteError("the file differs from its digest", where=str(path), remedy="use an earlier checkpoint")
    return json.loads(data)


def read_marker(directory: str | Path) -> dict[str, Any]:
    """What a checkpoint says about itself. Needs no process group.

    Raises:
        IncompleteError: there is no readable marker.
    """
    path = Path(directory) / MARKER_FILE
    try:
        marker = sealed.read(path)
        if marker["format"] != FORMAT_VERSION:
            raise ValueError(f"format {marker['format']!r}, expected {FORMAT_VERSION}")
        return marker
    except (OSError, ValueError, KeyError) as error:
        raise IncompleteError(
            f"no complete checkpoint: {error}",
            where=str(path),
            remedy="use an earlier checkpoint; a directory without this marker was never finished",
        ) from error


def _own_path(directory: Path, name: str) -> Path:
    return directory / f"rank_{dist.get_rank()}_{name}"


def _write_own(path: Path, data: bytes) -> None:
    with naming(path):
        path.write_bytes(data)


def _write(entries: dict[str, Any], partial: Path, final: Path) -> None:
    try:
        dist_checkpointing.save(entries, str(partial), SynchronousSave("torch_dist", 1))
    except (OSError, RuntimeError, torch_checkpoint.CheckpointException) as error:
        free = shutil.disk_usage(partial).free
        if isinstance(error, RuntimeError) and free > LITTLE_SPACE:
            raise
        # On a full disk torch's archive writer speaks of positions in the file; the free space says what happened.
        causes = [str(cause) for cause, _ in getattr(error, "failures", {}).values()] or [str(error)]
        raise T1Error(
            f"the checkpoint can't be written, {free / 2**20:.1f} MiB are free there: {causes[0]}",
            where=str(final),
            remedy="free space or mend the file system, then start again; earlier checkpoints are intact",
        ) from error


def _chunk_names(chunks: list[Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _model_entries(chunks: list[Module]) -> dict[str, Any]:
    """Sharded state of every chunk, without `_extra_state`: it is empty here, and torch reads it as a free pickle."""
    entries = {}
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        state = chunk.sharded_state_dict()
        entries[name] = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    return entries


def _identity(chunks: list[Module]) -> dict[str, Any]:
    chunk = chunks[0]
    return {
        "role": chunk.role,
        "dtype": str(chunk.config.params_dtype).removeprefix("torch."),
        "architecture": asdict(chunk.architecture),
    }


def _digest(path: Path) -> WrittenFile:
    return WrittenFile(path.name, path.stat().st_size, atomic.sha256_file(path))


def _digest_own(directory: Path) -> list[WrittenFile]:
    """Files this rank wrote: `__N_n.distcp`, `rank_N_...`; rank 0 answers for those that belong to nobody too."""
    rank = dist.get_rank()
    own = (f"__{rank}_", f"rank_{rank}_")
    return [
        _digest(path)
        for path in sorted(directory.iterdir())
        if path.name.startswith(own) or (rank == 0 and not path.name.startswith(("__", "rank_")))
    ]


def _require_usable(directory: Path, chunks: list[Module], optimizer: Any | None, verify: bool) -> None:
    marker = read_marker(directory)
    _require_same_identity(directory, marker, chunks, optimizer)
    wrong = []
    for number, file in enumerate(marker["files"]):
        path = directory / Path(file["path"]).name
        if not path.is_file():
            wrong.append(f"{file['path']} is missing")
        elif path.stat().st_size != file["size"]:
            wrong.append(f"{file['path']} has {path.stat().st_size} bytes, expected {file['size']}")
        elif verify and number % dist.get_world_size() == dist.get_rank():
            if atomic.sha256_file(path) != file["sha256"]:
                wrong.append(f"{file['path']} differs from its digest")
    if wrong:
        raise IncompleteError(
            f"the checkpoint is damaged: {'; '.join(wrong[:5])}",
            where=str(directory),
            remedy="use an earlier checkpoint",
        )
    require_harmless_checkpoint(directory, {Path(file["path"]).name for file in marker["files"]})


def optimizer_differences(directory: str | Path, chunks: list[Module], optimizer: Any) -> list[str]:
    """Why a checkpoint's optimizer state can't be loaded into this optimizer, a line with both values each."""
    here, stored = optimizer_identity(bare_chunks(chunks)[0].config, optimizer), read_marker(directory)["optimizer"]
    if stored is None:
        return [f"optimizer: the checkpoint has none, here it is {here['kind']}"]
    return [
        f"optimizer {name}: the checkpoint has {stored.get(name)!r}, here it is {here.get(name)!r}"
        for name in sorted((here.keys() | stored.keys()) - {"steps"})
        if stored.get(name) != here.get(name)
    ]


def _require_same_identity(directory: Path, marker: dict, chunks: list[Module], optimizer: Any | None) -> None:
    where, here = str(directory / MARKER_FILE), _identity(chunks)
    require_equal_architecture(ArchitectureConfig(**marker["architecture"]), chunks[0].architecture, where=where)
    different = [
        f"{name}: the checkpoint has {marker[name]!r}, here it is {here[name]!r}"
        for name in ("role", "dtype")
        if marker[name] != here[name]
    ]
    others = list(different)
    if optimizer is not None:
        different += optimizer_differences(directory, chunks, optimizer)
    if different:
        raise MismatchError(
            "the checkpoint is of another kind: " + "; ".join(different),
            where=where,
            remedy="use the configuration that wrote it"
            + ("; or, with train.*.reset_optimizer=true, a new optimizer" if not others else ""),
        )


def _fill(entries: dict[str, Any], directory: Path, chunks: list[Module], loader: OptimizerLoader | None) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        loaded = dist_checkpointing.load(entries, str(directory))
    except (CheckpointingException, torch_checkpoint.CheckpointException, KeyError) as error:
        raise MismatchError(
            f"the checkpoint doesn't hold what this model and optimizer ask for: {error}",
            where=str(directory),
            remedy="use the configuration that wrote it",
        ) from error
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        missing, unexpected = chunk.load_state_dict(loaded[name], strict=False)
        wrong = [key for key in missing if not key.endswith("_extra_state")] + list(unexpected)
        if wrong:
            raise MismatchError(f"the checkpoint lacks or adds {', '.join(wrong[:5])}", where=str(directory))
    if loader is not None:
        loader.fill(loaded["optimizer"], read_marker(directory)["optimizer"])
