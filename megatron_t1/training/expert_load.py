"""How evenly the replayed experts load the model: sums over all ranks, from the counts of RoutingReplay."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_t1.ppo.sums import Sums
from megatron_t1.routing.replay import RoutingReplay


def expert_load(replay: RoutingReplay, *, expert_parallel: int, device: torch.device) -> Sums:
    """The load since the last call, as [sum over layers, layers]; {} for a model without experts. Collective.

    Returns:
        expert_load_max: tokens of the busiest expert over the mean expert's.
        expert_rank_load_max: tokens of the busiest expert-parallel rank over the mean rank's. Ranks wait for it.
        experts_unused: share of experts that no token took.
    """
    if not replay.layers:
        return {}
    table = torch.zeros(len(replay.layers), replay.num_experts, dtype=torch.float64, device=device)
    for layer, counts in replay.take_load().items():
        table[replay.layers.index(layer)] = counts
    dist.all_reduce(table)
    table = table[table.sum(1) > 0].cpu()
    ranks = table.view(len(table), expert_parallel, -1).sum(2)
    per_layer = {
        "expert_load_max": table.amax(1) / table.mean(1),
        "expert_rank_load_max": ranks.amax(1) / ranks.mean(1),
        "experts_unused": (table == 0).double().mean(1),
    }
    return {
        name: torch.stack([values.sum(), torch.tensor(float(len(table)), dtype=torch.float64)])
        for name, values in per_layer.items()
    }
