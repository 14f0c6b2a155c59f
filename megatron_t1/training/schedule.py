"""Learning rate as a function of a role's own optimizer-step counter (NeMo-RL#4213: never a shared counter)."""

from __future__ import annotations

import math

from megatron_t1.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, decay_steps: int | None = None) -> float:
    """Rate of optimizer step `step` (0-based): linear warm-up, then constant, cosine or linear decay.

    Args:
        decay_steps: overrides `config.decay_steps` (SFT knows its number of steps only when it has read its data).
    """
    total = config.decay_steps if decay_steps is None else decay_steps
    rate = config.lr
    if config.warmup_steps > 0:
        rate *= min(1.0, (step + 1) / config.warmup_steps)
    if config.decay == "constant" or total <= 0:
        return rate
    progress = min(1.0, max(0.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps)))
    if config.decay == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    return rate * max(config.min_lr_ratio, share)
