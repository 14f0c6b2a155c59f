"""Functions that run in several processes; see tests.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model.workers import model_and_optimizer, parallel, train_steps
from tests.tiny_model import ARCHITECTURE

TOKENS = 16


def losses_with_replay(directory: str, layout: dict[str, Any], steps: int = 3) -> list[float]:
    """Train through Megatron's own schedule, every sequence with routes of its own, half of its rows replayed."""
    import torch
    from megatron.core import parallel_state as state

    from megatron_t1.model.convert import load_hf
    from megatron_t1.routing.replay import MicroBatchRoutes, RoutingReplay

    experts, top_k = ARCHITECTURE.num_experts, ARCHITECTURE.num_experts_per_tok
    with parallel(layout) as (backend, parsed):
        wrapped, optimizer = model_and_optimizer(backend, parsed, "policy")
        load_hf(wrapped, Path(directory) / "hf", "policy")
        replay = RoutingReplay(wrapped, num_experts=experts, top_k=top_k)
        assert replay.layers == [1, 2, 3, 4]

        def run(chunk, row, forward):
            generator = torch.Generator().manual_seed(row)
            routes = torch.rand(TOKENS, 4, experts, generator=generator).argsort(-1)[..., :top_k].to(torch.uint8)
            mask = torch.rand(TOKENS, generator=generator) < 0.5
            rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
            cut = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)  # the sequence-parallel cut
            return replay.run(chunk, MicroBatchRoutes(routes[cut], mask[cut]), forward)

        return train_steps(wrapped, optimizer, range(steps), runner=run)
