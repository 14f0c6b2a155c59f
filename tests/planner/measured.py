"""What a training step of a tiny model really takes: every allocation of a process, from building the model on.

Runs in processes of its own (tests.distributed). torch's profiler reports each allocation with its size; their running
sum is the memory of the process that tensors take, as exact as the allocator's own books.
"""

from __future__ import annotations

import gc
from bisect import bisect
from typing import Any

import numpy as np

from megatron_t1.config.schema import ArchitectureConfig, Config
from tests.tiny_model import tiny_config

STEPS = 3  # that are measured where several processes exchange tensors
ARCHITECTURE = dict(
    vocab_size=2048, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4, max_position_embeddings=16384,
)  # fmt: skip


def config_of(case: dict[str, Any]) -> Config:
    """A case: role, dtype, tokens, micro_batches, and fields of the architecture and of the layout."""
    architecture = ArchitectureConfig(**{**ARCHITECTURE, **case.get("architecture", {})})
    config = tiny_config(architecture=architecture, dtype=case["dtype"], **case["layout"])
    config.train.capacity = case["tokens"]
    return config


def measure(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Peak bytes of a later step of each case, and the bytes of its parameters as they are on this rank."""
    from megatron_t1.model.backend import select_backend

    backend = select_backend("cpu")
    backend.prepare()
    from megatron.core import parallel_state

    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    results = []
    for case in cases:
        config = config_of(case)
        initialize_parallel(config.layout, backend, seed=0, architecture=config.model.architecture)
        results.append(_measure(config, backend, case))
        parallel_state.destroy_model_parallel()
    destroy_parallel()
    return results


def _measure(config: Config, backend: Any, case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    from megatron_t1.training.engine import Engine
    from megatron_t1.training.objectives import actor_objective, critic_objective

    role = case["role"]
    options = config.train.actor if role == "policy" else config.train.critic
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = Engine(config, backend, role, options, replay=True)

        def loss(output, batch):
            if role == "policy":
                return actor_objective(engine.logprobs(output, batch), batch, options)
            return critic_objective(engine.values(output, batch)["values"], batch, options)

        groups = [[_sample(config, number)] for number in range(case.get("micro_batches", 1))]
        engine.train_step(engine.micro_batches(groups), loss)  # the optimizer's state exists from here on
        for number in range(1 if dist.get_world_size() == 1 else STEPS):
            gc.collect()
            dist.barrier()
            with record_function(f"step {number}"):
                torch.zeros(1)
            engine.train_step(engine.micro_batches(groups), loss)
    parameters = [(name, list(each.shape)) for chunk in engine.chunks for name, each in chunk.named_parameters()]
    return {"peak": _peak(profiler), "parameters": parameters}


def _peak(profiler: Any) -> int:
    """Of the step that took least: gloo's threads may let go of what they sent a moment after a layer has gone on."""
    events = profiler.profiler.kineto_results.events()
    begins = sorted(event.start_ns() for event in events if event.name().startswith("step "))
    allocations = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total, peaks = 0, [0] * (len(begins) + 1)
    for when, size in allocations:
        total += size
        step = bisect(begins, when)
        peaks[step] = max(peaks[step], total)
    return min(peaks[1:])


def _sample(config: Config, number: int):
    """A trajectory that fills a micro-batch, half of it with loss, with routes that load the experts evenly."""
    from megatron_t1.training.samples import Sample

    a, length = config.model.architecture, config.train.capacity
    random = np.random.default_rng(number)
    scores = random.random((length, a.num_hidden_layers, a.num_experts), dtype=np.float32)
    mask = np.arange(length) >= length // 2
    count = int(mask.sum())
    zeros = np.zeros(count, np.float32)
    return Sample(
        name=f"sample{number}",
        key=str(number),
        ids=random.integers(0, a.vocab_size, length).astype(np.int32),
        loss_mask=mask,
        routes=scores.argsort(axis=2)[:, :, : a.num_experts_per_tok].astype(np.uint8),
        routed=np.ones(length, bool),
        reward=1.0,
        fields={"sampler_logprobs": zeros - 7, "advantages": zeros + 1, "old_values": zeros, "returns": zeros + 1},
    )
