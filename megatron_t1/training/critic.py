"""The critic phase: values under the current critic, advantages for the actor, then the value update.

Reads  RUN/rollouts/iter_i and critic i (or, for i = 0, the start model without its head).
Writes RUN/values/iter_i (old values, advantages, returns) and critic i + 1. The actor's files are not touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from megatron_t1.model.convert import load_hf
from megatron_t1.model.heads import set_value_bias
from megatron_t1.phase import PhaseResult, WrittenFile
from megatron_t1.ppo.sums import Sums, means, merge
from megatron_t1.training.advantages import VALUE_FIELDS, compute_advantages
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.objectives import critic_objective
from megatron_t1.training.results import batch_metrics
from megatron_t1.training.samples import Sample, SampleSet, attach, load_rollouts
from megatron_t1.training.scoring import score_groups
from megatron_t1.training.updates import update_epoch
from megatron_t1.training.warmup import warm_up
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar


def run_critic(context: Context) -> PhaseResult:
    config, counters = context.config, context.counters
    with context.timed("load_rollouts"):
        data = load_rollouts(context.paths.rollouts(context.iteration), config, context.contract_facts())
    with context.timed("load_model"):
        engine, fresh = _load(context, data)
    metrics = batch_metrics(data)

    with context.timed("values"):
        own = _score_values(context, engine, data.samples)
        statistics = compute_advantages(own, config.train.gae, group=context.replicas, device=context.backend.device)
        metrics.update({f"critic/{name}": value for name, value in statistics.items()})
        _write_values(context, own)
        # Mini-batches are packed anew, so a sample may move to another rank: every rank reads all of them back.
        attach(data.samples, read_sidecar(context.paths.values(context.iteration)), VALUE_FIELDS)
    files: list[WrittenFile] = []
    version = counters.critic + 1

    def save() -> None:
        with context.timed("save"):
            files[:] = engine.save(context.paths.checkpoint("critic", version), version, relative_to=context.paths.root)

    with context.timed("update"):
        found, history = _update(context, engine, data, save)
        metrics.update(found)
    if not files:
        save()
    return PhaseResult(
        phase="critic",
        iteration=context.iteration,
        metrics=metrics,
        timings_s=context.timings_s,
        outputs=[*files, *context.written(context.paths.values(context.iteration))],
        details={"excluded": data.excluded, "newly_initialised": fresh, "held_out_explained_variance": history},
    )


def _load(context: Context, data: SampleSet) -> tuple[Engine, list[str]]:
    config, counters = context.config, context.counters
    engine = Engine(config, context.backend, "value", config.train.critic, replay=config.train.replay.critic)
    if counters.critic > 0:
        engine.load(context.paths.checkpoint("critic", counters.critic))
        return engine, []
    report = load_hf(engine.chunks, context.start_model, role="value")
    if config.train.critic.head_bias == "mean_return":
        set_value_bias(engine.chunks, float(np.mean([sample.reward for sample in data.samples])))
    engine.parameters_changed()
    context.say(f"critic started from {context.start_model}; newly initialised: {', '.join(report.newly_initialised)}")
    return engine, report.newly_initialised


def _score_values(context: Context, engine: Engine, samples: list[Sample]) -> list[Sample]:
    """Fill `old_values` of this replica's share of the samples, and return that share."""
    groups = context.groups(samples)
    score_groups(engine, groups, engine.values, "values", field="old_values")
    return [sample for group in groups for sample in group]


def _write_values(context: Context, samples: list[Sample]) -> None:
    directory = context.paths.values(context.iteration)
    if context.is_writer:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()
    if context.owns_values:
        arrays = {sample.key: {name: sample.fields[name] for name in VALUE_FIELDS} for sample in samples}
        write_sidecar(directory, context.replica, arrays, ranks=context.replica_count)
    dist.barrier()


def _update(
    context: Context, engine: Engine, data: SampleSet, save: Callable[[], None]
) -> tuple[dict[str, float], list[float]]:
    """Metrics, and the held-out explained variance over a warm-up that ends by it, which saves the best critic."""
    options, is_warmup = context.config.train.critic, context.counters.is_warmup

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return critic_objective(engine.values(output, batch)["values"], batch, options)

    seed = context.config.run.seed + 1000 * context.iteration
    held_out, history = {}, []
    if is_warmup and options.warmup_holdout:
        steps, held_out, history = warm_up(context, engine, data.samples, loss, save, seed=seed)
    else:
        steps = [
            sums
            for epoch in range(options.warmup_epochs if is_warmup else options.epochs)
            for sums in update_epoch(context, engine, data.samples, loss, seed=seed, epoch=epoch)
        ]
    metrics = {
        **{f"critic/{name}": value for name, value in means(merge(steps)).items()},
        "critic/value_loss_first": means(steps[0])["value_loss"],
        "critic/value_loss_last": means(steps[-1])["value_loss"],
        "critic/optimizer_steps": float(engine.optimizer_steps),
        **held_out,
    }
    return metrics, history
