"""Which parallel layouts can work: every rule once, for the check before a start and again where the ranks meet.

What memory a layout takes is no rule (`megatron_t1.planner`); what a release of megatron-core can't do is `families`'.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig

SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
DISPATCHERS, RECOMPUTATIONS = ("alltoall", "allgather"), ("none", "full", "moe")
MOST_PROCESSES = 1 << 16  # more than any cluster has GPUs; what follows tries divisors and visits ranks
LARGEST_TENSOR = 8  # ranks that are proposed: the GPUs of one node


def layout_problems(
    layout: LayoutConfig,
    architecture: ArchitectureConfig | None = None,
    *,
    processes: int = 0,
    backend: str = "",
    where: str = "layout",
) -> list[str]:
    """Everything that can't work or is known to compute wrong results, one line each; empty when all is well.

    Args:
        architecture: None: only what concerns the sizes alone.
        processes: that are really there; 0: layout.processes.
        backend: of the trainer, where it is known: gloo ("cpu") can't do everything that NCCL can.
        where: what options of this layout are called in messages.
    """
    wrong = [
        f"{where}.{name} is {getattr(layout, name)}; it must be at least 1"
        for name in ("processes", *SIZES)
        if getattr(layout, name) < 1
    ]
    for name, known in (("dispatcher", DISPATCHERS), ("recompute", RECOMPUTATIONS)):
        if getattr(layout, name) not in known:
            wrong.append(f"{where}.{name} is {getattr(layout, name)!r}; known: {', '.join(known)}")
    if layout.processes > MOST_PROCESSES:
        wrong.append(f"{where}.processes is {layout.processes}; it must be at most {MOST_PROCESSES}")
    if wrong:
        return wrong  # the arithmetic below needs sane numbers
    checks = (
        _world(layout, processes or layout.processes, where),
        _together(layout, where),
        _on(layout, backend, where),
    )
    wrong = [problem for check in checks for problem in check]
    return wrong + ([] if architecture is None else list(_divisions(layout, architecture, where)))


def _world(layout: LayoutConfig, world: int, where: str) -> Iterator[str]:
    dense = layout.tensor * layout.pipeline * layout.context
    sparse = layout.expert_tensor * layout.expert * layout.pipeline
    unit = math.lcm(dense, sparse)
    if world % unit:
        near = sorted({max(unit, world // unit * unit), (world // unit + 1) * unit})
        yield (
            f"{where}.processes={world} must be a multiple of {unit} (tensor x pipeline x context = {dense}, "
            f"expert x expert_tensor x pipeline = {sparse}); nearest: {', '.join(map(str, near))}"  # Megatron-LM#1517
        )


def _together(layout: LayoutConfig, where: str) -> Iterator[str]:
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        yield f"{where}.virtual_pipeline > 1 needs {where}.pipeline > 1"
    if layout.expert == 1 and layout.expert_tensor != layout.tensor:
        yield (
            f"{where}.tensor={layout.tensor} with expert=1 and expert_tensor={layout.expert_tensor} trains wrong: "
            "cores before 0.19 then sum the experts' gradients over the ranks of the dense layers; "
            f"set {where}.expert_tensor={layout.tensor}, or {where}.expert > 1"
        )


def _on(layout: LayoutConfig, backend: str, where: str) -> Iterator[str]:
    if backend != "cpu":
        return
    if layout.dispatcher == "alltoall" and layout.expert > 1 and layout.expert_tensor > 1:
        yield (
            "gloo has no uneven all-gather, which alltoall needs with expert and expert_tensor > 1; "
            f"set {where}.dispatcher=allgather"
        )
    if layout.distributed_optimizer:
        yield (
            f"{where}.distributed_optimizer can't be checkpointed without Transformer Engine; set it to false on CPU"
        )


def _divisions(layout: LayoutConfig, a: ArchitectureConfig, where: str) -> Iterator[str]:
    stages = layout.pipeline * layout.virtual_pipeline
    divisions = [
        ("num_experts", "expert", layout.expert),
        ("num_attention_heads", "tensor", layout.tensor),
        ("num_hidden_layers", "pipeline x virtual_pipeline", stages),
        ("moe_intermediate_size", "expert_tensor", layout.expert_tensor),
        ("shared_expert_intermediate_size", "tensor", layout.tensor),
    ]
    if a.full_attention_interval > 1:
        # Context parallelism turns tokens into heads in the gated delta nets.
        divisions.append(("linear_num_key_heads", "tensor x context", layout.tensor * layout.context))
        divisions.append(("linear_num_value_heads", "tensor x context", layout.tensor * layout.context))
    for name, axis, size in divisions:
        yield from _multiple(a, name, f"{where}.{axis}", size)
    yield from _shared_heads(a, f"{where}.tensor", layout.tensor)


def _multiple(a: ArchitectureConfig, name: str, option: str, size: int) -> Iterator[str]:
    if (value := getattr(a, name)) % size:
        fitting = ", ".join(map(str, _nearest_divisors(value, size)))
        yield f"model.architecture.{name}={value} is not a multiple of {option}={size}; nearest: {fitting}"


def _shared_heads(a: ArchitectureConfig, option: str, size: int) -> Iterator[str]:
    """Key and value heads are cut, or each is copied to as many ranks."""
    heads = a.num_key_value_heads
    if heads % size and size % heads:
        yield (
            f"model.architecture.num_key_value_heads={heads} and {option}={size} don't divide each other; take a "
            f"multiple or a divisor of {heads}"
        )


def _nearest_divisors(value: int, size: int) -> list[int]:
    """The next smaller and the next larger divisor of `value`."""
    divisors = _divisors(value)
    below, above = [d for d in divisors if d < size], [d for d in divisors if d > size]
    return below[-1:] + above[:1]


def engine_problems(tensor: int, a: ArchitectureConfig) -> list[str]:
    """Why a model can't be cut over the `tensor` GPUs of a vLLM engine, one line each."""
    names = ["num_attention_heads"]
    if a.full_attention_interval > 1:
        names += ["linear_num_key_heads", "linear_num_value_heads"]
    option = "rollout.engine.tensor_parallel"
    wrong = [problem for name in names for problem in _multiple(a, name, option, tensor)]
    return wrong or list(_shared_heads(a, option, tensor))


def _divisors(value: int) -> list[int]:
    small = [number for number in range(1, math.isqrt(value) + 1) if value % number == 0]
    return sorted({*small, *(value // number for number in small)})


def nearest_layouts(layout: LayoutConfig, architecture: ArchitectureConfig, *, count: int = 3) -> list[LayoutConfig]:
    """Layouts for the same number of processes that break no rule, the least changed first."""
    found = [each for each in valid_layouts(layout, architecture) if not layout_problems(each, architecture)]
    found.sort(key=lambda each: _distance(layout, each))
    return found[:count]


def valid_layouts(layout: LayoutConfig, architecture: ArchitectureConfig) -> Iterator[LayoutConfig]:
    """Sizes worth trying for `layout.processes`; the virtual pipeline and the experts' own split stay or become 1."""
    world, a = layout.processes, architecture
    divisors = _divisors(world)
    tensors = [size for size in divisors if size <= LARGEST_TENSOR and a.num_attention_heads % size == 0]
    pipelines = [size for size in divisors if a.num_hidden_layers % size == 0]
    experts = [size for size in divisors if a.num_experts % size == 0]
    for tensor, pipeline in itertools.product(tensors, pipelines):
        contexts = [size for size in divisors if world % (tensor * pipeline * size) == 0]
        for context, expert in itertools.product(contexts, experts):
            split = tensor if expert == 1 else 1
            for virtual, expert_tensor in {(layout.virtual_pipeline, layout.expert_tensor), (1, split)}:
                if world % (pipeline * expert * expert_tensor) == 0:
                    yield replace(
                        layout,
                        tensor=tensor,
                        pipeline=pipeline,
                        virtual_pipeline=virtual,
                        context=context,
                        expert=expert,
                        expert_tensor=expert_tensor,
                    )


def changes(before: LayoutConfig, after: LayoutConfig) -> str:
    """The overrides that make one layout of the other."""
    names = [name for name in SIZES if getattr(before, name) != getattr(after, name)]
    return " ".join(f"layout.{name}={getattr(after, name)}" for name in names)


def _distance(before: LayoutConfig, after: LayoutConfig) -> tuple[int, float]:
    """How many sizes differ, then by how many doublings."""
    ratios = [getattr(after, name) / getattr(before, name) for name in SIZES]
    return sum(ratio != 1 for ratio in ratios), sum(abs(math.log2(ratio)) for ratio in ratios)
