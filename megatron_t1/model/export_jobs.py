"""What an export has to write, cut into jobs: each yields the blocks of some tensors, in the order of the file.

A job may be a collective of several ranks, of which one, its owner, gets the blocks. All ranks that share jobs have
them in the same order, and nothing but the job at hand is in memory besides the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_t1.model.binding import Bound
from megatron_t1.model.safetensors_io import SafetensorsDirectory, TensorHeader

Block = tuple[str, Tensor]


class Job(Protocol):
    tensors: list[TensorHeader]  # in the order in which their blocks come
    is_owner: bool

    def blocks(self) -> Iterator[Block]:
        """(tensor, its next rows) on the owner; nothing on other ranks, which must exhaust it all the same."""


@dataclass
class ParameterJob:
    """The tensors of one parameter, gathered over the ranks it is cut over."""

    item: Bound
    tensors: list[TensorHeader]

    @property
    def is_owner(self) -> bool:
        return dist.get_rank(self.item.group) == 0

    def blocks(self) -> Iterator[Block]:
        shards = _gather(self.item)
        if shards:
            for name, blocks in zip(self.item.source.names, self.item.source.packing.unpack(shards), strict=True):
                yield from ((name, block) for block in blocks)


@dataclass
class FusedExpertsJob:
    """One tensor that holds all experts of a layer: each expert-parallel rank in turn hands its own to the owner.

    Attributes:
        items: this rank's experts, in the order of their numbers.
        number: counts such tensors; the ranks own them in turn.
    """

    items: list[Bound]
    tensors: list[TensorHeader]
    number: int

    @property
    def _owner(self) -> int:
        """Expert-parallel rank."""
        return self.number % parallel_state.get_expert_model_parallel_world_size()

    @property
    def is_owner(self) -> bool:
        return self._is_first and parallel_state.get_expert_model_parallel_rank() == self._owner

    @property
    def _is_first(self) -> bool:
        """Whether this rank is the one of its expert-tensor-parallel group that the others hand their parts to."""
        return dist.get_rank(self.items[0].group) == 0

    def blocks(self) -> Iterator[Block]:
        group, here = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_model_parallel_rank()
        (tensor,) = self.tensors
        parts_of_one = dist.get_world_size(self.items[0].group)
        for rank in range(dist.get_world_size(group)):
            for item in self.items:  # every rank has as many experts, of the same shapes
                shards = _gather(item) if rank == here else []
                if not self._is_first:
                    continue
                if rank != self._owner:
                    if here == self._owner:
                        shards = [torch.empty_like(item.parameter) for _ in range(parts_of_one)]
                        for shard in shards:
                            dist.recv(shard, src=dist.get_global_rank(group, rank), group=group)
                    elif rank == here:
                        for shard in shards:
                            dist.send(shard, dst=dist.get_global_rank(group, self._owner), group=group)
                if here == self._owner:
                    (blocks,) = item.source.packing.unpack(shards)
                    yield from ((tensor.name, block) for block in blocks)


@dataclass
class CarryJob:
    """A tensor that training doesn't touch, as the template has it; its owner is the only rank that has the job."""

    template: SafetensorsDirectory
    tensors: list[TensorHeader]
    is_owner: bool = True

    def blocks(self) -> Iterator[Block]:
        for tensor in self.tensors:
            yield from ((tensor.name, block) for block in self.template.blocks(tensor.name))


def parameter_jobs(bound: list[Bound], types: dict[str, torch.dtype], dtype: torch.dtype) -> list[Job]:
    """Jobs for this rank's parameters, those of fused experts at the place of the first.

    Args:
        types: of tensors that are written in another type than `dtype`.
    """
    jobs: list[Job] = []
    fused: dict[str, FusedExpertsJob] = {}
    for item in bound:
        if not item.in_first_replica:
            continue
        source = item.source
        headers = [
            TensorHeader(name, shape, types.get(name, dtype))
            for name, shape in zip(source.names, source.shapes, strict=True)
        ]
        if source.slot is None:
            jobs.append(ParameterJob(item, headers))
        elif source.names[0] in fused:
            fused[source.names[0]].items.append(item)
        else:
            jobs.append(job := FusedExpertsJob([item], headers, len(fused)))
            fused[source.names[0]] = job
    for job in fused.values():
        job.items.sort(key=lambda item: item.source.slot)
    return jobs


def carry_jobs(template: SafetensorsDirectory, tensors: list[str], min_bytes: int) -> list[CarryJob]:
    """This rank's share of the tensors to carry over: consecutive ones, at least `min_bytes` while there are any."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    headers = [template.header(name) for name in tensors]
    share = max(min_bytes, -(-sum(header.bytes for header in headers) // ranks))
    jobs, before = [], 0
    for header in headers:
        if min(before // max(1, share), ranks - 1) == rank:
            jobs.append(CarryJob(template, [header]))
        before += header.bytes
    return jobs


def _gather(item: Bound) -> list[Tensor]:
    """The parameter's parts in rank order on the first rank of its group, nothing on the others."""
    local, size = item.parameter.detach().contiguous(), dist.get_world_size(item.group)
    if size == 1:
        return [local]
    first = dist.get_rank(item.group) == 0
    parts = [torch.empty_like(local) for _ in range(size)] if first else None
    dist.gather(local, parts, dst=dist.get_global_rank(item.group, 0), group=item.group)
    return parts or []
