"""Critic warm-up that ends by itself: until the explained variance on tasks it isn't trained on stops rising."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from megatron_t1.config.schema import CriticConfig
from megatron_t1.errors import T1Error
from megatron_t1.ppo.statistics import explained_variance
from megatron_t1.ppo.sums import Sums
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, LossFunction
from megatron_t1.training.samples import Sample
from megatron_t1.training.scoring import score_groups, share
from megatron_t1.training.updates import update_epoch

FIELD = "held_out_values"


def split_tasks(samples: list[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """(held out, training): whole tasks, until at least `count` trajectories are held out.

    Tasks are taken in the order of a digest of their names, so the same ones stay out in every iteration.

    Raises:
        T1Error: nothing would be left to train on.
    """
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_task[sample.task].append(sample)
    held_out: set[str] = set()
    trajectories = 0
    for task in sorted(by_task, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if trajectories >= count:
            break
        held_out.add(task)
        trajectories += len(by_task[task])
    if trajectories < count or len(held_out) == len(by_task):
        raise T1Error(
            f"holding out {count} trajectories of whole tasks leaves none of {len(samples)} to train on",
            where="train.critic.warmup_holdout",
            remedy="lower it, or raise rollout.tasks_per_iteration",
        )
    return [s for s in samples if s.task in held_out], [s for s in samples if s.task not in held_out]


class StopRule:
    """When a series stops rising: no new best for `patience` epochs, after at least `minimum` of them."""

    def __init__(self, minimum: int, patience: int):
        self.minimum, self.patience = minimum, patience
        self.best, self.best_epoch, self.epochs = -math.inf, 0, 0

    def add(self, value: float) -> bool:
        """Whether the value of this epoch is the best yet; one that isn't a number never is."""
        self.epochs += 1
        if value > self.best:
            self.best, self.best_epoch = value, self.epochs
            return True
        return False

    @property
    def is_over(self) -> bool:
        return self.epochs >= self.minimum and self.epochs - self.best_epoch >= self.patience


def explained(samples: list[Sample], gamma: float, values: Callable[[Sample], np.ndarray]) -> float:
    """Explained variance of the discounted reward by `values`, trajectories weighted equally; NaN without variance."""
    targets, predicted, weights = [], [], []
    for sample in samples:
        count = sample.loss_tokens
        targets.append(sample.reward * gamma ** np.arange(count - 1, -1, -1, dtype=np.float64))
        predicted.append(values(sample))
        weights.append(np.full(count, 1.0 / count))
    arrays = (torch.from_numpy(np.concatenate(rows)) for rows in (predicted, targets, weights))
    return explained_variance(*arrays)


def task_means(samples: list[Sample]) -> dict[str, float]:
    """Mean reward of each task: what a predictor that knows the task, and nothing of what happened, can say."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.task].append(sample.reward)
    return {task: float(np.mean(own)) for task, own in rewards.items()}


def warm_up(
    context: Context, engine: Engine, samples: list[Sample], loss: LossFunction, save: Callable[[], None], *, seed: int
) -> tuple[list[Sums], dict[str, float], list[float]]:
    """Epochs over the training tasks until the held-out explained variance stops rising.

    Args:
        save: keeps the critic as it is now; called at every new best, so the last one kept is the best. Where the
            explained variance is never a number (all rewards equal) there is none.

    Returns:
        Sums of every optimizer step; metrics of the held-out tasks; the explained variance before and after each epoch.
    """
    options: CriticConfig = context.config.train.critic
    gamma = context.config.train.gae.gamma
    held_out, training = split_tasks(samples, options.warmup_holdout)
    groups = context.groups(held_out)

    def measure() -> float:
        score_groups(engine, groups, engine.values, "values", field=FIELD)
        share(context, held_out, groups, FIELD)
        return explained(held_out, gamma, lambda sample: sample.fields[FIELD])

    rule, steps, history = StopRule(options.warmup_min_epochs, options.warmup_patience), [], [measure()]
    for epoch in range(options.warmup_epochs):
        steps += update_epoch(context, engine, training, loss, seed=seed, epoch=epoch)
        history.append(measure())
        if rule.add(history[-1]):
            save()
        context.say(f"critic warm-up, epoch {epoch + 1}: held-out explained variance {history[-1]:.3f}")
        if rule.is_over:
            break
    means = task_means(held_out)
    return (
        steps,
        {
            "critic/held_out_trajectories": float(len(held_out)),
            "critic/held_out_explained_variance_before": history[0],
            "critic/held_out_explained_variance": history[rule.best_epoch or -1],
            "critic/held_out_explained_variance_task_mean": explained(
                held_out, gamma, lambda sample: np.full(sample.loss_tokens, means[sample.task])
            ),
            "critic/warmup_epochs": float(rule.epochs),
            "critic/warmup_best_epoch": float(rule.best_epoch),
        },
        history,
    )
