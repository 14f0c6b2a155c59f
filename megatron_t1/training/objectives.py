"""What one micro-batch adds to the loss of the actor and of the critic: sums over loss tokens, with metric sums.

Between the pure formulas (`ppo`) and whoever owns the training loop: the phases here, or a patched Megatron-LM
checkout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_t1.config.schema import ActorConfig, CriticConfig
from megatron_t1.ppo.losses import entropy_sum, kl_loss, policy_loss, value_loss
from megatron_t1.ppo.sums import Sums
from megatron_t1.training.batch import MicroBatch


def actor_objective(
    current: Mapping[str, torch.Tensor], batch: MicroBatch, options: ActorConfig
) -> tuple[torch.Tensor, Sums]:
    """PPO's clipped loss, plus the KL to the reference policy, minus the entropy bonus.

    Args:
        current: logprobs and entropy, float32 [n], of the model in training (`passes.read_logprobs`).
        batch: samples with the fields advantages and sampler_logprobs, and, where the options ask for them,
            trainer_logprobs (old_logprobs=recomputed), correction (`corrections.add_corrections`) and
            reference_logprobs (kl_coef > 0).
    """
    device = current["logprobs"].device
    old_name = "sampler_logprobs" if options.old_logprobs == "sampler" else "trainer_logprobs"
    total, sums = policy_loss(
        current["logprobs"],
        batch.loss_field(old_name, device),
        batch.loss_field("advantages", device),
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
        correction=batch.loss_field("correction", device) if options.correction != "none" else None,
    )
    entropies, entropy_sums = entropy_sum(current["entropy"])
    if options.entropy_coef:
        total = total - options.entropy_coef * entropies
    if options.kl_coef:
        reference = batch.loss_field("reference_logprobs", device)
        divergence, kl_sums = kl_loss(current["logprobs"], reference, kind=options.kl_estimator)
        total, sums = total + options.kl_coef * divergence, {**sums, **kl_sums}
    return total, {**sums, **entropy_sums}


def critic_objective(values: torch.Tensor, batch: MicroBatch, options: CriticConfig) -> tuple[torch.Tensor, Sums]:
    """The value loss.

    Args:
        values: float32 [n], of the model in training (`passes.read_values`).
        batch: samples with the fields old_values and returns.
    """
    return value_loss(
        values,
        batch.loss_field("old_values", values.device),
        batch.loss_field("returns", values.device),
        value_clip=options.value_clip,
        kind=options.loss,
        huber_delta=options.huber_delta,
    )
