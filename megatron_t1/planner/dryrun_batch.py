"""A sample batch cut for one rank as a training phase cuts it: which tokens, losses and routes end up here.

Every token's id is its number in the whole batch and every row of routes is its own, so what lies on a rank says by
itself where it came from.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_t1.planner.dryrun_report import BatchFindings
from megatron_t1.training.batch import MicroBatch, build_micro_batch, lengths_of, plan_samples
from megatron_t1.training.engine import Engine
from megatron_t1.training.passes import layout_sizes, missing_micro_batches
from megatron_t1.training.samples import Sample
from megatron_t1.trajectory.layout import TokenLayout
from megatron_t1.trajectory.routes import RouteShape

SEQUENCES_PER_REPLICA = 3
LONGEST = 24  # tokens of a sample sequence
MICRO_BATCH = 96  # tokens, before what parallel sizes need


@cache
def sample_batch(replicas: int, layers: int, experts: int, top_k: int) -> list[Sample]:
    """Sequences with unlike lengths and losses; one more than the replicas share evenly. The same on every rank."""
    generator = np.random.default_rng(0)
    samples, first = [], 0
    for number in range(SEQUENCES_PER_REPLICA * replicas + 1):
        length = int(generator.integers(2, LONGEST + 1))
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        ranking = generator.random((length, layers, experts), np.float32).argpartition(top_k - 1)
        shape = RouteShape(num_moe_layers=layers, num_experts=experts, top_k=top_k)
        routed = np.ones(length, bool)
        routed[-1] = False  # nobody samples after the last token
        samples.append(
            Sample(
                name=f"sample_{number}",
                key=str(number),
                ids=np.arange(first, first + length, dtype=np.int32),
                loss_mask=mask,
                routes=ranking[..., :top_k].astype(shape.dtype),
                routed=routed,
                reward=0.0,
            )
        )
        first += length
    return samples


def batch_of(engine: Engine) -> list[Sample]:
    shape = engine.route_shape
    replicas = parallel_state.get_data_parallel_world_size()
    return sample_batch(replicas, shape.num_moe_layers, shape.num_experts, shape.top_k)


def whole_batch(engine: Engine) -> dict[str, int]:
    """What the ranks together must compute, as `dryrun_report.LayoutFindings` takes it."""
    samples = batch_of(engine)
    return {
        "tokens": sum(len(sample.ids) for sample in samples),
        "loss_tokens": sum(sample.loss_tokens for sample in samples),
        "layers": engine.route_shape.num_moe_layers,
    }


def check_batch(engine: Engine) -> BatchFindings:
    """What of the sample batch this rank computes."""
    samples = batch_of(engine)
    routes = np.concatenate([sample.routes for sample in samples])
    routed = np.concatenate([sample.routed for sample in samples])
    columns = [engine.replay.layers.index(layer) for layer in engine.replay.local_layers]
    tokens, predicted, routed_here, misplaced = [], [], [], 0
    for batch in micro_batches(engine, samples):
        real = ~batch.layout.is_padding if batch.samples else np.zeros(batch.layout.local_total, bool)
        ids = batch.tokens[0].numpy()
        tokens += ids[real].tolist()
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            predicted += batch.targets.tolist()
        rows = len(batch.routes.routes)
        here = slice(0, rows)
        if engine.transformer.sequence_parallel:  # Megatron scatters a stream in equal runs over the tensor ranks
            start = rows * parallel_state.get_tensor_model_parallel_rank()
            here = slice(start, start + rows)
        ids, real = ids[here], real[here]
        ours = batch.routes.routes.numpy()[real][:, columns]
        known = batch.routes.mask.numpy()[real]
        misplaced += int((ours[known] != routes[ids[real]][:, columns][known]).any(axis=(1, 2)).sum())
        misplaced += int((known != routed[ids[real]]).sum())
        routed_here += ids[real].tolist()
    return BatchFindings(tokens, predicted, routed_here, columns, misplaced)


def micro_batches(engine: Engine, samples: list[Sample]) -> list[MicroBatch]:
    """This rank's micro-batches, on the CPU: `Context.groups` and `Engine.micro_batches` read sizes from a device."""
    layout = engine.config.layout
    sizes = layout_sizes(sequence_parallel=bool(engine.transformer.sequence_parallel))
    capacity = max(MICRO_BATCH, 2 * layout.stream_multiple)
    plan = plan_samples(
        samples,
        replicas=parallel_state.get_data_parallel_world_size(),
        capacity=-(-capacity // layout.stream_multiple) * layout.stream_multiple,
        context_size=layout.context,
        stream_multiple=layout.stream_multiple,
    )
    if layout.virtual_pipeline > 1 or layout.dispatcher == "allgather":
        every = [group for rank in range(len(plan.ranks)) for group in plan.groups(rank, samples)]
        sizes["total_multiple"] = max(TokenLayout(lengths_of(group), **sizes).total for group in every)
    groups = plan.groups(parallel_state.get_data_parallel_rank(), samples)
    groups += [[] for _ in range(missing_micro_batches(len(groups)))]
    return [
        build_micro_batch(group, layout_sizes=sizes, route_shape=engine.route_shape, device=torch.device("cpu"))
        for group in groups
    ]
