"""What a training step of a tiny model really takes: every allocation of a process, from building the model on.

Runs in processes of its own (tests.distributed). torch's profiler reports each allocation with what the allocator then
holds for the whole process.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.config.schema import ArchitectureConfig, Config
from tests.tiny_model import tiny_config

STEP = "measured step"
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

    count_all_threads()
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
        gc.collect()
        dist.barrier()
        with record_function(STEP):
            engine.train_step(engine.micro_batches(groups), loss)
    parameters = [(name, list(each.shape)) for chunk in engine.chunks for name, each in chunk.named_parameters()]
    return {"peak": _peak(profiler), "parameters": parameters}


def count_all_threads() -> None:
    """Have torch's CPU allocator count what any thread allocates and frees.

    By itself it counts in threads that are profiled. gloo's own aren't, and one of them is often the last to hold what
    an all-to-all sent: such a tensor would count as held for ever.
    """
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _peak(profiler: Any) -> int:
    """Most bytes held while the step ran, less what the process held before the profiler began."""
    events = list(_events(profiler.profiler.kineto_results.experimental_event_tree()))
    step = next(event for event in events if event.name == STEP)
    held = sorted(
        ((event.start_time_ns, event.extra_fields) for event in events if event.name == "[memory]"), key=itemgetter(0)
    )
    before = held[0][1].total_allocated - held[0][1].alloc_size
    during = [each.total_allocated for when, each in held if step.start_time_ns <= when <= step.end_time_ns]
    return max(during) - before


def _events(tree: list[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _events(event.children)


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
