"""Critic warm-up that ends by itself: until the explained variance on tasks it isn't trained on stops rising."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_t1.config.schema import CriticConfig
from megatron_t1.errors import T1Error
from megatron_t1.ppo.statistics import explained_variance
from megatron_t1.ppo.sums import Sums, means, merge
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, LossFunction
from megatron_t1.training.samples import Sample
from megatron_t1.training.scoring import score_groups, share
from megatron_t1.training.updates import update_epoch

FIELD = "held_out_values"
NAME = "held_out_explained_variance"


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
            remedy="lower it, or roll out more tasks",
        )
    return [s for s in samples if s.task in held_out], [s for s in samples if s.task not in held_out]


class StopRule:
    """When a series stops rising: no new best for `patience` values, after at least `minimum` of them."""

    def __init__(self, minimum: int, patience: int):
        self.minimum, self.patience = minimum, patience
        self.best, self.best_at, self.count = -math.inf, 0, 0

    def add(self, value: float) -> bool:
        """Whether this value is the best yet; one that isn't a number never is."""
        self.count += 1
        if value > self.best:
            self.best, self.best_at = value, self.count
            return True
        return False

    @property
    def is_over(self) -> bool:
        return self.count >= self.minimum and self.count - self.best_at >= self.patience


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


def explained_by_tasks(samples: list[Sample], gamma: float) -> float:
    """Explained variance of a predictor that knows each task's mean reward, and nothing of what happened; or NaN.

    The means are those of these very samples, which explain too much where tasks have few attempts. What they leave is
    therefore divided by its degrees of freedom, trajectories minus tasks: on average the result is that of the true
    means. NaN where no task has two attempts.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.task].append(sample.reward)
    if len(rewards) == len(samples):
        return math.nan
    task_means = {task: float(np.mean(own)) for task, own in rewards.items()}
    found = explained(samples, gamma, lambda sample: np.full(sample.loss_tokens, task_means[sample.task]))
    return 1.0 - (1.0 - found) * len(samples) / (len(samples) - len(rewards))


@dataclass
class WarmUp:
    """What a warm-up came to.

    Attributes:
        steps: sums of every optimizer step.
        metrics: of the held-out tasks, and where the best critic was found.
        history: one entry for each measurement: `step` (optimizer steps of this warm-up), `epoch`,
            `held_out_explained_variance`, and the mean `value_loss` on the training tasks since the one before (which
            the first, before any step, has not).
    """

    steps: list[Sums]
    metrics: dict[str, float]
    history: list[dict[str, float]]


def warm_up(
    context: Context,
    engine: Engine,
    held_out: list[Sample],
    training: list[Sample],
    loss: LossFunction,
    save: Callable[[], None],
    *,
    seed: int,
    parts: int | None = None,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> WarmUp:
    """Epochs over the training tasks until the held-out explained variance stops rising.

    It is measured every `train.critic.minibatches` optimizer steps and at the end of each epoch; minimum and patience
    are counted in epochs.

    Args:
        save: keeps the critic as it is now; called at every new best, so the last one kept is the best. Where the
            explained variance is never a number (all rewards equal) there is none.
        parts: optimizer steps of an epoch; None: `train.critic.minibatches`, so there is one measurement an epoch.
        before_epoch: called with the number of each epoch before it begins.
    """
    options: CriticConfig = context.config.train.critic
    gamma, every = context.config.train.gae.gamma, options.minibatches
    groups = context.groups(held_out)
    parts = min(parts or every, len(training))
    each = math.ceil(parts / every)  # measurements of an epoch
    rule = StopRule(options.warmup_min_epochs * each, options.warmup_patience * each)
    steps: list[Sums] = []

    def measured() -> float:
        score_groups(engine, groups, engine.values, "values", field=FIELD)
        share(context, held_out, groups, FIELD)
        return explained(held_out, gamma, lambda sample: sample.fields[FIELD])

    history = [{"step": 0, "epoch": 0.0, NAME: measured()}]
    for epoch in range(options.warmup_epochs):
        before_epoch(epoch)
        for done, sums in enumerate(
            update_epoch(context, engine, training, loss, seed=seed, epoch=epoch, parts=parts), start=1
        ):
            steps.append(sums)
            if done % every and done < parts:
                continue
            recent = steps[history[-1]["step"] :]
            now = {"step": len(steps), "epoch": epoch + done / parts, NAME: measured()}
            history.append({**now, "value_loss": means(merge(recent))["value_loss"]})
            if rule.add(now[NAME]):
                save()
            context.say(
                f"critic warm-up, epoch {now['epoch']:.3g} (step {len(steps)}): "
                f"held-out explained variance {now[NAME]:.3f}"
            )
            if rule.is_over:
                break
        if rule.is_over:
            break
    best = history[rule.best_at or -1]
    metrics = {
        "critic/held_out_trajectories": float(len(held_out)),
        f"critic/{NAME}_before": history[0][NAME],
        f"critic/{NAME}": best[NAME],
        f"critic/{NAME}_task_mean": explained_by_tasks(held_out, gamma),
        "critic/warmup_epochs": history[-1]["epoch"],
        "critic/warmup_best_epoch": best["epoch"] if rule.best_at else 0.0,
        "critic/warmup_stopped_rising": float(rule.is_over),
    }
    return WarmUp(steps, metrics, history)
