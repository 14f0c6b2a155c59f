"""`t1 plan`: memory, time and bytes of a training before it has GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.configuration import command_config, print_config
from megatron_t1.config.compose import absolute, compose
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import check, layout_problems, unbuildable
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.model.stored import CONFIG_FILE, architecture_from_hf
from megatron_t1.planner.preflight import Device, device_of, memory_problems
from megatron_t1.planner.report import candidate_lines, comparison_text, plan_text, plan_values
from megatron_t1.resources import resource_dir

FITS_NOT = 1  # exit status


def plan(invocation: Invocation) -> int:
    config = with_vocabulary(command_config(invocation))
    if invocation.print_config:
        return print_config(config)
    check(config, more=unbuildable(config))
    require_vocabulary(config)
    device = device_of(config)
    if device is None:
        raise ConfigError(
            "no GPU is known to plan for: this machine has none", where="plan.gpu", remedy="plan.gpu=h100, h200, ..."
        )
    if "--layouts" in invocation.flags:
        return _compare(invocation, config, device)
    if "--json" in invocation.flags:
        print(json.dumps(plan_values(config, device), indent=1))
    else:
        print(plan_text(config, device))
        if "--search" in invocation.flags:
            _require_gpu(device, "--search")
            print("\n".join(candidate_lines(config, device)))
    problems = memory_problems(replace(config, plan=replace(config.plan, ignore_memory=False)))
    if problems and "--json" not in invocation.flags:
        print("\n" + "\n".join(problems))
    return FITS_NOT if problems else 0


def _compare(invocation: Invocation, config: Config, device: Device) -> int:
    """All shipped layouts in which the model can be trained, side by side."""
    _require_gpu(device, "--layouts")
    rest = [word for word in invocation.arguments if not word.startswith("layout=")]
    found = []
    for path in sorted(Path(resource_dir("conf")).glob("layout/*.yaml")):
        other = with_vocabulary(absolute(compose([*rest, f"layout={path.stem}"], config_dirs=invocation.config_dirs)))
        if other.layout.processes > 1 and not layout_problems(other):
            found.append((path.stem, other))
    if not found:
        raise ConfigError(
            "no shipped layout can cut this model",
            where="t1 plan --layouts",
            remedy="--search tries all layouts of layout.processes GPUs",
        )
    found.sort(key=lambda each: each[1].layout.processes)
    if "--json" in invocation.flags:
        print(json.dumps({name: plan_values(other, device) for name, other in found}, indent=1))
    else:
        print(comparison_text(found, device))
    return 0


def _require_gpu(device: Device, flag: str) -> None:
    if device.gpu is None:
        raise ConfigError(f"{flag} compares by time on GPUs", where="plan.gpu", remedy="plan.gpu=h100, h200, ...")


def with_vocabulary(config: Config) -> Config:
    """The configuration with the size of its checkpoint's vocabulary, where it leaves that open and has one."""
    model = config.model
    if model.architecture.vocab_size or not model.path or not (Path(model.path) / CONFIG_FILE).is_file():
        return config
    try:
        size = architecture_from_hf(model.path).vocab_size
    except T1Error:
        return config
    return replace(config, model=replace(model, architecture=replace(model.architecture, vocab_size=size)))


def require_vocabulary(config: Config) -> None:
    """Raise ConfigError where neither the configuration nor a checkpoint says how large the vocabulary is."""
    if config.model.architecture.vocab_size < 1:
        raise ConfigError(
            "the vocabulary's size isn't known",
            where="model.architecture.vocab_size=0",
            remedy="give it, or name a checkpoint in model.path",
        )


def fit_problems(config: Config) -> list[str]:
    """Why a training of this configuration would run out of memory, by estimate; empty where that can't be known."""
    config = with_vocabulary(config)
    if config.model.architecture.vocab_size < 1 or layout_problems(config):
        return []
    return memory_problems(config)
