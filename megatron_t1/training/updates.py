"""PPO's optimizer steps over one rollout: epochs, mini-batches of trajectories, one packing plan for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_t1.config.schema import ActorConfig, CriticConfig
from megatron_t1.errors import T1Error
from megatron_t1.ppo.sums import Sums, means, merge
from megatron_t1.timing import timed
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, LossFunction
from megatron_t1.training.progress import Progress
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
    first: int = 0,
) -> Iterator[Sums]:
    """One pass over the samples: an optimizer step for each mini-batch. The same for the same seed.

    The loss of a step is a sum over its loss tokens, divided by their number (train.loss_denominator=step) or by one
    number for the whole rollout, the mean over its steps (rollout): then a token weighs the same in every step.

    Args:
        parts: mini-batches of the pass; None: the role's own number.
        first: mini-batches to leave out, since they were taken before.

    Yields:
        Global sums of each step once it is taken, with `packing_fill` and `packing_imbalance` of its plan; of one that
        was skipped as `Engine.train_step` says.
    """
    options: ActorConfig | CriticConfig = engine.optimizer_config
    split = minibatches(len(samples), parts or options.minibatches, seed=seed, epoch=epoch)
    mean_tokens = sum(sample.loss_tokens for sample in samples) / len(split)
    for part in split[first:]:
        chosen = [samples[index] for index in part]
        with timed(engine.seconds, "packing"):
            plan = context.plan(chosen, seed=epoch)
        scale = 1.0
        if context.config.train.loss_denominator == "rollout":
            scale = sum(sample.loss_tokens for sample in chosen) / mean_tokens
        batches = engine.micro_batches(context.own_groups(plan, chosen))
        sums = engine.train_step(batches, loss, loss_scale=scale)
        if len(taken(sums)) == 1:
            sums["packing_fill"] = torch.tensor([plan.fill, 1.0], dtype=torch.float64)
            sums["packing_imbalance"] = torch.tensor([plan.imbalance, 1.0], dtype=torch.float64)
        yield sums


def run_epochs(
    context: Context,
    engine: Engine,
    samples: list[Sample],
    loss: LossFunction,
    progress: Progress,
    *,
    seed: int,
    epochs: int,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """PPO's epochs over one rollout, from where `progress` stands; it gets every step, and saves when it is due."""
    each = min(engine.optimizer_config.minibatches, len(samples))
    for epoch in range(progress.taken // each, epochs):
        first = progress.taken - epoch * each
        if not first:
            before_epoch(epoch)
        for sums in update_epoch(context, engine, samples, loss, seed=seed, epoch=epoch, first=first):
            progress.took(sums)
            if progress.taken < epochs * each:  # what follows the last one is the phase's own checkpoint
                progress.save_if_due(engine)


def taken(*steps: Sums) -> list[Sums]:
    """Those of the steps that weren't skipped."""
    return [sums for sums in steps if not sums["skipped"][0]]


def update_metrics(role: str, engine: Engine, steps: list[Sums]) -> dict[str, float]:
    """Means over the optimizer steps of an update, under the role's name, and how many there were and were skipped.

    Raises:
        T1Error: every step was skipped.
    """
    done = taken(*steps)
    if not done:
        raise T1Error(
            f"all {len(steps)} mini-batches of the phase were skipped: their losses or gradients aren't finite",
            where=f"train.{role}.nonfinite=skip",
            remedy="look at the rollout's log-probs and rewards, and at the model this phase started from",
        )
    found = {f"{role}/{name}": value for name, value in means(merge(done)).items() if name != "skipped"}
    return {
        **found,
        f"{role}/optimizer_steps": float(engine.optimizer_steps),
        f"{role}/skipped_steps": float(len(steps) - len(done)),
    }
