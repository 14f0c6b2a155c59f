"""The gap between sampler and trainer: how far apart their log-probs are, how often their routers chose differently."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_t1.ppo.losses import kl_estimate
from megatron_t1.ppo.sums import Sums, weighted

ROUTE_CHUNK = 16384  # tokens compared at a time: routes are small in memory only in their small dtype


def logprob_gap(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, weights: Tensor | None = None
) -> tuple[Sums, dict[str, Tensor]]:
    """Compare the log-probs of the same tokens under the same weights.

    Args:
        trainer_logprobs, sampler_logprobs: [N].
        weights: [N], 0 for tokens that don't count (they may hold NaN).

    Returns:
        sums: logprob_gap (mean |difference|, nats), sampler_kl (k3 of KL(sampler || trainer), nats), gap_above_tenth
        (share of tokens with |difference| > 0.1); and maxima over tokens, to be reduced by maximum: logprob_gap_max.
    """
    weight = torch.ones_like(trainer_logprobs) if weights is None else weights.detach()
    used = weight != 0
    trainer = torch.where(used, trainer_logprobs.detach().float(), 0.0)
    sampler = torch.where(used, sampler_logprobs.detach().float(), 0.0)
    difference = (trainer - sampler).abs()
    sums = {
        "logprob_gap": weighted(difference, weight),
        "sampler_kl": weighted(kl_estimate(sampler, trainer, "k3"), weight),
        "gap_above_tenth": weighted(difference > 0.1, weight),
    }
    worst = difference.max().double() if len(difference) else torch.zeros((), dtype=torch.float64, device=used.device)
    return sums, {"logprob_gap_max": worst}


def route_difference(routes: Tensor, other: Tensor, mask: Tensor) -> Sums:
    """Share of (token, layer) choices whose set of experts differs; the order inside the top-k doesn't matter.

    Args:
        routes, other: integer [T, L, K], the experts of each token in each MoE layer.
        mask: bool [T], tokens for which both are known.

    Returns:
        route_difference: over (token, layer) pairs; token_route_difference: over tokens with a difference in any layer;
        expert_difference: over (token, layer, k), experts of `routes` that `other` hasn't chosen.
    """
    if routes.shape != other.shape or routes.ndim != 3 or mask.shape != routes.shape[:1]:
        raise ValueError(
            f"routes {list(routes.shape)} and {list(other.shape)} with mask {list(mask.shape)} can't be compared"
        )
    pairs = tokens = experts = 0
    for rows in mask.nonzero().flatten().split(ROUTE_CHUNK):
        one, two = routes[rows].long(), other[rows].long()
        absent = (one.unsqueeze(-1) != two.unsqueeze(-2)).all(dim=-1)  # [rows, L, K]
        differs = absent.any(dim=-1)
        pairs += int(differs.sum())
        tokens += int(differs.any(dim=-1).sum())
        experts += int(absent.sum())
    count, layers, top_k = int(mask.sum()), routes.shape[1], routes.shape[2]
    found = {
        "route_difference": (pairs, count * layers),
        "token_route_difference": (tokens, count),
        "expert_difference": (experts, count * layers * top_k),
    }
    return {name: torch.tensor(pair, dtype=torch.float64) for name, pair in found.items()}
