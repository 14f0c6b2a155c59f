"""The actor phase: PPO update of the policy with the experts of the rollout replayed.

Reads  RUN/rollouts/iter_i, RUN/values/iter_i and actor p (policy 0 is the start model itself).
Writes actor p + 1.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_t1.model.convert import load_hf
from megatron_t1.phase import PhaseResult
from megatron_t1.ppo.sums import Sums
from megatron_t1.training import corrections, reference
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.corrections import add_corrections
from megatron_t1.training.engine import Engine
from megatron_t1.training.gap import score_rollout
from megatron_t1.training.objectives import actor_objective
from megatron_t1.training.progress import Progress
from megatron_t1.training.reference import score_reference
from megatron_t1.training.results import batch_metrics, engine_timings
from megatron_t1.training.samples import SampleSet, attach, load_rollouts
from megatron_t1.training.updates import run_epochs, update_metrics
from megatron_t1.trajectory.sidecar import read_sidecar

# Fields of the policies as they are before the first update.
OF_THE_START = ("trainer_logprobs", reference.FIELD, corrections.FIELD)


def run_actor(context: Context) -> PhaseResult:
    config, counters = context.config, context.counters
    with context.timed("load_rollouts"):
        data = load_rollouts(context.paths.rollouts(context.iteration), config, context.contract_facts())
        attach(data.samples, read_sidecar(context.paths.values(context.iteration)), ("advantages",))
    progress = Progress(context, "actor", "actor", origin(context, counters.policy), data.samples)
    with context.timed("load_model"):
        engine = progress.resumed(lambda: new_actor(context), data.samples)
    if engine is None:
        engine = _begin(context, data, progress)
    with context.timed("update"):
        _update(context, engine, data, progress)
    metrics = {**batch_metrics(data), **progress.start["metrics"], **update_metrics("actor", engine, progress.steps)}
    with context.timed("save"):
        version = counters.policy + 1
        files = engine.save(context.paths.checkpoint("actor", version), version, relative_to=context.paths.root)
    return PhaseResult(
        phase="actor",
        iteration=context.iteration,
        metrics=metrics,
        timings_s={**context.timings_s, **engine_timings(engine)},
        outputs=files,
        details={"excluded": data.excluded, "skipped": engine.skipped},
    )


def _begin(context: Context, data: SampleSet, progress: Progress) -> Engine:
    """The actor before its first step, and what the update needs to know of the policies as they are then."""
    config = context.config
    if config.train.actor.kl_coef > 0:
        with context.timed("reference"):
            score_reference(context, data.samples)
    with context.timed("load_model"):
        engine = load_actor(context, context.counters.policy)
    with context.timed("logprobs"):
        metrics = score_rollout(context, engine, data.samples)
        metrics.update(add_corrections(data.samples, config.train.actor))
    progress.began(metrics=metrics)
    progress.keep(data.samples, [name for name in OF_THE_START if name in data.samples[0].fields])
    return engine


def origin(context: Context, version: int) -> Path:
    """Where actor `version` is read from; version 0 is the start model."""
    return context.paths.checkpoint("actor", version) if version else context.start_model


def new_actor(context: Context, *, with_optimizer: bool = True) -> Engine:
    """An actor's model and optimizer, without weights that mean anything."""
    return Engine.of_role(context.config, context.backend, "policy", with_optimizer=with_optimizer)


def load_actor(context: Context, version: int, *, with_optimizer: bool = True) -> Engine:
    """Actor `version` with its optimizer state; version 0 is read from the start model, with a fresh optimizer."""
    engine = new_actor(context, with_optimizer=with_optimizer)
    if version == 0:
        load_hf(engine.chunks, context.start_model, role="policy")
        engine.parameters_changed()
    else:
        engine.load(origin(context, version))
    return engine


def _update(context: Context, engine: Engine, data: SampleSet, progress: Progress) -> None:
    options = context.config.train.actor

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return actor_objective(engine.logprobs(output, batch), batch, options)

    seed = context.config.run.seed + 1000 * context.iteration + 500
    run_epochs(context, engine, data.samples, loss, progress, seed=seed, epochs=options.epochs)
