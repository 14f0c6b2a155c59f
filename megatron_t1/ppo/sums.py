"""Metrics as sums and counts. A mean of means depends on how a batch was split; sums don't (trl#6380).

A metric is a float64 tensor [2] = (sum, count). Micro-batches are merged by addition, ranks by one all-reduce, and the
division happens once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

Sums = dict[str, Tensor]


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """float64 [2]: (sum of weights * values, sum of weights) over all elements; values of weight 0 may be anything."""
    values, weights = values.detach().double(), weights.detach().double()
    total = torch.where(
        weights != 0, values * weights, torch.zeros((), dtype=torch.float64, device=values.device)
    ).sum()
    return torch.stack([total, weights.sum()])


def merge(parts: Iterable[Mapping[str, Tensor]]) -> Sums:
    """Add up the sums of several micro-batches; a metric that some lack is added where it is."""
    merged: Sums = {}
    for part in parts:
        for name, pair in part.items():
            merged[name] = merged[name] + pair if name in merged else pair.clone()
    return merged


def reduce(sums: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> Sums:
    """Add up over the ranks of `group` (None: the default group) in one all-reduce; all ranks hold the same names."""
    if not sums or not dist.is_initialized():
        return dict(sums)
    names = sorted(sums)
    table = torch.stack([sums[name] for name in names])
    dist.all_reduce(table, group=group)
    return dict(zip(names, table.unbind(), strict=True))


def means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """sum / count of each metric; a metric that nothing was counted for is left out, it has no mean."""
    pairs = {name: pair.tolist() for name, pair in sums.items()}
    return {name: total / count for name, (total, count) in pairs.items() if count}
