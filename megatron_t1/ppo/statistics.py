"""Statistics over the whole batch from sums that can be added up over ranks: normalised advantages, explained variance.

All sums are float64 and plain: add them over micro-batches, all-reduce them over exactly the ranks that hold different
tokens (data and context parallel; slime#2235), and only then derive the statistic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_t1.errors import ConfigError, T1Error

NORMALISATIONS = ("raw", "centred", "whitened")
EPSILON = 1e-8
LEAST_VARIANCE = 1e-12  # of the mean square: less is the rounding of sums, whatever the scale of the returns


def advantage_sums(advantages: Tensor) -> Tensor:
    """float64 [3]: count, sum, sum of squares."""
    exact = advantages.double()
    return torch.stack([exact.new_tensor(float(exact.numel())), exact.sum(), exact.square().sum()])


def normalise(advantages: Tensor, mode: str = "raw", sums: Tensor | None = None) -> Tensor:
    """Advantages as the actor's loss uses them.

    Args:
        advantages: [N] of sampled tokens.
        mode: "raw": unchanged, the reward scale is fixed and means something; "centred": minus the mean; "whitened":
            also divided by the standard deviation.
        sums: `advantage_sums` of the global batch; None: of these advantages.

    Returns:
        float32 [N].

    Raises:
        ConfigError: an unknown mode.
        T1Error: a mean over no tokens, or sums that aren't finite.
    """
    if mode not in NORMALISATIONS:
        raise ConfigError(f"advantages are {mode!r}, known: {', '.join(NORMALISATIONS)}", where="train.gae.advantages")
    if mode == "raw":
        return advantages.float()
    count, total, squares = (advantage_sums(advantages) if sums is None else sums.double()).tolist()
    if not (count > 0 and total - total == 0 and squares - squares == 0):
        raise T1Error(f"advantages can't be {mode}: {count:.0f} tokens, sum {total}, sum of squares {squares}")
    mean = total / count
    centred = advantages.double() - mean
    if mode == "whitened":
        centred /= max(squares / count - mean**2, 0.0) ** 0.5 + EPSILON
    return centred.float()


def explained_variance_sums(values: Tensor, returns: Tensor, weights: Tensor | None = None) -> Tensor:
    """float64 [5]: sums of weight, weighted return, its square, weighted error (return - value), its square."""
    target = returns.detach().double()
    weight = torch.ones_like(target) if weights is None else weights.detach().double()
    used = weight != 0
    target, error, weight = target[used], (returns.detach().double() - values.detach().double())[used], weight[used]
    moments = [weight, weight * target, weight * target.square(), weight * error, weight * error.square()]
    return torch.stack([moment.sum() for moment in moments])


def explained_variance_of(sums: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) from `explained_variance_sums`; NaN when the returns don't vary."""
    weight, target, target_square, error, error_square = sums.tolist()
    if weight <= 0:
        return float("nan")
    variance = target_square / weight - (target / weight) ** 2
    if variance <= LEAST_VARIANCE * target_square / weight:
        return float("nan")
    return 1.0 - (error_square / weight - (error / weight) ** 2) / variance


def explained_variance(values: Tensor, returns: Tensor, weights: Tensor | None = None) -> float:
    """How much of the returns' variance the values explain: 1 all, 0 as much as a constant; NaN without any variance.

    Args:
        values, returns: [N].
        weights: [N]; 1 / (sampled tokens of its trajectory) makes trajectories count equally.
    """
    return explained_variance_of(explained_variance_sums(values, returns, weights))
