"""The critic phase: values under the current critic, advantages for the actor, then the value update.

Reads  RUN/rollouts/iter_i and critic i (or, for i = 0, the start model without its head).
Writes RUN/values/iter_i (old values, advantages, returns) and critic i + 1. The actor's files are not touched.
"""

from __future__ import annotations

import shutil

import numpy as np
import torch
import torch.distributed as dist

from megatron_t1.config.schema import GaeConfig
from megatron_t1.model.convert import load_hf
from megatron_t1.model.heads import set_value_bias
from megatron_t1.phase import PhaseResult
from megatron_t1.ppo.gae import generalized_advantages, length_adaptive_lambda, returns
from megatron_t1.ppo.losses import value_loss
from megatron_t1.ppo.statistics import advantage_sums, explained_variance_of, explained_variance_sums, normalise
from megatron_t1.ppo.sums import Sums, means, merge
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.results import batch_metrics
from megatron_t1.training.samples import Sample, SampleSet, attach, load_rollouts
from megatron_t1.trajectory.packing import minibatches
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar

VALUE_FIELDS = ("old_values", "advantages", "returns")


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
    with context.timed("update"):
        metrics.update(_update(context, engine, data))
    with context.timed("save"):
        version = counters.critic + 1
        files = engine.save(context.paths.checkpoint("critic", version), version, relative_to=context.paths.root)
    return PhaseResult(
        phase="critic",
        iteration=context.iteration,
        metrics=metrics,
        timings_s=context.timings_s,
        outputs=[*files, *context.written(context.paths.values(context.iteration))],
        details={"excluded": data.excluded, "newly_initialised": fresh},
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
    batches = engine.micro_batches(context.groups(samples))
    for batch, result in zip(batches, engine.score(batches, engine.values), strict=True):
        for sample, values in zip(batch.samples, batch.per_sample(result["values"].numpy()), strict=True):
            sample.fields["old_values"] = values
    return [sample for batch in batches for sample in batch.samples]


def compute_advantages(
    samples: list[Sample],
    options: GaeConfig,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Fill `advantages` (for the actor) and `returns` (for the critic) of one replica's samples.

    The reward of an episode is paid on its last sampled token; nothing is bootstrapped, since a truncated but verified
    episode is terminal.

    Args:
        samples: with `old_values`.
        group: the data-parallel replicas that hold the other samples; None: these are all.
        device: on which the group communicates.

    Returns:
        explained_variance of the old values (trajectories weighted equally), mean_return, mean_value, advantage_std.
    """
    lengths = torch.tensor([sample.loss_tokens for sample in samples], dtype=torch.int64)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    values = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(s.fields["old_values"] for s in samples)]))
    lambda_actor: float | torch.Tensor = options.lambda_actor
    if options.length_adaptive_alpha > 0:
        lambda_actor = length_adaptive_lambda(lengths, options.length_adaptive_alpha)
    advantages = generalized_advantages(values, lengths, rewards, gamma=options.gamma, lambda_=lambda_actor)
    targets = returns(
        values,
        generalized_advantages(values, lengths, rewards, gamma=options.gamma, lambda_=options.lambda_critic),
    )
    weights = (1.0 / lengths.double()).repeat_interleave(lengths)
    sums = torch.cat([advantage_sums(advantages), explained_variance_sums(values, targets, weights)])
    if dist.is_initialized():
        sums = sums.to(device)
        dist.all_reduce(sums, group=group)
        sums = sums.cpu()
    advantage_totals, explained = sums[:3], sums[3:]
    advantages = normalise(advantages, options.advantages, advantage_totals)
    ends = np.cumsum(lengths.numpy())[:-1]
    for sample, own_advantages, own_targets in zip(
        samples, np.split(advantages.numpy(), ends), np.split(targets.numpy(), ends), strict=bool(samples)
    ):
        sample.fields["advantages"] = own_advantages
        sample.fields["returns"] = own_targets
    weight, target, _, error, _ = explained.tolist()
    count, total, squares = advantage_totals.tolist()
    return {
        "explained_variance": explained_variance_of(explained),
        "mean_return": target / weight,
        "mean_value": (target - error) / weight,
        "advantage_std": max(squares / count - (total / count) ** 2, 0.0) ** 0.5,
    }


def _write_values(context: Context, samples: list[Sample]) -> None:
    directory = context.paths.values(context.iteration)
    if context.is_writer:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()
    if context.owns_values:
        arrays = {sample.key: {name: sample.fields[name] for name in VALUE_FIELDS} for sample in samples}
        write_sidecar(directory, context.replica, arrays, ranks=context.replica_count)
    dist.barrier()


def _update(context: Context, engine: Engine, data: SampleSet) -> dict[str, float]:
    options = context.config.train.critic
    epochs = options.warmup_epochs if context.counters.is_warmup else options.epochs

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        device = output.device
        return value_loss(
            engine.values(output, batch)["values"],
            batch.loss_field("old_values", device),
            batch.loss_field("returns", device),
            value_clip=options.value_clip,
            kind=options.loss,
            huber_delta=options.huber_delta,
        )

    steps = []
    seed = context.config.run.seed + 1000 * context.iteration
    for epoch in range(epochs):
        for part in minibatches(len(data.samples), options.minibatches, seed=seed, epoch=epoch):
            groups = context.groups([data.samples[index] for index in part], seed=epoch)
            steps.append(engine.train_step(engine.micro_batches(groups), loss))
    return {
        **{f"critic/{name}": value for name, value in means(merge(steps)).items()},
        "critic/value_loss_first": means(steps[0])["value_loss"],
        "critic/value_loss_last": means(steps[-1])["value_loss"],
        "critic/optimizer_steps": float(engine.optimizer_steps),
    }
