"""Metrics that the training phases share."""

from __future__ import annotations

import numpy as np

from megatron_t1.training.engine import Engine
from megatron_t1.training.samples import SampleSet


def batch_metrics(data: SampleSet) -> dict[str, float]:
    rewards = np.array([sample.reward for sample in data.samples])
    return {
        "batch/trajectories": float(len(data.samples)),
        "batch/excluded": float(sum(data.excluded.values())),
        "batch/loss_tokens": float(data.loss_tokens),
        "batch/tokens": float(sum(len(sample.ids) for sample in data.samples)),
        "batch/mean_reward": float(rewards.mean()),
        "batch/reward_std": float(rewards.std()),
    }


def engine_timings(engine: Engine) -> dict[str, float]:
    """What the engine spent its time on, as parts of a phase's own timings: `engine/passes`, `engine/optimizer`, ..."""
    return {f"engine/{name}": seconds for name, seconds in engine.seconds.items()}
