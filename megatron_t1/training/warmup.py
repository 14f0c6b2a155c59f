"""Critic warm-up that ends by itself: until the explained variance on tasks it isn't trained on stops rising."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_t1.config.schema import CriticConfig, GaeConfig
from megatron_t1.errors import T1Error
from megatron_t1.ppo.gae import lambda_returns
from megatron_t1.ppo.statistics import explained_variance
from megatron_t1.ppo.sums import means, merge
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, LossFunction
from megatron_t1.training.progress import Progress
from megatron_t1.training.samples import Sample
from megatron_t1.training.scoring import score_groups, share
from megatron_t1.training.updates import taken, update_epoch

FIELD = "held_out_values"
NAME = "held_out_explained_variance"


def split_tasks(samples: list[Sample], count: int, share: float = 0.0) -> tuple[list[Sample], list[Sample]]:
    """(held out, training): whole tasks, at least `count` trajectories held out.

    A task's place in 0 to 1 is a digest of its name, whatever is played beside it. Tasks below `share` are held out in
    every iteration, so none of them is ever trained on; where they are too few, the next ones are too, which another
    iteration may train on.

    Raises:
        T1Error: nothing would be left to train on.
    """
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_task[sample.task].append(sample)
    held_out: set[str] = set()
    trajectories = 0
    places = {task: int.from_bytes(hashlib.sha256(task.encode()).digest()[:8]) / 2**64 for task in by_task}
    for task in sorted(by_task, key=places.__getitem__):
        if trajectories >= count and places[task] >= share:
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
    """When a series stops rising: no new best for `patience` values, after at least `minimum` of them.

    Args:
        before: the value before the first, the best so far (`best_at` 0); NaN: there is none.
    """

    def __init__(self, minimum: int, patience: int, before: float = math.nan):
        self.minimum, self.patience = minimum, patience
        self.best = -math.inf if math.isnan(before) else before
        self.best_at, self.count = 0, 0

    def add(self, value: float) -> bool:
        """Whether this value is the best yet; one that isn't a number never is."""
        self.count += 1
        if value > self.best:
            self.best, self.best_at = value, self.count
            return True
        return False

    @property
    def has_best(self) -> bool:
        """Whether any value so far was a number."""
        return self.best > -math.inf

    @property
    def is_over(self) -> bool:
        return self.count >= self.minimum and self.count - self.best_at >= self.patience


def discounted_rewards(samples: list[Sample], options: GaeConfig) -> list[np.ndarray]:
    """float32 [N] of each sample: what the critic's values are to explain, its lambda-return at lambda = 1.

    That is the reward, discounted as `options` say: from token to token, or from turn to turn.
    """
    lengths = torch.tensor([sample.loss_tokens for sample in samples])
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    turns = None
    if options.turn_level:
        turns = torch.from_numpy(np.concatenate([sample.fields["turn"].astype(np.int64) for sample in samples]))
    zeros = torch.zeros(int(lengths.sum()))
    targets = lambda_returns(zeros, lengths, rewards, gamma=options.gamma, lambda_=1.0, turns=turns)
    return np.split(targets.numpy(), np.cumsum(lengths.numpy())[:-1])


def explained(targets: list[np.ndarray], values: Iterable[np.ndarray]) -> float:
    """Explained variance of `targets` ([N] of each sample) by `values` ([N] or one number of each), or NaN.

    Trajectories are weighted equally. NaN where the targets don't vary.
    """
    predicted = [np.broadcast_to(value, own.shape) for value, own in zip(values, targets, strict=True)]
    weights = [np.full(len(own), 1.0 / len(own)) for own in targets]
    arrays = (torch.from_numpy(np.concatenate(rows).astype(np.float64)) for rows in (predicted, targets, weights))
    return explained_variance(*arrays)


def explained_by_tasks(samples: list[Sample], targets: list[np.ndarray]) -> float:
    """Explained variance by a predictor that knows each task's mean target, and nothing of what happened; or NaN.

    The means are those of these very samples, which explain too much where tasks have few attempts. So what they leave
    between trajectories is divided by its degrees of freedom, trajectories minus tasks: on average the result is that
    of the true means. What a target varies by inside a trajectory (gamma below 1) no mean of a task was fitted to, and
    it counts as it is. NaN where no task has two attempts.
    """
    own_means = np.array([own.mean(dtype=np.float64) for own in targets])
    by_task: dict[str, list[float]] = defaultdict(list)
    for sample, mean in zip(samples, own_means, strict=True):
        by_task[sample.task].append(float(mean))
    if len(by_task) == len(samples):
        return math.nan
    inside = 1.0 - explained(targets, own_means)  # shares of the targets' variance
    left = 1.0 - explained(targets, [np.mean(by_task[sample.task]) for sample in samples])
    return 1.0 - inside - (left - inside) * len(samples) / (len(samples) - len(by_task))


@dataclass
class WarmUp:
    """What a warm-up came to.

    Attributes:
        metrics: of the held-out tasks, and where the best critic was found.
        before_was_best: whether no step made the critic better than it was before the first.
    """

    metrics: dict[str, float]
    before_was_best: bool


def warm_up(
    context: Context,
    engine: Engine,
    held_out: list[Sample],
    training: list[Sample],
    loss: LossFunction,
    progress: Progress,
    *,
    seed: int,
    parts: int | None = None,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> WarmUp:
    """Epochs over the training tasks until the held-out explained variance stops rising, from where `progress` stands.

    It is measured every `train.critic.minibatches` optimizer steps and at the end of each epoch; minimum and patience
    are counted in epochs.

    Args:
        progress: gets every step, and in `history` an entry for each measurement: `step` (mini-batches of this
            warm-up), `epoch`, `held_out_explained_variance`, and the mean `value_loss` on the training tasks since the
            one before (which the first, before any step, has not). Every new best is saved, so the last one saved as
            such is the best; where no step makes a better one (`before_was_best`), or the explained variance is never a
            number (all rewards equal), there is none. Its `start` has the `optimizer_steps` before the first.
        parts: optimizer steps of an epoch; None: `train.critic.minibatches`, so there is one measurement an epoch.
        before_epoch: called with the number of each epoch before it begins.
    """
    options: CriticConfig = context.config.train.critic
    targets, every = discounted_rewards(held_out, context.config.train.gae), options.minibatches
    groups, history = context.groups(held_out), progress.history
    parts = min(parts or every, len(training))
    each = math.ceil(parts / every)  # measurements of an epoch

    def measured() -> float:
        score_groups(engine, groups, engine.values, "values", field=FIELD)
        share(context, held_out, groups, FIELD)
        return explained(targets, (sample.fields[FIELD] for sample in held_out))

    if not history:
        history.append({"step": 0, "epoch": 0.0, NAME: measured()})
    rule = StopRule(options.warmup_min_epochs * each, options.warmup_patience * each, before=history[0][NAME])
    for known in history[1:]:
        rule.add(known[NAME])
    for epoch in range(progress.taken // parts, options.warmup_epochs):
        if rule.is_over:
            break
        first = progress.taken - epoch * parts
        if not first:
            before_epoch(epoch)
        for done, sums in enumerate(
            update_epoch(context, engine, training, loss, seed=seed, epoch=epoch, parts=parts, first=first),
            start=first + 1,
        ):
            progress.took(sums)
            if done % every and done < parts:
                progress.save_if_due(engine)
                continue
            recent = means(merge(taken(*progress.steps[history[-1]["step"] :])))
            now = {"step": progress.taken, "epoch": epoch + done / parts, NAME: measured()}
            history.append({**now, "value_loss": recent.get("value_loss", math.nan)})
            if rule.add(now[NAME]):
                progress.save_best(engine)
            progress.save_if_due(engine)
            context.say(
                f"critic warm-up, epoch {now['epoch']:.3g} (step {progress.taken}): "
                f"held-out explained variance {now[NAME]:.3f}"
            )
            if rule.is_over:
                break
    best = history[rule.best_at if rule.has_best else -1]
    steps_of_best = progress.start["optimizer_steps"] + len(taken(*progress.steps[: best["step"]]))
    metrics = {
        "critic/held_out_trajectories": float(len(held_out)),
        f"critic/{NAME}_before": history[0][NAME],
        f"critic/{NAME}": best[NAME],
        f"critic/{NAME}_task_mean": explained_by_tasks(held_out, targets),
        "critic/optimizer_steps": float(steps_of_best),
        "critic/warmup_steps": float(progress.taken),
        "critic/warmup_epochs": history[-1]["epoch"],
        "critic/warmup_best_epoch": best["epoch"],
        "critic/warmup_stopped_rising": float(rule.has_best and rule.is_over),
    }
    return WarmUp(metrics, rule.has_best and rule.best_at == 0)
