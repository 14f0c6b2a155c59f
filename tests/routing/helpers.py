"""Models, routes and comparisons of the replay tests, for every megatron-core."""

from __future__ import annotations

import pytest
import torch

from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.routing.slot import MicroBatchRoutes
from tests.tiny_model import ARCHITECTURE, megatron_version, tiny_config, tokens

E, K, L = ARCHITECTURE.num_experts, ARCHITECTURE.num_experts_per_tok, ARCHITECTURE.num_hidden_layers


def build(backend, recompute: str = "none", **overrides):
    from megatron_t1.model.build import build_model

    torch.manual_seed(3)
    chunks = build_model(tiny_config(recompute=recompute), backend, "value", **overrides)
    with torch.no_grad():
        chunks[0].output_layer.weight.normal_()
    return chunks[0].train()


def replay_of(model) -> RoutingReplay:
    return RoutingReplay([model], num_experts=E, top_k=K)


def foreign_routes(count: int, seed: int, layers: int = L) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(count, layers, E, generator=generator).argsort(dim=-1)[..., :K]
    return rows.to(torch.uint8)


def slot_of(routes: torch.Tensor, mask: torch.Tensor | None = None) -> MicroBatchRoutes:
    return MicroBatchRoutes(routes, torch.ones(len(routes), dtype=torch.bool) if mask is None else mask)


def forward_of(model, seed: int, sequences: int = 2, length: int = 16):
    ids, positions = tokens(sequences, length, seed)
    return lambda: model(ids, positions, None)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def core_release() -> tuple[int, int]:
    """(0, 16) for 0.16.1."""
    major, minor = megatron_version()[0].split(".")[:2]
    return int(major), int(minor)


def needs(release: tuple[int, int], what: str) -> None:
    """Skip a test of something that cores before `release` don't have."""
    if core_release() < release:
        pytest.skip(f"megatron-core {megatron_version()[0]} has no {what}; {'.'.join(map(str, release))} has")
