"""The actor phase: PPO update of the policy with the experts of the rollout replayed.

Reads  RUN/rollouts/iter_i, RUN/values/iter_i and actor p (policy 0 is the start model itself).
Writes actor p + 1.
"""

from __future__ import annotations

import torch

from megatron_t1.model.convert import load_hf
from megatron_t1.phase import PhaseResult
from megatron_t1.ppo.sums import Sums, means, merge
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.corrections import add_corrections
from megatron_t1.training.engine import Engine
from megatron_t1.training.gap import score_rollout
from megatron_t1.training.objectives import actor_objective
from megatron_t1.training.reference import score_reference
from megatron_t1.training.results import batch_metrics, engine_timings
from megatron_t1.training.samples import SampleSet, attach, load_rollouts
from megatron_t1.training.updates import update_epoch
from megatron_t1.trajectory.sidecar import read_sidecar


def run_actor(context: Context) -> PhaseResult:
    config, counters = context.config, context.counters
    with context.timed("load_rollouts"):
        data = load_rollouts(context.paths.rollouts(context.iteration), config, context.contract_facts())
        attach(data.samples, read_sidecar(context.paths.values(context.iteration)), ("advantages",))
    if config.train.actor.kl_coef > 0:
        with context.timed("reference"):
            score_reference(context, data.samples)
    with context.timed("load_model"):
        engine = load_actor(context, counters.policy)
    metrics = batch_metrics(data)
    with context.timed("logprobs"):
        metrics.update(score_rollout(context, engine, data.samples))
        metrics.update(add_corrections(data.samples, config.train.actor))
    with context.timed("update"):
        metrics.update(_update(context, engine, data))
    with context.timed("save"):
        version = counters.policy + 1
        files = engine.save(context.paths.checkpoint("actor", version), version, relative_to=context.paths.root)
    return PhaseResult(
        phase="actor",
        iteration=context.iteration,
        metrics=metrics,
        timings_s={**context.timings_s, **engine_timings(engine)},
        outputs=files,
        details={"excluded": data.excluded},
    )


def load_actor(context: Context, version: int, *, with_optimizer: bool = True) -> Engine:
    """Actor `version` with its optimizer state; version 0 is read from the start model, with a fresh optimizer."""
    config = context.config
    engine = Engine(
        config,
        context.backend,
        "policy",
        config.train.actor if with_optimizer else None,
        replay=config.train.replay.actor,
    )
    if version == 0:
        load_hf(engine.chunks, context.start_model, role="policy")
        engine.parameters_changed()
    else:
        engine.load(context.paths.checkpoint("actor", version))
    return engine


def _update(context: Context, engine: Engine, data: SampleSet) -> dict[str, float]:
    options = context.config.train.actor

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return actor_objective(engine.logprobs(output, batch), batch, options)

    seed = context.config.run.seed + 1000 * context.iteration + 500
    steps = [
        sums
        for epoch in range(options.epochs)
        for sums in update_epoch(context, engine, data.samples, loss, seed=seed, epoch=epoch)
    ]
    return {
        **{f"actor/{name}": value for name, value in means(merge(steps)).items()},
        "actor/optimizer_steps": float(engine.optimizer_steps),
    }
