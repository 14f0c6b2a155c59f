"""The configuration a command works with: composed afresh, or that of the run it names; and whether it can start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.config.compose import (
    absolute,
    compose,
    flatten,
    group_names,
    load_run_config,
    parse_overrides,
    to_yaml,
)
from megatron_t1.config.families import installed_core_problems
from megatron_t1.config.inputs import device_problems, run_dir_problems
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import check, unbuildable
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.loop.manifest import is_free
from megatron_t1.manifest import Manifest
from megatron_t1.model.stored import CONFIG_FILE, architecture_from_hf, model_differences
from megatron_t1.model.weight_files import weight_problems
from megatron_t1.paths import RunPaths
from megatron_t1.resources import resource_dir


def command_config(invocation: Invocation) -> Config:
    """Compose the overrides; or, when they name a run that exists and choose no group, take the run's configuration.

    Paths are absolute in the result.
    """
    if invocation.multirun:
        name = " ".join(invocation.command.words)
        raise ConfigError(f"-m sweeps over whole runs: `t1 run -m`, not `t1 {name}`", remedy="leave out -m")
    overrides = invocation.arguments
    parsed = parse_overrides(overrides)
    sweeps = [override.input_line or "" for override in parsed if override.is_sweep_override()]
    if sweeps:
        remedy = "add -m, or give one value" if invocation.command.words == ("run",) else "give one value"
        raise ConfigError(f"several values are a sweep: {', '.join(sweeps)}", remedy=remedy)
    groups = group_names([resource_dir("conf")])
    named = next((str(override.value()) for override in parsed if override.key_or_group == "run.dir"), None)
    run_dir = Path(named).expanduser() if named else None
    paths = RunPaths.of(run_dir) if run_dir else None
    exists = paths is not None and (paths.config.exists() or Manifest.exists(paths.manifest))
    chosen = [override.key_or_group for override in parsed if override.key_or_group in groups]
    if exists and not chosen:
        rest = [override.input_line or "" for override in parsed if override.key_or_group != "run.dir"]
        return absolute(load_run_config(run_dir, rest))
    config = absolute(compose(overrides, config_dirs=invocation.config_dirs))
    if exists:
        _require_same_groups(run_dir, config, chosen)
    return config


def print_config(config: Config, *, model: bool = False) -> int:
    """What `--cfg job` does: print what is in force, then raise ConfigError for what clashes in it.

    Args:
        model: also compare with the checkpoint in `model.path`, where there is one. Inputs that are not there yet are
            no clash.
    """
    print(to_yaml(config), end="", flush=True)
    check(config, more=model_problems(config) if model else ())
    return 0


def require_startable(
    config: Config, inputs: Iterable[str], *, training: bool = True, more: Iterable[str] = ()
) -> None:
    """Raise ConfigError with everything that would make a phase fail: options, inputs, model, machine.

    Args:
        inputs: path options that the command reads.
        training: a training phase is to come, so the model must be one that the trainer can build.
        more: problems that the command knows of.
    """
    problems = [*model_problems(config), *run_dir_problems(config), *more]
    if training:
        problems += [*unbuildable(config), *installed_core_problems(config), *device_problems(config)]
    check(config, inputs, problems)


def model_problems(config: Config) -> list[str]:
    """Where the checkpoint in `model.path` is not the configured model; nothing where there is none to read."""
    if not config.model.path or not (Path(config.model.path) / CONFIG_FILE).is_file() or unbuildable(config):
        return []
    try:
        problems = [*weight_problems(config.model.path), *model_differences(config.model)]
        positions = architecture_from_hf(config.model.path).max_position_embeddings
    except T1Error as error:
        return [f"model.path={config.model.path}: {error.problem}"]
    if config.rollout.max_context > positions:
        problems.append(
            f"rollout.max_context={config.rollout.max_context} exceeds the checkpoint's {positions} positions"
        )
    return problems


def _require_same_groups(run_dir: Path, config: Config, chosen: list[str]) -> None:
    """Refuse a group option that would exchange what a run with finished steps is made of; repeating it is no change.

    Raises:
        ConfigError: names the groups, the run's values and the new ones.
    """
    paths = RunPaths.of(run_dir)
    if not Manifest.exists(paths.manifest) or not Manifest.read(paths.manifest).finished:
        return
    saved, now = flatten(absolute(load_run_config(run_dir))), flatten(config)
    differing = [
        (group, key)
        for group in chosen
        for key in now
        if key.startswith(f"{group}.") and not is_free(key) and saved.get(key) != now[key]
    ]
    if differing:
        values = "; ".join(f"{key}: the run has {saved.get(key)!r}, now {now[key]!r}" for _, key in differing[:5])
        raise ConfigError(
            f"a run's groups can't be exchanged after it was started: {', '.join(sorted({g for g, _ in differing}))} "
            f"({values}{'; ...' if len(differing) > 5 else ''})",
            where=str(paths.config),
            remedy="leave the group out to go on with the run, or choose another run.dir",
        )
