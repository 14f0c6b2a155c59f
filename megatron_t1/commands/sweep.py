"""`t1 run -m`: every combination of comma-separated values, each in its own process and its own run directory."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.configuration import model_problems, require_startable
from megatron_t1.commands.run import loop_problems, run_inputs
from megatron_t1.config.compose import absolute, as_override, compose, parse_overrides
from megatron_t1.config.validate import check, unbuildable
from megatron_t1.errors import ConfigError
from megatron_t1.processes import stop_signal_numbers


def jobs(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """(name, overrides) of each run: Hydra's sweep syntax a=1,2 and choice(...), range(...), in order.

    Raises:
        ConfigError: no override has several values.
    """
    fixed, swept = [], []
    for override in parse_overrides(arguments):
        if override.is_sweep_override():
            key = override.get_key_element()
            swept.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            fixed.append(override.input_line or "")
    if not swept:
        raise ConfigError("-m needs at least one override with several values", remedy="for example run.seed=0,1,2")
    return [(directory_name(combination), [*fixed, *combination]) for combination in itertools.product(*swept)]


def directory_name(overrides: tuple[str, ...]) -> str:
    """`run.seed=1,train.actor.lr=0.1` as one plain directory name."""
    return re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(item.lstrip("+") for item in overrides))[:150]


def sweep(invocation: Invocation) -> int:
    """Check every job before the first starts; run them one after another; report which failed."""
    planned, configs = [], []
    for number, (name, overrides) in enumerate(jobs(invocation.arguments)):
        config = absolute(compose(overrides, config_dirs=invocation.config_dirs))
        run_dir = Path(config.run.dir) / f"{number:02d}_{name}"
        config.run.dir = str(run_dir)
        check(config, more=[*model_problems(config), *unbuildable(config), *loop_problems(config)])
        configs.append(config)
        planned.append(
            (run_dir, [*(o for o in overrides if not o.startswith("run.dir=")), as_override("run.dir", run_dir)])
        )
    if invocation.print_config:
        for run_dir, overrides in planned:
            print(run_dir, *overrides)
        return 0
    for config in configs:
        require_startable(config, run_inputs(config))
    failed = []
    for number, (run_dir, overrides) in enumerate(planned):
        print(f"== run {number + 1}/{len(planned)}: {run_dir}", flush=True)
        options = [word for directory in invocation.config_dirs for word in ("--config-dir", directory)]
        process = subprocess.Popen([sys.executable, "-m", "megatron_t1.cli", "run", *options, *overrides])
        status = _wait(process)
        if status >= 128:
            return status
        if status:
            failed.append(str(run_dir))
    if failed:
        print(f"{len(failed)} of {len(planned)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _wait(process: subprocess.Popen) -> int:
    """Exit status of a run; a signal to the sweep is passed on, so that the run stops cleanly."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in stop_signal_numbers()}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else (status if status >= 0 else 128 - status)
