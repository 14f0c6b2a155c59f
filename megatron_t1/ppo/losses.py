"""PPO's losses as sums over tokens.

Every function returns a sum, never a mean: the training step divides once by the global count of trainable tokens, so
that the result doesn't depend on micro-batches or ranks (verl#6957, miles#3231). An empty or fully masked micro-batch
gives a sum of zero with a graph, not 0/0 (NeMo-RL#158). Tokens of weight 0 may hold anything, also NaN: they are
replaced before any arithmetic, since 0 * NaN is NaN, in gradients too.

All token arrays are [N]; metrics are `sums.Sums`, (sum, count) pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_t1.errors import ConfigError
from megatron_t1.ppo.sums import Sums, weighted

MAX_LOG_RATIO = 20.0  # exp of it is finite in fp32; beyond it a ratio says nothing more
KL_ESTIMATORS = ("k1", "k2", "k3")
VALUE_LOSSES = ("mse", "huber")


def policy_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    weights: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), token by token.

    Args:
        new_logprobs: float32, of the policy in training; carries the gradient.
        old_logprobs: of the policy that PPO's ratio refers to.
        advantages: raw or normalised; larger is better.
        clip_low, clip_high: the ratio is clipped to 1 - clip_low ... 1 + clip_high (DAPO's asymmetric clip).
        dual_clip: 0, or c > 1: where the advantage is negative, the loss is at most c * |advantage| (arXiv 1912.09729).
        weights: 1 for tokens that count, 0 for others; fractions are weights.
        correction: factor for the sampler/trainer gap (`corrections`); without gradient. A rejected token (factor 0)
            adds nothing to the loss but stays in the count it is divided by.

    Returns:
        scalar loss sum, and metrics: ratio, clip_fraction (tokens beyond the side of the clip that their advantage
        pushes to, where this loss is flat), clip_fraction_low and _high, dual_clip_fraction, log_ratio_bounded (tokens
        whose log-ratio is beyond +-MAX_LOG_RATIO, where this loss is flat whatever the advantage), approx_kl (k3 of old
        to new), policy_loss.
    """
    if dual_clip and dual_clip <= 1.0:
        raise ConfigError(f"dual_clip is {dual_clip}, it must be 0 (off) or above 1", where="train.actor.dual_clip")
    weight, used = _weights(new_logprobs, weights)
    new, old = _cleaned(used, new_logprobs, 0.0), _cleaned(used, old_logprobs.detach(), 0.0)
    advantage = _cleaned(used, advantages.detach(), 0.0)
    log_ratio = new - old
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(used)
    if dual_clip:
        bound = -advantage * dual_clip
        dual = (advantage < 0) & (losses > bound)
        losses = torch.where(advantage < 0, torch.minimum(losses, bound), losses)
    if correction is not None:
        losses = losses * _cleaned(used, correction.detach(), 0.0)
    loss = (losses * weight).sum()
    with torch.no_grad():
        low = (ratio < 1.0 - clip_low) & (advantage < 0)
        high = (ratio > 1.0 + clip_high) & (advantage > 0)
        metrics = {
            "policy_loss": weighted(losses, weight),
            "ratio": weighted(ratio, weight),
            "clip_fraction": weighted(low | high, weight),
            "clip_fraction_low": weighted(low, weight),
            "clip_fraction_high": weighted(high, weight),
            "dual_clip_fraction": weighted(dual, weight),
            "log_ratio_bounded": weighted(~(log_ratio.abs() <= MAX_LOG_RATIO), weight),
            "approx_kl": weighted(kl_estimate(old, new, "k3"), weight),
        }
    return loss, metrics


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating KL").

    With r = log reference - log policy: k1 = -r (unbiased, can be negative), k2 = r**2 / 2 (its gradient is that of the
    KL), k3 = exp(r) - 1 - r (unbiased, never negative). k3 is constant beyond r = MAX_LOG_RATIO, where its exponential
    would drown all other tokens; k1 and k2 have no bound.
    """
    if kind not in KL_ESTIMATORS:
        raise ConfigError(f"KL estimator {kind!r}, known: {', '.join(KL_ESTIMATORS)}", where="train.actor.kl_estimator")
    r = reference_logprobs - logprobs
    if kind == "k1":
        return -r
    if kind == "k2":
        return 0.5 * r.square()
    r = r.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(r) - r


def kl_loss(
    logprobs: Tensor, reference_logprobs: Tensor, *, kind: str = "k3", weights: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """Sum over tokens of the KL estimate to the reference policy, masked before it is summed (slime#1370)."""
    weight, used = _weights(logprobs, weights)
    policy, reference = _cleaned(used, logprobs, 0.0), _cleaned(used, reference_logprobs.detach(), 0.0)
    estimates = kl_estimate(policy, reference, kind)
    return (estimates * weight).sum(), {"reference_kl": weighted(estimates, weight)}


def entropy_sum(entropy: Tensor, *, weights: Tensor | None = None) -> tuple[Tensor, Sums]:
    """Sum over tokens of the policy's entropy (nats); subtract entropy_coef times it from the loss."""
    weight, used = _weights(entropy, weights)
    cleaned = _cleaned(used, entropy, 0.0)
    return (cleaned * weight).sum(), {"entropy": weighted(cleaned, weight)}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    value_clip: float = 0.0,
    kind: str = "mse",
    huber_delta: float = 1.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """The critic's loss: 0.5 * error**2, or Huber's, per token.

    Args:
        values: of the critic in training; carries the gradient.
        old_values: when the returns were computed; used by the clip only.
        value_clip: 0: off. Otherwise a value that moved further than this from its old one gets no gradient that
            takes it further: the loss is the larger of the plain one and the one at old +- value_clip.
        kind: "mse" or "huber" (quadratic up to `huber_delta`, then linear).

    Returns:
        scalar loss sum, and metrics: value_loss, value, return, value_error (absolute), value_clip_fraction.
    """
    if kind not in VALUE_LOSSES:
        raise ConfigError(f"value loss {kind!r}, known: {', '.join(VALUE_LOSSES)}", where="train.critic.loss")
    weight, used = _weights(values, weights)
    value, target = _cleaned(used, values, 0.0), _cleaned(used, returns.detach(), 0.0)
    losses = _error_loss(value - target, kind, huber_delta)
    clipped = torch.zeros_like(used)
    if value_clip:
        old = _cleaned(used, old_values.detach(), 0.0)
        limited = _error_loss(old + (value - old).clamp(-value_clip, value_clip) - target, kind, huber_delta)
        clipped = limited.detach() > losses.detach()
        losses = torch.maximum(losses, limited)
    metrics = {
        "value_loss": weighted(losses, weight),
        "value": weighted(value, weight),
        "return": weighted(target, weight),
        "value_error": weighted((value - target).abs(), weight),
        "value_clip_fraction": weighted(clipped, weight),
    }
    return (losses * weight).sum(), metrics


def _error_loss(error: Tensor, kind: str, delta: float) -> Tensor:
    if kind == "mse":
        return 0.5 * error.square()
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def _weights(like: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 weights and which of them count."""
    weight = torch.ones_like(like, dtype=torch.float32) if weights is None else weights.detach().float()
    return weight, weight != 0


def _cleaned(used: Tensor, values: Tensor, fill: float) -> Tensor:
    """float32 values, with `fill` where they don't count: no gradient and no NaN gets through there."""
    return torch.where(used, values.float(), fill)
