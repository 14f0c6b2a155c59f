"""PPO's optimizer steps over one rollout: epochs, mini-batches of trajectories, one packing plan for each step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_t1.config.schema import ActorConfig, CriticConfig
from megatron_t1.ppo.sums import Sums
from megatron_t1.timing import timed
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, LossFunction
from megatron_t1.training.samples import Sample
from megatron_t1.trajectory.packing import minibatches


def update_epoch(
    context: Context,
    engine: Engine,
    samples: list[Sample],
    loss: LossFunction,
    *,
    seed: int,
    epoch: int,
    parts: int | None = None,
) -> Iterator[Sums]:
    """One pass over the samples: an optimizer step for each mini-batch. The same for the same seed.

    The loss of a step is a sum over its loss tokens, divided by their number (train.loss_denominator=step) or by one
    number for the whole rollout, the mean over its steps (rollout): then a token weighs the same in every step.

    Args:
        parts: mini-batches of the pass; None: the role's own number.

    Yields:
        Global sums of each step once it is taken, with `packing_fill` and `packing_imbalance` of its plan.
    """
    options: ActorConfig | CriticConfig = engine.optimizer_config
    split = minibatches(len(samples), parts or options.minibatches, seed=seed, epoch=epoch)
    mean_tokens = sum(sample.loss_tokens for sample in samples) / len(split)
    for part in split:
        chosen = [samples[index] for index in part]
        with timed(engine.seconds, "packing"):
            plan = context.plan(chosen, seed=epoch)
        scale = 1.0
        if context.config.train.loss_denominator == "rollout":
            scale = sum(sample.loss_tokens for sample in chosen) / mean_tokens
        batches = engine.micro_batches(context.own_groups(plan, chosen))
        sums = engine.train_step(batches, loss, loss_scale=scale)
        sums["packing_fill"] = torch.tensor([plan.fill, 1.0], dtype=torch.float64)
        sums["packing_imbalance"] = torch.tensor([plan.imbalance, 1.0], dtype=torch.float64)
        yield sums
