"""Layouts that a model fits in: the nearest ones to a layout that doesn't fit, and the fastest for a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_t1.config.layout_rules import valid_layouts
from megatron_t1.config.schema import Config, LayoutConfig
from megatron_t1.config.validate import layout_problems
from megatron_t1.planner.hardware import Gpu
from megatron_t1.planner.memory import TRAINED, training_memory
from megatron_t1.planner.times import busy_seconds, training_time

RESIDENT_BYTES = {"float32": 8, "bfloat16": 6}  # of a parameter, on each GPU that has it: its weight and its gradient
GROWTH = (1, 2, 3, 4, 6, 8, 16, 32)  # times as many processes, when none of the given number fits
# What is rather changed than another: how much the layout has to be learnt anew.
PRICES = {"recompute": 1, "distributed_optimizer": 1, "expert": 2, "context": 2, "pipeline": 3, "tensor": 3,
          "virtual_pipeline": 1, "expert_tensor": 3, "processes": 20, "critic": 1, "export": 1}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A layout in which training fits.

    Attributes:
        changes: options of `layout` with the values that they would have.
        memory: bytes of the fullest GPU.
        seconds: that critic and actor would take to compute, for one iteration.
    """

    layout: LayoutConfig
    changes: dict[str, object]
    memory: int
    seconds: float

    @property
    def overrides(self) -> str:
        """Words for the command line; what a phase has for itself can only be left out there."""
        words = [f"layout.{name}={str(value).lower()}" for name, value in self.changes.items() if value != {}]
        apart = [f"layout.{name}.*" for name, value in self.changes.items() if value == {}]
        return " ".join([*words, *(["without", " and ".join(apart)] if apart else [])])


def nearest(config: Config, gpu: Gpu, count: int = 3) -> list[Candidate]:
    """Layouts that fit, with the fewest changes first; of the same number of GPUs where one of those fits."""
    for factor in GROWTH:
        found = candidates(config, gpu, config.layout.processes * factor)
        if found:
            found.sort(key=lambda each: (sum(PRICES[name] for name in each.changes), each.seconds, each.memory))
            return found[:count]
    return []


def fastest(config: Config, gpu: Gpu, count: int = 5) -> list[Candidate]:
    """Layouts for the same number of GPUs that fit, by computing time, then by memory."""
    found = candidates(config, gpu, config.layout.processes)
    found.sort(key=lambda each: (round(each.seconds, 1), each.memory))
    return found[:count]


def candidates(config: Config, gpu: Gpu, processes: int) -> list[Candidate]:
    """Every layout for `processes` GPUs that breaks no rule, and in which critic and actor fit."""
    found, a = [], config.model.architecture
    experts = 3 * a.hidden_size * a.moe_intermediate_size * a.num_experts * a.num_hidden_layers
    for layout in _layouts(config, processes):
        trial = with_layout(config, layout)
        least = experts * RESIDENT_BYTES[config.model.dtype] // (layout.pipeline * layout.expert)
        if least > gpu.memory or layout_problems(trial):
            continue
        memory = max(training_memory(trial, role).total for role in TRAINED)
        if memory > gpu.memory:
            continue
        changes = {
            each.name: getattr(layout, each.name)
            for each in fields(layout)
            if getattr(layout, each.name) != getattr(config.layout, each.name)
        }
        seconds = sum(busy_seconds(training_time(trial, role, gpu).parts) for role in TRAINED)
        found.append(Candidate(layout, changes, memory, seconds))
    return found


def with_layout(config: Config, layout: LayoutConfig) -> Config:
    """The configuration in another layout; everything else is shared."""
    return replace(config, layout=layout)


def _layouts(config: Config, processes: int) -> Iterator[LayoutConfig]:
    """Layouts that divide the model, equal in all phases, with the configured recompute and with the full one."""
    whole = replace(config.layout, processes=processes, distributed_optimizer=True, critic={}, export={})
    for layout in valid_layouts(whole, config.model.architecture):
        for recompute in dict.fromkeys((config.layout.recompute, "full")):
            yield replace(layout, recompute=recompute)
