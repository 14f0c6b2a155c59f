"""What one rank holds of one model through a whole training phase, in bytes. Needs neither torch nor Megatron.

Two parties fill in a `RankBytes`: the planner predicts it from the architecture and a layout, and the dry run
(`planner.dryrun`) measures it on the modules, gradient buffers and optimizer shards that Megatron builds. They must
be equal for every rank, so the rules by which Megatron lays out its buffers stand here once, as arithmetic:
`buffer_elements` and `shard_elements`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 64  # elements: where a parameter may begin in a buffer that the distributed optimizer shards
BUCKET_ALIGNMENT = 128  # elements: what a bucket's end is padded to, besides the number of ranks that share it


@dataclass(frozen=True)
class RankBytes:
    """One rank's part of one model (actor or critic), without activations.

    Attributes:
        rank: in the world of the training phase.
        dense_parameters: elements that all of tensor, pipeline and vocabulary splits leave here; equal on all ranks of
            a data- and context-parallel group.
        expert_parameters: elements of this rank's routed experts; equal on all ranks of an expert-data-parallel group.
        weight_bytes: parameters in the types they are computed with, with the padding of their buffers.
        gradient_bytes: the buffers that gradients are reduced in (float32), with their padding.
        optimizer_bytes: float32 master copies (not of parameters that are float32 themselves) and both Adam moments, of
            this rank's shard with the distributed optimizer, else of all its parameters.
    """

    rank: int
    dense_parameters: int
    expert_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters

    @property
    def static_bytes(self) -> int:
        """Weights, gradients and optimizer together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def buffer_spans(sizes: Iterable[int], data_ranks: int, *, distributed_optimizer: bool) -> tuple[list[range], int]:
    """(where each parameter lies, elements of the whole buffer) for the parameters of one gradient buffer.

    Megatron has one buffer for each model chunk, parameter type and kind (dense, expert), and fills it in the reverse
    order of the module's parameters (`_ParamAndGradBuffer` to core 0.17, `DistributedOptimizer.
    _compute_per_buffer_param_layout` after). Without overlapped reduction a buffer is one bucket.

    Args:
        sizes: elements of each parameter, in the module's order.
        data_ranks: ranks that shard the buffer: data x context for dense parameters, expert data for experts.
    """
    spans, end = [], 0
    for size in reversed(list(sizes)):
        start = _up(end, ALIGNMENT) if distributed_optimizer else end
        end = start + size
        spans.append(range(start, end))
    return spans[::-1], _up(end, math.lcm(data_ranks, BUCKET_ALIGNMENT)) if distributed_optimizer else end


def buffer_elements(sizes: Iterable[int], data_ranks: int, *, distributed_optimizer: bool) -> int:
    """Elements of one gradient buffer with its padding; arguments as in `buffer_spans`."""
    return buffer_spans(sizes, data_ranks, distributed_optimizer=distributed_optimizer)[1]


def shard_elements(sizes: Iterable[int], data_ranks: int, data_rank: int, *, distributed_optimizer: bool) -> int:
    """Elements whose optimizer state rank `data_rank` of `data_ranks` keeps; padding has none."""
    spans, total = buffer_spans(sizes, data_ranks, distributed_optimizer=distributed_optimizer)
    if not distributed_optimizer:
        return sum(map(len, spans))
    length = total // data_ranks
    first, last = data_rank * length, (data_rank + 1) * length
    return sum(max(0, min(span.stop, last) - max(span.start, first)) for span in spans)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
