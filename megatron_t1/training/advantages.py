"""From old values and rewards to what both losses need: advantages for the actor, returns for the critic."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_t1.config.schema import GaeConfig
from megatron_t1.ppo.gae import lambda_returns, length_adaptive_lambda
from megatron_t1.ppo.statistics import advantage_sums, explained_variance_of, explained_variance_sums, normalise
from megatron_t1.training.samples import Sample

VALUE_FIELDS = ("old_values", "advantages", "returns")  # what a critic leaves of each sample for both updates


def compute_advantages(
    samples: list[Sample],
    options: GaeConfig,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Fill `advantages` (for the actor) and `returns` (for the critic) of one replica's samples.

    The reward of an episode is paid on its last sampled token; nothing is bootstrapped, since a truncated but verified
    episode is terminal. Advantages are normalised over all replicas; the critic's returns keep the reward's scale.

    Args:
        samples: with `old_values`, and with `turn` where options.turn_level asks for it.
        group: the data-parallel replicas that hold the other samples; None: these are all.
        device: on which the group communicates.

    Returns:
        explained_variance of the old values (trajectories weighted equally), mean_return, mean_value, advantage_std,
        mean_lambda (of the actor, over trajectories).
    """
    lengths = torch.tensor([sample.loss_tokens for sample in samples], dtype=torch.int64)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    values = _joined(samples, "old_values")
    turns = _joined(samples, "turn") if options.turn_level else None
    lambda_actor = torch.full((len(samples),), options.lambda_actor, dtype=torch.float64)
    if options.length_adaptive_alpha > 0:
        lambda_actor = length_adaptive_lambda(lengths, options.length_adaptive_alpha)

    def returns_with(lambda_: float | torch.Tensor) -> torch.Tensor:
        return lambda_returns(values, lengths, rewards, gamma=options.gamma, lambda_=lambda_, turns=turns)

    advantages = returns_with(lambda_actor) - values
    targets = returns_with(options.lambda_critic)
    weights = (1.0 / lengths.double()).repeat_interleave(lengths)
    lambdas = torch.stack([lambda_actor.sum().double(), lengths.new_tensor(len(samples)).double()])
    sums = torch.cat([advantage_sums(advantages), explained_variance_sums(values, targets, weights), lambdas])
    if dist.is_initialized():
        sums = sums.to(device)
        dist.all_reduce(sums, group=group)
        sums = sums.cpu()
    advantage_totals, explained, lambdas = sums[:3], sums[3:8], sums[8:]
    advantages = normalise(advantages, options.advantages, advantage_totals)
    ends = np.cumsum(lengths.numpy())[:-1]
    for sample, own_advantages, own_targets in zip(
        samples, np.split(advantages.numpy(), ends), np.split(targets.numpy(), ends), strict=bool(samples)
    ):
        sample.fields["advantages"] = own_advantages
        sample.fields["returns"] = own_targets
    weight, target, _, error, _ = explained.tolist()
    count, total, squares = advantage_totals.tolist()
    return {
        "explained_variance": explained_variance_of(explained),
        "mean_return": target / weight,
        "mean_value": (target - error) / weight,
        "advantage_std": max(squares / count - (total / count) ** 2, 0.0) ** 0.5,
        "mean_lambda": float(lambdas[0] / lambdas[1]),
    }


def _joined(samples: list[Sample], name: str) -> torch.Tensor:
    """float32 [N]: a field of all samples; turn numbers (at most 65,535) are exact in it."""
    fields = (sample.fields[name].astype(np.float32) for sample in samples)
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *fields]))
