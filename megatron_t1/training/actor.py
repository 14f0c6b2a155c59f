"""The actor phase: PPO update of the policy with the experts of the rollout replayed.

Reads  RUN/rollouts/iter_i, RUN/values/iter_i and actor p (policy 0 is the start model itself).
Writes actor p + 1.
"""

from __future__ import annotations

import torch

from megatron_t1.model.convert import load_hf
from megatron_t1.phase import PhaseResult
from megatron_t1.ppo.corrections import effective_sample_share, importance_correction
from megatron_t1.ppo.losses import entropy_sum, policy_loss
from megatron_t1.ppo.sums import Sums, means, merge
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.gap import score_rollout
from megatron_t1.training.results import batch_metrics
from megatron_t1.training.samples import SampleSet, attach, load_rollouts
from megatron_t1.trajectory.packing import minibatches
from megatron_t1.trajectory.sidecar import read_sidecar


def run_actor(context: Context) -> PhaseResult:
    config, counters = context.config, context.counters
    with context.timed("load_rollouts"):
        data = load_rollouts(context.paths.rollouts(context.iteration), config, context.contract_facts())
        attach(data.samples, read_sidecar(context.paths.values(context.iteration)), ("advantages",))
    with context.timed("load_model"):
        engine = load_actor(context, counters.policy)
    metrics = batch_metrics(data)
    with context.timed("logprobs"):
        metrics.update(score_rollout(context, engine, data.samples))
    with context.timed("update"):
        metrics.update(_update(context, engine, data))
    with context.timed("save"):
        version = counters.policy + 1
        files = engine.save(context.paths.checkpoint("actor", version), version, relative_to=context.paths.root)
    return PhaseResult(
        phase="actor",
        iteration=context.iteration,
        metrics=metrics,
        timings_s=context.timings_s,
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
    old_name = "sampler_logprobs" if options.old_logprobs == "sampler" else "trainer_logprobs"

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        device = output.device
        current = engine.logprobs(output, batch)
        old = batch.loss_field(old_name, device)
        correction, correction_sums = None, {}
        if options.correction != "none":
            correction, correction_sums = importance_correction(
                old,
                batch.loss_field("sampler_logprobs", device),
                kind=options.correction,
                cap=options.correction_cap,
                low=options.correction_low,
            )
        total, sums = policy_loss(
            current["logprobs"],
            old,
            batch.loss_field("advantages", device),
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            correction=correction,
        )
        entropies, entropy_sums = entropy_sum(current["entropy"])
        return total - options.entropy_coef * entropies, {**sums, **entropy_sums, **correction_sums}

    steps = []
    seed = context.config.run.seed + 1000 * context.iteration + 500
    for epoch in range(options.epochs):
        for part in minibatches(len(data.samples), options.minibatches, seed=seed, epoch=epoch):
            groups = context.groups([data.samples[index] for index in part], seed=epoch)
            steps.append(engine.train_step(engine.micro_batches(groups), loss))
    total = merge(steps)
    metrics = {f"actor/{name}": value for name, value in means(total).items()}
    metrics["actor/optimizer_steps"] = float(engine.optimizer_steps)
    if options.correction != "none":
        metrics["actor/effective_sample_share"] = effective_sample_share(total)
    return metrics
