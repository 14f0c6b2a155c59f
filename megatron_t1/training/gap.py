"""The sampler/trainer gap on the rollout itself, before the update: with replay, and what it would be without."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.ppo import sums as token_sums
from megatron_t1.ppo.gap import logprob_gap, route_difference
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.samples import Sample
from megatron_t1.training.scoring import score_groups, share

MAX_GAP_FLOAT32 = 1e-3  # nats; 3e-7 was measured between vLLM and this trainer on CPU with equal weights


def score_rollout(context: Context, engine: Engine, samples: list[Sample]) -> dict[str, float]:
    """Mean |log p_trainer - log p_sampler|, KL (k3) and the share of expert sets that differ.

    Fills `trainer_logprobs` of every sample when the loss needs them (old_logprobs=recomputed). Nothing is computed
    when neither is asked for.

    Raises:
        T1Error: with replay the gap exceeds train.replay.max_gap.
    """
    options = context.config.train
    recompute = options.actor.old_logprobs == "recomputed"
    if not (options.replay.measure_gap or recompute):
        return {}
    groups = context.groups(samples)
    suffix = "replay" if engine.replaying else "no_replay"
    metrics = _score(context, engine, groups, replay=engine.replaying, suffix=suffix, field="trainer_logprobs")
    _require_small_gap(context.config, metrics)
    if recompute:
        share(context, samples, groups, "trainer_logprobs")
    if options.replay.measure_gap and engine.replaying:
        metrics.update(_score(context, engine, groups, replay=False, suffix="no_replay", field="native_logprobs"))
        metrics.update({f"gap/{name}": value for name, value in route_shares(context, engine, groups).items()})
    return metrics


def _require_small_gap(config: Config, metrics: dict[str, float]) -> None:
    """An alarm before the update: stale or changed weights, or another arithmetic, on one of the two sides."""
    bound = config.train.replay.max_gap
    if bound < 0:
        dtypes = {config.model.dtype, config.rollout.engine.dtype or config.model.dtype}
        bound = MAX_GAP_FLOAT32 if dtypes == {"float32"} else 0.0
    gap = metrics.get("gap/logprob_gap_replay")
    if bound and gap is not None and not gap <= bound:  # also NaN
        raise T1Error(
            f"trainer and sampler disagree about the sampled tokens by {gap:.3g} nats on average, allowed: {bound:g}",
            where="gap/logprob_gap_replay of this rollout, before the update",
            remedy="check that the rollout was sampled with the weights this phase loads and the same arithmetic; "
            "train.replay.max_gap sets the bound, 0 turns the alarm off",
        )


def _score(
    context: Context, engine: Engine, groups: list[list[Sample]], *, replay: bool, suffix: str, field: str
) -> dict[str, float]:
    score_groups(engine, groups, engine.logprobs, "logprobs", field=field, replay=replay)

    def joined(name: str) -> torch.Tensor:
        rows = [sample.fields[name] for group in groups for sample in group]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *rows]))

    device = context.backend.device  # where the group communicates
    sums, maxima = logprob_gap(joined(field).to(device), joined("sampler_logprobs").to(device))
    metrics = token_sums.means(token_sums.reduce(sums, context.replicas))
    for name, value in maxima.items():
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=context.replicas)
        metrics[name] = float(value)
    return {f"gap/{name}_{suffix}": value for name, value in metrics.items()}


def route_shares(context: Context, engine: Engine, groups: list[list[Sample]]) -> dict[str, float]:
    """Native choices against the recorded ones: route_difference, token_route_difference, expert_difference.

    Collective. Empty where a rank sees only a part of the layers or sequences.
    """
    layout = context.config.layout
    if layout.pipeline > 1 or layout.context > 1 or layout.tensor > 1:
        return {}
    parts = []
    for batch, native in zip(*_recorded(engine, groups), strict=True):
        known = batch.routes.mask & torch.from_numpy(~batch.layout.is_padding).to(batch.routes.mask.device)
        if not batch.samples:
            known = torch.zeros_like(known)
        parts.append(route_difference(batch.routes.routes, native, known))
    own = {name: pair.to(context.backend.device) for name, pair in token_sums.merge(parts).items()}
    shared = token_sums.reduce(own, context.replicas)
    return token_sums.means(shared)


def _recorded(engine: Engine, groups: list[list[Sample]]) -> tuple[list, list[torch.Tensor]]:
    batches = engine.micro_batches(groups, replay=True)
    return batches, engine.record_routes(batches)
