"""Hugging Face safetensors -> Megatron chunks. Every rank reads only the slices it holds, one parameter at a time.

Strict: the ranks together use every tensor of the checkpoint exactly once (shares are added up as fractions), every
parameter holds NaN before and finite numbers afterwards, and shapes and types are checked before a tensor is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.model.binding import Bound, bind, expected_tensors, require_same_architecture
from megatron_t1.model.chunks import bare_chunks
from megatron_t1.model.collective import together
from megatron_t1.model.mapping import WeightMapping
from megatron_t1.model.names import HEAD_TENSOR, names_in
from megatron_t1.model.packing import Shape, Whole
from megatron_t1.model.safetensors_io import BLOCK_ELEMENTS, SafetensorsDirectory


@dataclass
class LoadReport:
    """What `load_hf` did, over all ranks.

    Attributes:
        loaded: number of Hugging Face tensors that were used.
        newly_initialised: Megatron parameters that the checkpoint has nothing for.
        unused: tensors of the checkpoint that this role has no use for.
        carried: number of tensors that training doesn't touch (vision tower, multi-token prediction).
        converted: parameters whose type changed, e.g. {"float32 -> bfloat16": 61}; empty for a bit-exact load.
        inexact: norms that don't give back the bits that were read, because the model has them less 1.
    """

    loaded: int = 0
    newly_initialised: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    carried: int = 0
    converted: dict[str, int] = field(default_factory=dict)
    inexact: int = 0


@dataclass
class _Local:
    """What one rank did."""

    stored: set[str]  # the names in the checkpoint, from the first rank only
    shares: dict[str, Fraction] = field(default_factory=dict)  # of tensors, as this rank answers for them
    heads: list[str] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)
    inexact: int = 0


def load_hf(chunks: list[Module], hf_dir: str | Path, role: str) -> LoadReport:
    """Fill the chunks of this rank from a Hugging Face directory. Collective over all ranks.

    A value model takes everything but the vocabulary projection; its head starts at zero and is reported as newly
    initialised, not searched for (slime#2259). A policy with tied embeddings ignores an lm_head that is there anyway.

    Args:
        chunks: as `build_model` returns them.
        hf_dir: config.json and safetensors; of a text or a vision-language model, experts in one tensor or in many.
        role: "policy" or "value", what the chunks were built as.

    Raises:
        MismatchError: the checkpoint's architecture, a shape or a storage type differs from the model's.
        IncompleteError: a file is damaged, tensors are missing, hold no finite numbers, or are used by nobody or twice;
            all are named.
    """
    directory, chunks = Path(hf_dir), bare_chunks(chunks)
    outcomes = together(lambda: _load_local(chunks, directory, role))
    stored = outcomes[0].stored
    names = names_in(stored)
    expected = expected_tensors(chunks[0], names)
    shares: Counter[str] = Counter()
    report = LoadReport(unused=sorted((stored - expected) & {HEAD_TENSOR}))
    converted: Counter[str] = Counter()
    for outcome in outcomes:
        shares.update(outcome.shares)
        converted.update(outcome.converted)
        report.newly_initialised.extend(name for name in outcome.heads if name not in report.newly_initialised)
        report.inexact += outcome.inexact
    mapping = WeightMapping(chunks[0].architecture, names)
    carried = {name for name in stored if mapping.is_carried(name)}
    report.loaded, report.carried, report.converted = len(shares), len(carried), dict(converted)
    _require_complete(directory, stored - carried - set(report.unused), expected, shares)
    return report


def _require_complete(directory: Path, stored: set[str], expected: set[str], shares: dict[str, Fraction]) -> None:
    """Shares other than 1 are a defect of the mapping or of the layout; the rest is the checkpoint's fault."""
    partly = {name for name, share in shares.items() if share != 1}
    problems = [
        f"{len(names)} {label}: {', '.join(sorted(names)[:5])}"
        for label, names in (
            ("tensors of the checkpoint have no use", stored - shares.keys()),
            ("tensors of the architecture were loaded by no rank", expected - shares.keys()),
            ("tensors were loaded that the architecture doesn't have", shares.keys() - expected),
            ("tensors were loaded in part, or more than once", partly),
        )
        if names
    ]
    if problems:
        raise IncompleteError(
            "model and checkpoint don't cover each other: " + "; ".join(problems),
            where=str(directory),
            remedy="give a checkpoint of exactly this architecture",
        )


def _load_local(chunks: list[Module], directory: Path, role: str) -> _Local:
    require_same_architecture(chunks, directory, role)
    with SafetensorsDirectory(directory) as tensors, torch.no_grad():
        bound, heads = bind(chunks, names_in(tensors.files))
        missing = sorted({name for item in bound for name in item.source.names} - tensors.files.keys())
        if missing:
            raise IncompleteError(
                f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}",
                where=str(directory),
                remedy="give a complete checkpoint of this architecture",
            )
        for item in bound:  # what no assignment reaches stays NaN
            item.parameter.fill_(torch.nan)
        local = _Local(set(tensors.files) if dist.get_rank() == 0 else set())
        for item in bound:
            _load_parameter(item, tensors, local)
        for _, parameter in heads:
            parameter.zero_()
        local.heads = [name for name, _ in heads]
        _require_finite(bound, directory)
        return local


def _load_parameter(item: Bound, tensors: SafetensorsDirectory, local: _Local) -> None:
    source, packing, parameter = item.source, item.packing, item.parameter
    rank, size = dist.get_rank(item.group), dist.get_world_size(item.group)
    types = {_checked_type(name, shape, tensors) for name, shape in zip(source.names, source.shapes, strict=True)}

    def read(part: int, dimension: int, first: int, last: int) -> Tensor:
        return tensors.read(source.names[part], dimension, first, last, source.slot)

    value = packing.pack(read, rank, size)
    if value.shape != parameter.shape:
        raise MismatchError(
            f"{item.name} has shape {list(parameter.shape)}, its tensors give {list(value.shape)}",
            where=", ".join(source.names),
            remedy="build the model from this checkpoint's config.json",
        )
    parameter.copy_(value)
    if isinstance(packing, Whole) and packing.offset:
        ((restored,),) = packing.unpack([parameter])
        local.inexact += not torch.equal(restored, read(0, 0, 0, packing.shape[0]).float())
    for changed in types - {parameter.dtype}:
        local.converted[f"{changed} -> {parameter.dtype}".replace("torch.", "")] += 1
    if item.in_first_replica:
        share = packing.share(rank, size) / source.slots
        for name in source.names:
            local.shares[name] = local.shares.get(name, Fraction(0)) + share


def _checked_type(name: str, expected: Shape, tensors: SafetensorsDirectory) -> torch.dtype:
    """The type of a stored tensor, which must have the expected shape."""
    stored_type, shape = tensors.trained_type(name), tensors.shape(name)
    if shape != expected:
        raise MismatchError(
            f"{name} has shape {list(shape)}, the architecture says {list(expected)}",
            where=str(tensors.directory),
            remedy="compare config.json with the weights",
        )
    return stored_type


def _require_finite(bound: list[Bound], directory: Path) -> None:
    wrong = [item for item in bound if not _is_finite(item.parameter)]
    if wrong:
        names = [name for item in wrong for name in item.source.names]
        raise IncompleteError(
            f"{len(wrong)} parameters hold NaN or infinite numbers after loading: {', '.join(names[:5])}",
            where=str(directory),
            remedy="check the checkpoint: its numbers must be finite in the model's type",
        )


def _is_finite(tensor: Tensor) -> bool:
    """In blocks: the check of a whole vocabulary would need as much memory again, twice."""
    return all(bool(torch.isfinite(block).all()) for block in tensor.detach().flatten().split(BLOCK_ELEMENTS))
