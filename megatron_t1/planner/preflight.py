"""Whether the model fits, before anything is started: into the GPU that is named or found, or this machine's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from megatron_t1.config.schema import Config
from megatron_t1.planner.hardware import AUTO, GIB, Gpu, find_gpu
from megatron_t1.planner.memory import TRAINED, PhaseMemory, rollout_memory, smallest_engine, training_memory
from megatron_t1.planner.search import GROWTH, nearest

PHASES = ("critic", "actor", "export")
PROCESS_BYTES = int(0.6 * GIB)  # a training process on the CPU before it has a model: interpreter, torch, Megatron


@dataclass(frozen=True)
class Device:
    """What a plan is made for.

    Attributes:
        gpu: None: processes on this machine's CPU.
        memory: bytes that one training process may take.
    """

    gpu: Gpu | None
    memory: int

    @property
    def name(self) -> str:
        return f"{self.gpu.name} of {self.memory / GIB:.1f} GiB" if self.gpu else "CPU"


def device_of(config: Config) -> Device | None:
    """The device that the configuration is for; None where it can't be known from here, as on a login node."""
    plan, cluster = config.plan, config.cluster
    on_cpu = cluster.backend == "cpu"
    if not on_cpu and (gpu := find_gpu(plan.gpu, plan.gpu_memory_gib)):
        return Device(gpu, gpu.memory)
    if on_cpu or (plan.gpu == AUTO and cluster.backend == "auto" and cluster.launcher == "local"):
        processes = min(config.layout.processes, max(1, cluster.train.processes_per_node))
        return Device(None, psutil.virtual_memory().total // processes)
    return None


def phases(config: Config, device: Device) -> list[PhaseMemory]:
    """Memory of each phase on this device; the engine of a rollout on GPUs only."""
    fused, reserve = device.gpu is not None, None if device.gpu else PROCESS_BYTES
    found = [training_memory(config, phase, fused=fused, reserve=reserve) for phase in PHASES]
    return [rollout_memory(config, device.memory), *found] if fused else found


def memory_problems(config: Config) -> list[str]:
    """One line for each phase that doesn't fit by estimate, with the nearest layouts that do; empty when all do.

    Nothing is said where the device isn't known, or where plan.ignore_memory is set.
    """
    device = None if config.plan.ignore_memory else device_of(config)
    if device is None:
        return []
    short = [(phase.phase, problem) for phase in phases(config, device) if (problem := phase.problem(device.memory))]
    if not short:
        return []
    problems = [f"{problem} ({device.name}, by estimate)" for _, problem in short]
    if device.gpu:
        problems += _remedies(config, device, {phase for phase, _ in short})
    problems.append("`t1 plan` shows what takes the memory; plan.ignore_memory=true starts anyway")
    return problems


def _remedies(config: Config, device: Device, short: set[str]) -> Iterator[str]:
    """One line for each of the phases that don't fit, or one for all that are trained."""
    if short & {*TRAINED}:
        found = nearest(config, device.gpu)
        layouts = "; ".join(f"{each.overrides} ({each.memory / GIB:.1f} GiB)" for each in found)
        yield (
            f"nearest layouts that fit: {layouts}"
            if found
            else f"no layout of up to {GROWTH[-1]} times as many GPUs fits: lower rollout.max_context, train.capacity"
        )
    elif "export" in short:
        yield "layout.export takes more than the actor's layout, in which an export fits: leave it out"
    if "rollout" in short:
        tensor = smallest_engine(config, device.memory)
        yield (
            f"a rollout fits with rollout.engine.tensor_parallel={tensor}"
            if tensor
            else "no engine that a node has GPUs for has room for one trajectory: lower rollout.max_context"
        )
