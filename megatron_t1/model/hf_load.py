"""Hugging Face safetensors -> Megatron chunks. Every rank reads only the slices it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.model.binding import HEAD_TENSOR, Bound, bind, expected_tensors, require_same_architecture
from megatron_t1.model.chunks import bare_chunks
from megatron_t1.model.collective import together
from megatron_t1.model.mapping import Rows
from megatron_t1.model.safetensors_io import SafetensorsDirectory


@dataclass
class LoadReport:
    """What `load_hf` did, over all ranks.

    Attributes:
        loaded: number of Hugging Face tensors that were used.
        newly_initialised: Megatron parameters that the checkpoint has nothing for.
        unused: tensors of the checkpoint that this role has no use for.
        converted: parameters whose type changed, e.g. {"float32 -> bfloat16": 61}; empty for a bit-exact load.
    """

    loaded: int = 0
    newly_initialised: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    converted: dict[str, int] = field(default_factory=dict)


def load_hf(chunks: list[Module], hf_dir: str | Path, role: str) -> LoadReport:
    """Fill the chunks of this rank from a Hugging Face directory. Collective over all ranks.

    A value model takes everything but the vocabulary projection; its head starts at zero and is reported as newly
    initialised, not searched for (slime#2259). A policy with tied embeddings ignores an lm_head that is there anyway.

    Args:
        chunks: as `build_model` returns them.
        hf_dir: config.json and safetensors.
        role: "policy" or "value", what the chunks were built as.

    Raises:
        MismatchError: the checkpoint's architecture, a shape or a storage type differs from the model's.
        IncompleteError: a file is damaged, tensors are missing, or there are some nobody uses; all are named.
    """
    directory, chunks = Path(hf_dir), bare_chunks(chunks)
    outcomes = together(lambda: _load_local(chunks, directory, role))
    used: set[str] = set().union(*(names for names, _, _, _ in outcomes))
    stored, expected = outcomes[0][1], expected_tensors(chunks[0])
    report = LoadReport(loaded=len(used), unused=sorted((stored - expected) & {HEAD_TENSOR}))
    converted: Counter[str] = Counter()
    for _, _, heads, conversions in outcomes:
        report.newly_initialised.extend(name for name in heads if name not in report.newly_initialised)
        converted.update(conversions)
    report.converted = dict(converted)
    _require_complete(directory, stored - set(report.unused), expected, used)
    return report


def _require_complete(directory: Path, stored: set[str], expected: set[str], used: set[str]) -> None:
    problems = [
        f"{len(names)} {label}: {', '.join(sorted(names)[:5])}"
        for label, names in (
            ("tensors of the checkpoint have no use", stored - used),
            ("tensors of the architecture were loaded by no rank", expected - used),
            ("tensors were loaded that the architecture doesn't have", used - expected),
        )
        if names
    ]
    if problems:
        raise IncompleteError(
            "model and checkpoint don't cover each other: " + "; ".join(problems),
            where=str(directory),
            remedy="give a checkpoint of exactly this architecture",
        )


def _load_local(chunks: list[Module], directory: Path, role: str) -> tuple[set[str], set[str], list[str], Counter[str]]:
    """(tensors used, tensors stored, head parameters, conversions) of this rank."""
    require_same_architecture(chunks, directory, role)
    bound, heads = bind(chunks)
    used: set[str] = set()
    converted: Counter[str] = Counter()
    with SafetensorsDirectory(directory) as tensors, torch.no_grad():
        missing = sorted({name for item in bound for name in item.source.names} - tensors.files.keys())
        if missing:
            raise IncompleteError(
                f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}",
                where=str(directory),
                remedy="give a complete checkpoint of this architecture",
            )
        for item in bound:
            value = _pack(item, tensors)
            if value.dtype != item.parameter.dtype:
                change = f"{value.dtype} -> {item.parameter.dtype}".replace("torch.", "")
                converted[change] += 1
            item.parameter.copy_(value)
            used.update(item.source.names)
        for _, parameter in heads:
            parameter.zero_()
        return used, set(tensors.files), [name for name, _ in heads], converted


def _pack(item: Bound, tensors: SafetensorsDirectory) -> Tensor:
    names, packing = item.source.names, item.source.packing
    size = dist.get_world_size(item.group)
    if isinstance(packing, Rows):  # a model may pad its vocabulary further than its ranks need
        packing = replace(packing, padded=item.parameter.shape[0] * size)
    for name, expected in zip(names, packing.shapes, strict=True):
        tensors.require_float(name)
        if tensors.shape(name) != expected:
            raise MismatchError(
                f"{name} has shape {list(tensors.shape(name))}, the architecture says {list(expected)}",
                where=str(tensors.directory),
                remedy="compare config.json with the weights",
            )
    value = packing.pack(
        lambda part, dimension, first, last: tensors.read(names[part], dimension, first, last),
        dist.get_rank(item.group),
        size,
    )
    if value.shape != item.parameter.shape:
        raise MismatchError(
            f"{item.name} has shape {list(item.parameter.shape)}, its tensors give {list(value.shape)}",
            where=", ".join(names),
            remedy="build the model from this checkpoint's config.json",
        )
    return value
