"""The critic phase: values under the current critic, advantages for the actor, then the value update.

Reads  RUN/rollouts/iter_i and critic i (or, for i = 0, the start model without its head).
Writes RUN/values/iter_i (old values, advantages, returns) and critic i + 1. The actor's files are not touched.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_t1.model.convert import load_hf
from megatron_t1.model.heads import set_value_bias
from megatron_t1.phase import PhaseResult, WrittenFile
from megatron_t1.ppo.sums import Sums, means
from megatron_t1.training.advantages import VALUE_FIELDS, compute_advantages
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, LossFunction
from megatron_t1.training.objectives import critic_objective
from megatron_t1.training.progress import Progress
from megatron_t1.training.results import batch_metrics, engine_timings
from megatron_t1.training.samples import Sample, SampleSet, attach, load_rollouts
from megatron_t1.training.scoring import score_groups, share
from megatron_t1.training.updates import run_epochs, taken, update_metrics
from megatron_t1.training.warmup import split_tasks, warm_up
from megatron_t1.trajectory.sidecar import read_sidecar

# Of a warm-up's tasks, how many more than asked for stay out for good, so that an iteration rarely has too few; ours.
HELD_OUT_MARGIN = 1.25
TARGETS = ("old_values", "returns")  # fields that follow the critic of a warm-up


def run_critic(context: Context) -> PhaseResult:
    config = context.config
    with context.timed("load_rollouts"):
        data = load_rollouts(context.paths.rollouts(context.iteration), config, context.contract_facts())
    keeps_best = context.counters.is_warmup and config.train.critic.warmup_holdout > 0
    progress = Progress(context, "critic", "critic", origin(context), data.samples, keeps_best=keeps_best)
    with context.timed("load_model"):
        engine = progress.resumed(lambda: new_critic(context), data.samples)
    if engine is None:
        engine = _begin(context, data, progress)
    with context.timed("update"):
        found = _update(context, engine, data, progress)
    version = context.counters.critic + 1
    files = leave(context, engine, progress, context.paths.checkpoint("critic", version), version)
    return PhaseResult(
        phase="critic",
        iteration=context.iteration,
        metrics={**batch_metrics(data), **progress.start["metrics"], **found},
        timings_s={**context.timings_s, **engine_timings(engine)},
        outputs=[*files, *context.written(context.paths.values(context.iteration))],
        details={
            "excluded": data.excluded,
            "newly_initialised": progress.start["newly_initialised"],
            "warmup": progress.history,
            "skipped": engine.skipped,
        },
    )


def _begin(context: Context, data: SampleSet, progress: Progress) -> Engine:
    """The critic before its first step, and what the updates need to know of it as it is then: RUN/values/iter_i."""
    config, directory = context.config, context.paths.values(context.iteration)
    with context.timed("load_model"):
        engine = new_critic(context)
        fresh = _load(context, engine, data.samples)
    with context.timed("values"):
        own = score_values(context, engine, data.samples)
    with context.timed("advantages"):
        statistics = compute_advantages(own, config.train.gae, group=context.replicas, device=context.backend.device)
    with context.timed("write_values"):
        context.write_fields(directory, own, VALUE_FIELDS)
        # Mini-batches are packed anew, so a sample may move to another rank: every rank reads all of them back.
        attach(data.samples, read_sidecar(directory), VALUE_FIELDS)
        progress.keep(data.samples, VALUE_FIELDS, directory=directory)
    metrics = {f"critic/{name}": value for name, value in statistics.items()}
    progress.began(metrics=metrics, newly_initialised=fresh, optimizer_steps=engine.optimizer_steps)
    return engine


def origin(context: Context) -> Path:
    """Where the critic of this phase is read from, as it is before the first step."""
    if context.counters.critic:
        return context.paths.checkpoint("critic", context.counters.critic)
    return Path(context.config.train.critic.start or context.start_model)


def _load(context: Context, engine: Engine, samples: list[Sample]) -> list[str]:
    if context.counters.critic == 0:
        return load_start(context, engine, samples)
    engine.load(origin(context))
    return []


def leave(context: Context, engine: Engine, progress: Progress, final: Path, version: int) -> list[WrittenFile]:
    """The checkpoint that the phase leaves: the best critic of a warm-up that knows one, or else the one at hand."""
    with context.timed("save"):
        if progress.best is not None:
            return progress.publish_best(final)
        return engine.save(final, version, relative_to=context.paths.root)


def new_critic(context: Context) -> Engine:
    """A critic's model and optimizer, without weights that mean anything."""
    return Engine.of_role(context.config, context.backend, "value")


def load_start(context: Context, engine: Engine, samples: list[Sample]) -> list[str]:
    """Make the critic what it is before its first step; the names of those that come from nowhere.

    From the checkpoint `train.critic.start`, or from the start model, whose head is another's (the bias then from these
    samples, as `train.critic.head_bias` says).

    Raises:
        IncompleteError: a file is missing or damaged.
        MismatchError: another architecture; or `train.critic.start` is no critic.
    """
    options = context.config.train.critic
    if options.start:
        engine.load_weights(Path(options.start))
        context.say(f"critic started from {options.start}")
        return []
    report = load_hf(engine.chunks, context.start_model, role="value")
    if options.head_bias == "mean_return":
        set_value_bias(engine.chunks, float(np.mean([sample.reward for sample in samples])))
    engine.begin_anew()
    context.say(f"critic started from {context.start_model}; newly initialised: {', '.join(report.newly_initialised)}")
    return report.newly_initialised


def critic_loss(engine: Engine) -> LossFunction:
    """The critic's loss of one micro-batch."""

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return critic_objective(engine.values(output, batch)["values"], batch, engine.optimizer_config)

    return loss


def score_values(context: Context, engine: Engine, samples: list[Sample]) -> list[Sample]:
    """Fill `old_values` of this replica's share of the samples, and return that share."""
    groups = context.groups(samples)
    score_groups(engine, groups, engine.values, "values", field="old_values")
    return [sample for group in groups for sample in group]


def _update(context: Context, engine: Engine, data: SampleSet, progress: Progress) -> dict[str, float]:
    """Metrics of the update."""
    options, is_warmup = context.config.train.critic, context.counters.is_warmup
    loss, seed = critic_loss(engine), context.config.run.seed + 1000 * context.iteration

    def renew(samples: list[Sample], epoch: int) -> None:
        """In a warm-up the targets follow the critic; PPO's epochs all keep those of the rollout's policy."""
        if is_warmup and epoch and needs_new_targets(context):
            fill_targets(context, engine, samples, progress)

    if is_warmup and options.warmup_holdout:
        rollout = context.config.rollout
        below = HELD_OUT_MARGIN * options.warmup_holdout / (rollout.tasks_per_iteration * rollout.samples_per_task)
        held_out, training = split_tasks(data.samples, options.warmup_holdout, below)
        found = warm_up(
            context,
            engine,
            held_out,
            training,
            loss,
            progress,
            seed=seed,
            before_epoch=lambda epoch: renew(training, epoch),
        )
        if found.before_was_best:
            _load(context, engine, data.samples)
        return {**critic_metrics(engine, progress.steps), **found.metrics}
    run_epochs(
        context,
        engine,
        data.samples,
        loss,
        progress,
        seed=seed,
        epochs=options.warmup_epochs if is_warmup else options.epochs,
        before_epoch=lambda epoch: renew(data.samples, epoch),
    )
    return critic_metrics(engine, progress.steps)


def needs_new_targets(context: Context) -> bool:
    """Whether the critic's targets, or the values its loss is clipped around, depend on the critic itself."""
    return context.config.train.gae.lambda_critic < 1 or context.config.train.critic.value_clip > 0


def fill_targets(context: Context, engine: Engine, samples: list[Sample], progress: Progress) -> None:
    """`old_values` and `returns` of all samples on every rank, under the critic as it is now."""
    own = score_values(context, engine, samples)
    compute_advantages(own, context.config.train.gae, group=context.replicas, device=context.backend.device)
    for name in TARGETS:
        share(context, samples, [own], name)
    progress.keep(samples, TARGETS)


def critic_metrics(engine: Engine, steps: list[Sums]) -> dict[str, float]:
    """Means over all optimizer steps of an update, and its first and last loss."""
    metrics, done = update_metrics("critic", engine, steps), taken(*steps)
    return {
        **metrics,
        "critic/value_loss_first": means(done[0])["value_loss"],
        "critic/value_loss_last": means(done[-1])["value_loss"],
    }
