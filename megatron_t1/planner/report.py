"""A plan as text and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from megatron_t1.config.schema import Config, LayoutConfig
from megatron_t1.planner.alternatives import arrangements, fits
from megatron_t1.planner.hardware import GIB
from megatron_t1.planner.memory import host_bytes
from megatron_t1.planner.parameters import active_parameters, total_parameters
from megatron_t1.planner.preflight import Device, phases
from megatron_t1.planner.search import fastest, nearest
from megatron_t1.planner.storage import written
from megatron_t1.planner.times import iteration_times
from megatron_t1.planner.work import Volume

MIB = 2**20
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def plan_values(config: Config, device: Device) -> dict[str, Any]:
    """Everything `plan_text` says, in bytes and seconds."""
    memory = phases(config, device)
    values: dict[str, Any] = {
        "model": config.model.name,
        "device": {"name": device.name, "memory": device.memory},
        "layout": asdict(config.layout),
        "memory": [
            {**asdict(phase), "total": phase.total, "fits": not phase.problem(device.memory)} for phase in memory
        ],
        "written": written(config).parts,
        "lasting": written(config).lasting,
        "assumptions": asdict(config.plan),
    }
    if device.gpu:
        values["seconds"] = {
            phase.phase: {**phase.parts, **phase.facts} for phase in iteration_times(config, device.gpu)
        }
        values["arrangements"] = [asdict(each) for each in arrangements(config, device.gpu)]
    return values


def plan_text(config: Config, device: Device) -> str:
    """Memory, time and bytes of one configuration."""
    a, volume = config.model.architecture, Volume.of(config)
    lines = [
        f"{config.model.name}: {total_parameters(a) / 1e9:.2f}B parameters, {active_parameters(a) / 1e9:.2f}B for a "
        f"token; {config.layout.processes} x {device.name}",
        f"{layout_text(config.layout)}; micro-batches of {config.train.capacity} tokens; {volume.trajectories} "
        f"trajectories of {volume.mean_tokens:.0f} tokens on average, {config.rollout.max_context} at most",
        "", *_memory_lines(config, device),
    ]  # fmt: skip
    if device.gpu:
        lines += ["", *_time_lines(config, device)]
    lines += ["", *_written_lines(config)]
    if device.gpu:
        lines += ["", *_arrangement_lines(config, device)]
    return "\n".join(lines)


def layout_text(layout: LayoutConfig) -> str:
    """TP2 PP4 CP8 EP16, full recompute."""
    named = layout.sizes_text or "no parallelism"
    recompute = "no" if layout.recompute == "none" else layout.recompute
    return f"{named}, {recompute} recompute" + ("" if layout.distributed_optimizer else ", optimizer not distributed")


def _memory_lines(config: Config, device: Device) -> list[str]:
    found, lines = phases(config, device), []
    unit, word = (GIB, "GiB") if device.gpu else (MIB, "MiB")
    for phase in found:
        terms = ", ".join(f"{name} {size / unit:.2f}" for name, size in phase.terms.items() if size)
        verdict = "doesn't fit" if phase.problem(device.memory) else "fits"
        lines.append((phase.phase, f"{phase.total / unit:.1f}", verdict, terms))
    stages = [f"  {phase.phase} by stage: " + " ".join(f"{size / unit:.1f}" for size in phase.by_stage)
              for phase in found if len(phase.by_stage) > 1]  # fmt: skip
    notes = [f"  {phase.phase}: {note}" for phase in found for note in phase.notes]
    problems = [f"  {problem}" for phase in found if (problem := phase.problem(device.memory))]
    who = "GPU" if device.gpu else "process"
    host = f"  main memory of a node: {amount(host_bytes(config))} of records, mapped once for all its processes"
    return [f"memory of the fullest {who}, {word} of {device.memory / unit:.1f}", *table(lines), *stages, *notes, host,
            *problems]  # fmt: skip


def _time_lines(config: Config, device: Device) -> list[str]:
    found = iteration_times(config, device.gpu)
    rows = [
        (
            phase.phase,
            duration(phase.total),
            ", ".join(f"{name} {duration(seconds)}" for name, seconds in phase.parts.items()),
            ", ".join(f"{name} {value:.4g}" for name, value in phase.facts.items()),
        )
        for phase in found
    ]
    plan = config.plan
    return [
        f"time of an iteration, about {duration(sum(phase.total for phase in found))}", *table(rows),
        f"  assumed: {plan.utilisation:.0%} of {device.gpu.tflops} TFLOP/s in training, {plan.decode_bandwidth:.0%} of "
        f"{device.gpu.bandwidth_gb_s} GB/s in decoding, {plan.node_gb_s:g} and {plan.network_gb_s:g} GB/s between "
        f"GPUs, {plan.storage_gb_s:g} GB/s of storage,",
        f"  trajectories of {plan.mean_length:.0%} of the context, {plan.sampled_share:.0%} of it sampled, "
        f"{plan.command_s:g} s a command (plan.*)",
    ]  # fmt: skip


def _written_lines(config: Config) -> list[str]:
    found = written(config)
    rows = [(name, amount(size)) for name, size in found.parts.items()]
    return [f"written by an iteration: {amount(found.total)}; on the disk in the end: {amount(found.lasting)}",
            *table(rows)]  # fmt: skip


def _arrangement_lines(config: Config, device: Device) -> list[str]:
    rows = [
        (each.name, f"{each.gpu / GIB:.1f}", fits(each, device.gpu), f"{each.host / GIB:.1f}", duration(each.switching),
         each.note)
        for each in arrangements(config, device.gpu)
    ]  # fmt: skip
    head = ("actor and critic", "GPU, GiB", "", "host, GiB", "not computing", "")
    return table([head, *rows])


def candidate_lines(config: Config, device: Device) -> list[str]:
    """The nearest layouts that fit, where this one doesn't, and the fastest ones for as many GPUs."""
    lines = []
    for title, search in (("nearest layouts that fit", nearest), ("fastest by estimate", fastest)):
        found = search(config, device.gpu)
        rows = [
            (each.overrides or "as it is", layout_text(each.layout), f"{each.memory / GIB:.1f} GiB",
             duration(each.seconds))
            for each in found
        ]  # fmt: skip
        lines += ["", f"{title} ({config.layout.processes} GPUs; computing time of critic and actor)", *table(rows)]
        if not found:
            lines.append("  none")
    return lines


def comparison_text(configs: Sequence[tuple[str, Config]], device: Device) -> str:
    """One line for each of several configurations."""
    rows = [("", "GPUs", "layout", *(f"{phase}, GiB" for phase in ("rollout", "critic", "actor", "export")), "",
             "iteration", "GPU hours")]  # fmt: skip
    for name, config in configs:
        memory = {phase.phase: phase for phase in phases(config, device)}
        problems = [phase.phase for phase in memory.values() if phase.problem(device.memory)]
        seconds = sum(phase.total for phase in iteration_times(config, device.gpu))
        rows.append((
            name, str(config.layout.processes), layout_text(config.layout),
            *(f"{memory[phase].total / GIB:.1f}" for phase in ("rollout", "critic", "actor", "export")),
            "too large: " + ", ".join(problems) if problems else "fits",
            duration(seconds), f"{seconds * config.layout.processes / 3600:.0f}",
        ))  # fmt: skip
    return "\n".join([f"{configs[0][1].model.name} on {device.name}", *table(rows)])


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, two spaces apart and indented; the last one isn't padded."""
    rows = [list(row) for row in rows]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(max(map(len, rows), default=0))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def amount(size: float) -> str:
    """Bytes, in powers of a thousand, with three digits."""
    factor, unit = next(((factor, unit) for factor, unit in UNITS if size >= factor), UNITS[-1])
    return f"{size / factor:.3g} {unit}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
