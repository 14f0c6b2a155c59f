"""The configuration a command works with: composed afresh, or that of the run it names."""

from __future__ import annotations

from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.config.compose import absolute, compose, group_names, load_run_config, parse_overrides, to_yaml
from megatron_t1.config.schema import Config
from megatron_t1.errors import ConfigError
from megatron_t1.paths import RunPaths
from megatron_t1.resources import resource_dir


def command_config(invocation: Invocation) -> Config:
    """Compose the overrides; or, when they name a run that exists and choose no group, take the run's configuration.

    Paths are absolute in the result.
    """
    overrides = invocation.arguments
    parsed = parse_overrides(overrides)
    sweeps = [override.input_line or "" for override in parsed if override.is_sweep_override()]
    if sweeps:
        raise ConfigError(f"several values are a sweep: {', '.join(sweeps)}", remedy="add -m, or give one value")
    groups = group_names([resource_dir("conf")])
    run_dir = next((str(override.value()) for override in parsed if override.key_or_group == "run.dir"), None)
    if run_dir and RunPaths.of(run_dir).config.exists() and not any(o.key_or_group in groups for o in parsed):
        rest = [override.input_line or "" for override in parsed if override.key_or_group != "run.dir"]
        return absolute(load_run_config(Path(run_dir).expanduser(), rest))
    return absolute(compose(overrides, config_dirs=invocation.config_dirs))


def print_config(config: Config) -> int:
    print(to_yaml(config), end="")
    return 0
