"""Actor and critic one after another, as a run does it, beside the ways of keeping both: what each would cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_t1.config.schema import Config
from megatron_t1.planner.hardware import GIB, Gpu
from megatron_t1.planner.memory import ROLE_OF, TRAINED, training_memory
from megatron_t1.planner.parameters import fullest_rank
from megatron_t1.planner.times import busy_seconds, iteration_times

HOST_LINK_GB_S = 40.0  # between a GPU and its share of the node's main memory, one way


@dataclass(frozen=True)
class Arrangement:
    """One way of having two trained models.

    Attributes:
        gpu: bytes of the fullest GPU.
        host: bytes of main memory for each GPU.
        switching: seconds of an iteration that aren't computing: starts, reading, writing, moving.
        note: what one has to know of it.
    """

    name: str
    gpu: int
    host: int
    switching: float
    note: str


def arrangements(config: Config, gpu: Gpu) -> list[Arrangement]:
    """The arrangements, with what this configuration would take in each; both models in the actor's layout."""
    config = replace(config, layout=config.layout.of("actor"))
    memory = {role: training_memory(config, role) for role in TRAINED}
    a, layout, dtype = config.model.architecture, config.layout, config.model.dtype
    static = {
        role: [rank.static_bytes for rank in fullest_rank(a, layout, dtype, ROLE_OF[role]).values()] for role in TRAINED
    }
    peak = max(phase.total for phase in memory.values())
    # On each stage: both models, and what the one that is at work needs besides.
    beside = max(
        memory[role].by_stage[stage] + static[other][stage]
        for role, other in (TRAINED, TRAINED[::-1])
        for stage in range(config.layout.pipeline)
    )
    times = {phase.phase: phase for phase in iteration_times(config, gpu)}
    switching = sum(times[role].total - busy_seconds(times[role].parts) for role in TRAINED)
    start, writes = config.plan.phase_start_s, sum(times[role].parts["write"] for role in TRAINED)
    moved = sum(map(max, static.values()))
    offloading = 2 * moved / (HOST_LINK_GB_S * 1e9)
    return [
        Arrangement("a phase of its own each", peak, 0, switching, "as runs do by default"),
        Arrangement("one group, one after another", peak, 0, switching - start, "loop.colocate_roles=true"),
        Arrangement(
            "both resident", beside, 0, start + writes, "not offered: rollout would need GPUs of its own, always"
        ),
        Arrangement(
            "both in main memory, one on the GPU", peak, moved, start + writes + offloading,
            "not offered: rollout would need GPUs of its own, or all of this again",
        ),
    ]  # fmt: skip


def fits(arrangement: Arrangement, gpu: Gpu) -> str:
    return "fits" if arrangement.gpu <= gpu.memory else f"{(arrangement.gpu - gpu.memory) / GIB:.1f} GiB too much"
