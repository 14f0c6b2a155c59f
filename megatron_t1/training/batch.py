"""A micro-batch on this rank: packed tokens, routes and loss fields, all cut by one TokenLayout.

T_local: token rows of this context-parallel rank; N: loss tokens of the whole micro-batch (all context ranks).
The loss of token t is computed at the position before it, so `positions` index the row that predicts, `ordinals` the
loss token it predicts (index into the micro-batch's concatenated fields).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_t1.routing.padding import padding_routes
from megatron_t1.routing.replay import MicroBatchRoutes
from megatron_t1.training.samples import Sample
from megatron_t1.trajectory.layout import TokenLayout
from megatron_t1.trajectory.loss_view import loss_view
from megatron_t1.trajectory.packing import PackingPlan, SequenceCost, plan_packing
from megatron_t1.trajectory.routes import RouteShape

DUMMY_LENGTH = 2  # tokens of the zero-weight sequence given to a rank that has no work


@dataclass(frozen=True, kw_only=True)
class ReplayShape(RouteShape):
    """What the model expects of routes, and the expert-parallel size that padding rows are spread over."""

    expert_parallel: int


@dataclass
class MicroBatch:
    samples: list[Sample]
    layout: TokenLayout
    tokens: torch.Tensor  # int64 [1, T_local]
    position_ids: torch.Tensor  # int64 [1, T_local]
    positions: torch.Tensor  # int64 [n], rows of T_local with a loss
    ordinals: torch.Tensor  # int64 [n], loss tokens those rows predict
    targets: torch.Tensor  # int64 [n], their ids
    count: int  # N
    routes: MicroBatchRoutes | None

    def loss_field(self, name: str, device: torch.device) -> torch.Tensor:
        """float32 [n]: a field of the loss tokens of this rank, row for row with `positions`."""
        joined = np.concatenate([sample.fields[name] for sample in self.samples]) if self.samples else np.zeros(0)
        return torch.from_numpy(joined.astype(np.float32))[self.ordinals.cpu()].to(device)

    def per_sample(self, values: np.ndarray) -> list[np.ndarray]:
        """Split [N] numbers back into one array for each sample."""
        ends = np.cumsum([sample.loss_tokens for sample in self.samples])
        return np.split(values, ends[:-1]) if self.samples else []


def plan_samples(
    samples: Sequence[Sample],
    *,
    replicas: int,
    capacity: int,
    context_size: int,
    stream_multiple: int = 1,
    cost: SequenceCost | None = None,
    seed: int = 0,
) -> PackingPlan:
    """The packing plan of all data-parallel replicas; every process computes the same one. See `plan_packing`.

    Args:
        stream_multiple: what the layout pads a whole micro-batch to (`LayoutConfig.stream_multiple`). Only multiples of
            it are planned for, so that the padding never goes beyond the capacity.
    """
    return plan_packing(
        [len(sample.ids) for sample in samples],
        data_parallel=replicas,
        capacity=capacity - capacity % stream_multiple,
        multiple=TokenLayout.sequence_multiple(context_size),
        cost=cost,
        seed=seed,
        names=[sample.name for sample in samples],
    )


def fill_fields(
    batches: Sequence[MicroBatch], results: Sequence[dict[str, torch.Tensor]], name: str, *, field: str
) -> None:
    """Give every sample of `batches` what `passes.score` returned for it under `name`, as `fields[field]`."""
    for batch, result in zip(batches, results, strict=True):
        for sample, numbers in zip(batch.samples, batch.per_sample(result[name].numpy()), strict=True):
            sample.fields[field] = numbers


def lengths_of(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Tokens of each sequence of the micro-batch that `samples` make; none make the zero-weight one."""
    return tuple(len(sample.ids) for sample in samples) or (DUMMY_LENGTH,)


def build_micro_batch(
    samples: Sequence[Sample],
    *,
    layout_sizes: dict[str, int | bool],
    route_shape: ReplayShape | None,
    device: torch.device,
) -> MicroBatch:
    """Lay `samples` out for this rank. No samples: a zero-weight sequence that keeps collectives in step.

    Args:
        layout_sizes: context_size, context_rank, tensor_size, tensor_rank, sequence_parallel of this rank, and
            total_multiple where all micro-batches must have one shape.
        route_shape: given when routes are replayed; None leaves the routers alone.
    """
    samples = list(samples)
    ids = [sample.ids for sample in samples] or [np.zeros(DUMMY_LENGTH, np.int32)]
    masks = [sample.loss_mask for sample in samples] or [np.zeros(DUMMY_LENGTH, bool)]
    layout = TokenLayout(lengths_of(samples), **layout_sizes)

    view = loss_view(ids, masks, layout)

    def to(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        samples=samples,
        layout=layout,
        tokens=to(view.tokens.astype(np.int64))[None],
        position_ids=to(layout.position_ids.astype(np.int64))[None],
        positions=to(view.positions),
        ordinals=to(view.ordinals),
        targets=to(view.targets.astype(np.int64)),
        count=view.count,
        routes=None if route_shape is None else _routes(samples, layout, route_shape, device),
    )


def _routes(samples: list[Sample], layout: TokenLayout, shape: ReplayShape, device: torch.device) -> MicroBatchRoutes:
    """Recorded rows where there are any, spread padding rows in padding, the router's own choice elsewhere."""
    empty = (shape.num_moe_layers, shape.top_k)
    if samples:
        recorded = layout.local([sample.routes for sample in samples], fill=0)
        replayed = layout.local([sample.routed for sample in samples], fill=False)
    else:
        recorded = layout.local([np.zeros((DUMMY_LENGTH, *empty), shape.dtype)], fill=0)
        replayed = layout.local([np.zeros(DUMMY_LENGTH, bool)], fill=False)
    padding = layout.is_padding if samples else np.ones(len(replayed), bool)
    if padding.any():
        recorded, replayed = recorded.copy(), replayed | padding
        recorded[padding] = padding_routes(
            int(padding.sum()), shape.num_moe_layers, shape.num_experts, shape.top_k, shape.expert_parallel
        )
    rows, mask, valid = (
        torch.from_numpy(np.ascontiguousarray(layout.sequence_parallel_rows(part))).to(device)
        for part in (recorded, replayed, ~padding)
    )
    return MicroBatchRoutes(rows, mask, valid)
