"""Correcting for the gap between the policy that sampled and the trainer's idea of it.

The sampler (its own kernels, precision, routing) and the trainer give the same weights slightly different log-probs.
With the trainer's recomputed log-probs as PPO's old policy, each token is weighted by w = p_trainer,old / p_sampler,
bounded. With the sampler's log-probs as the old policy PPO's ratio already contains w, and correcting again would
count it twice: configuration refuses that combination. Factors have no gradient. A token that a band rejects gets
factor 0 and stays in the denominator of the loss: rejecting tokens lowers the weight of a batch, it doesn't raise that
of the others.

Sequence-level weights use the geometric mean: the plain product over 8,000 tokens has mean 0.06 where tokens have
0.9999 (NeMo-RL#2269).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_t1.errors import ConfigError
from megatron_t1.ppo.losses import MAX_LOG_RATIO
from megatron_t1.ppo.sums import Sums, weighted

CORRECTIONS = ("none", "truncated", "band", "sequence")


def importance_correction(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    *,
    kind: str,
    cap: float = 2.0,
    low: float = 0.5,
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Factor for each token's loss.

    Args:
        old_logprobs: [N], recomputed by the trainer with the weights that sampled.
        sampler_logprobs: [N], of the sampler.
        kind: "none": 1; "truncated": min(w, cap) (truncated importance sampling); "band": w where low <= w <= cap,
            else 0 (IcePop); "sequence": min(geometric mean of w over the trajectory, cap), for all its tokens.
        lengths: int [S], tokens of each trajectory, for "sequence".
        weights: [N], 0 for tokens that don't count.

    Returns:
        float32 [N], and metrics: correction (mean factor), correction_square (for `effective_sample_share`),
        correction_touched (share of tokens whose weight was bounded or rejected), correction_rejected (share with
        factor 0).
    """
    if kind not in CORRECTIONS:
        raise ConfigError(f"correction {kind!r}, known: {', '.join(CORRECTIONS)}", where="train.actor.correction")
    if kind == "band" and not 0 <= low < cap:
        raise ConfigError(f"the band {low} to {cap} is empty", where="train.actor.correction_low")
    weight = torch.ones_like(old_logprobs, dtype=torch.float32) if weights is None else weights.detach().float()
    gap = torch.where(weight != 0, old_logprobs.detach().float() - sampler_logprobs.detach().float(), 0.0)
    ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "none":
        factor = ratio = torch.ones_like(ratio)
    elif kind == "truncated":
        factor = ratio.clamp(max=cap)
    elif kind == "band":
        factor = torch.where((ratio >= low) & (ratio <= cap), ratio, 0.0)
    else:
        if lengths is None:
            raise ValueError("a sequence-level correction needs the lengths of the trajectories")
        ratio = geometric_ratios(gap, lengths, weight).repeat_interleave(lengths.to(gap.device))
        factor = ratio.clamp(max=cap)
    metrics = {
        "correction": weighted(factor, weight),
        "correction_square": weighted(factor.square(), weight),
        "correction_touched": weighted(factor != ratio, weight),
        "correction_rejected": weighted(factor == 0, weight),
    }
    return factor, metrics


def geometric_ratios(gap: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
    """float32 [S]: exp of the mean log-ratio of each trajectory's tokens; 1 for a trajectory without any that count."""
    lengths = lengths.to(gap.device, torch.int64)
    owner = torch.arange(len(lengths), device=gap.device).repeat_interleave(lengths)
    total = torch.zeros(len(lengths), dtype=torch.float64, device=gap.device)
    count = total.clone()
    total.index_add_(0, owner, (gap * weights).double())
    count.index_add_(0, owner, weights.double())
    mean = torch.where(count > 0, total / count, 0.0)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().float()


def effective_sample_share(sums: Sums) -> float:
    """Kish's effective sample size as a share of the tokens, (sum w)**2 / (n * sum w**2): 1 for equal factors."""
    total, count = sums["correction"].tolist()
    squares = float(sums["correction_square"][0])
    return total**2 / (count * squares) if count and squares else float("nan")
