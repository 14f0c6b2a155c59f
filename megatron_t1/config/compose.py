"""From conf/*.yaml and command-line overrides to one `Config`. Needs hydra-core only.

`compose` starts from the shipped groups; `load_run_config` starts from what a run was started with, so that a phase
started by hand sees exactly what the loop's own phases see.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_t1 import atomic
from megatron_t1.config.schema import MISSING, Config
from megatron_t1.errors import ConfigError, IncompleteError
from megatron_t1.resources import resource_dir

EXPERIMENT = "experiment"
SEAL = "# SHA-256 of what follows: "  # begins the first line of a saved configuration
# Options that name files or directories: saved as absolute paths, since phases may start in another directory.
PATH_OPTIONS = (
    "run.dir", "model.path", "env.tasks", "env.sources", "env.baselines", "eval.tasks", "rollout.selection.trials",
    "train.sft.demonstrations", "train.actor.reference", "train.critic.start", "train.critic.rollouts",
)  # fmt: skip
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]*/[A-Za-z0-9_./+-]*")  # a path, and no number or null
OPEN_KEYS = (  # any key may stand below these
    "extra", "cluster.rollout.env", "cluster.train.env", "env.sources", "env.weights", "env.sandbox.images",
    "layout.critic", "layout.export",
)  # fmt: skip


def compose(overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = ()) -> Config:
    """Compose the shipped configuration with overrides.

    Args:
        overrides: Hydra overrides: `group=option`, `key=value`; `experiment=NAME` and `+experiment=NAME` are the same.
        config_dirs: directories of the user's own with more group options.

    Raises:
        ConfigError: unknown key, group or option (near matches are named), or a value of another type.
    """
    conf = resource_dir("conf")
    directories = [Path(directory).resolve() for directory in config_dirs]
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError("the configuration directory does not exist", where=str(directory))
    parsed = parse_overrides(overrides)
    _check_overrides(parsed, [conf, *directories])
    lines = [_normalised(override) for override in parsed]
    if directories:
        lines.append("hydra.searchpath=[" + ",".join(f"'file://{directory}'" for directory in directories) + "]")
    ConfigStore.instance().store(name="t1_schema", node=Config)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf)):
            composed = hydra_compose("config", overrides=lines)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explained(error), remedy="`t1 run --cfg job` prints every option") from error
    return _to_config(composed)


def load_run_config(run_dir: str | Path, overrides: Sequence[str] = ()) -> Config:
    """RUN/config.yaml with `key=value` overrides on top; the run directory is always the given one.

    Raises:
        IncompleteError: there is no readable config.yaml.
        ConfigError: an override names a group (what a run is made of can't change) or an unknown key.
    """
    path = Path(run_dir).resolve() / "config.yaml"
    try:
        text = path.read_text()
        _require_seal(text)
        saved = yaml.safe_load(text)
        if not isinstance(saved, dict):
            raise ValueError(f"it holds {type(saved).__name__}, not options")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise IncompleteError(
            f"no readable run configuration: {error}",
            where=str(path),
            remedy="restore the file from a copy; or name all options again, with a group such as experiment=...",
        ) from error
    parsed = parse_overrides(overrides)
    groups = [
        override.input_line for override in parsed if override.key_or_group in group_names([resource_dir("conf")])
    ]
    if groups:
        raise ConfigError(
            "a run's groups can't be exchanged after it was started: " + ", ".join(groups),
            where=str(path),
            remedy="override single keys (key=value), or start another run directory",
        )
    _check_overrides(parsed, [resource_dir("conf")])
    try:
        merged = OmegaConf.merge(_schema(), OmegaConf.create(saved))
        for override in parsed:
            value = override.value()
            if override.is_delete() or override.is_sweep_override():
                raise ConfigError("only key=value overrides a run's configuration", where=override.input_line or "")
            OmegaConf.update(merged, override.key_or_group, value, force_add=_is_open(override.key_or_group))
    except (OmegaConfBaseException, HydraException) as error:
        raise ConfigError(_explained(error), where=str(path)) from error
    config = _to_config(merged)
    config.run.dir = str(path.parent)
    return config


@cache
def _schema() -> Any:
    """What a merge starts from, which copies it."""
    return OmegaConf.structured(Config)


def save(config: Config, path: str | Path) -> None:
    """Write the resolved configuration as YAML, atomically, below a line with its digest."""
    text = to_yaml(config)
    atomic.write_text(path, f"{SEAL}{_digest(text)}\n{text}")


def _require_seal(text: str) -> None:
    """Raise ValueError when the text begins with a digest line that isn't of the rest; without one it may be anything.

    What a disk has flipped is named before it computes something else; somebody's own file needs no such line.
    """
    first, _, rest = text.partition("\n")
    if first.startswith("#") and first != f"{SEAL}{_digest(rest)}":
        raise ValueError("it isn't what its first line is the digest of (without that line, it is taken as it is)")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def absolute(config: Config, base: str | Path = ".") -> Config:
    """A copy whose path options are absolute (relative ones are relative to `base`)."""
    root = Path(base).resolve()
    result = replace(config)
    for option in PATH_OPTIONS:
        *parents, name = option.split(".")
        owner: Any = result
        for parent in parents:
            child = replace(getattr(owner, parent))
            setattr(owner, parent, child)
            owner = child
        value = getattr(owner, name)
        if isinstance(value, dict):
            paths = {key: str((root / Path(each).expanduser()).resolve()) for key, each in value.items()}
            setattr(owner, name, paths)
        elif isinstance(value, list):
            setattr(owner, name, [str((root / Path(each).expanduser()).resolve()) for each in value])
        elif value and value != MISSING:
            setattr(owner, name, str((root / Path(value).expanduser()).resolve()))
    sandbox = result.env.sandbox
    images = {pattern: _base(root, value) for pattern, value in sandbox.images.items()}
    result.env.sandbox = replace(sandbox, base=_base(root, sandbox.base), images=images)
    return result


def _base(root: Path, value: str) -> str:
    """A base system's directory as an absolute path; an image's name, and one that isn't there, as it is."""
    path = (root / Path(value).expanduser()).resolve()
    return str(path) if value and path.is_dir() else value


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"train.actor.lr": 3e-4, ...}`: dataclasses are opened, lists and dictionaries are leaves."""
    if not is_dataclass(value):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for item in fields(value):
        flat.update(flatten(getattr(value, item.name), f"{prefix}.{item.name}" if prefix else item.name))
    return flat


def group_names(directories: Iterable[Path]) -> dict[str, list[str]]:
    """Config groups and their options, by folder and file name."""
    groups: dict[str, set[str]] = {}
    for directory in directories:
        for file in directory.rglob("*.yaml"):
            group = file.parent.relative_to(directory).as_posix()
            if group != ".":
                groups.setdefault(group, set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(groups.items())}


def as_override(key: str, value: str | Path) -> str:
    """`key=value` as compose takes it, whatever a path has in it: commas, equals signs and brackets are syntax."""
    text = str(value).replace("${", r"\${")  # no interpolation
    if not _PLAIN.fullmatch(text):
        # Backslashes are ordinary characters, but for those before a quote.
        text = "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text) + "'"
    return f"{key}={text}"


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(
            f"not an override: {_explained(error)}", remedy="write key=value, group=option or +new.key=value"
        ) from error


def _normalised(override: Override) -> str:
    line = override.input_line or ""
    if line.startswith(("+", "~")):
        return line
    if override.key_or_group == EXPERIMENT:
        return f"+{line}"
    return f"++{line}" if _is_open(override.key_or_group) else line


def _is_open(name: str) -> bool:
    return any(f"{name}.".startswith(f"{key}.") for key in OPEN_KEYS)


def _check_overrides(parsed: Sequence[Override], directories: Sequence[Path]) -> None:
    """Refuse unknown names before Hydra does: with near matches, and all of them at once."""
    groups = group_names(directories)
    keys = list(flatten(Config()))
    sections = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 1)}
    problems = []
    for override in parsed:
        name = override.key_or_group
        if name.startswith("hydra.") or name in ("hydra",):
            problems.append(
                f"{override.input_line}: Hydra's own settings are fixed here; use --config-dir and -m instead"
            )
        elif name in groups and not override.is_sweep_override():
            chosen = override.value()
            if chosen not in groups[name]:
                problems.append(f"{name} has no option {chosen!r}{_near(str(chosen), groups[name])}")
        elif name in groups or name in keys:
            continue
        elif name in sections:
            problems.append(f"{name} is a section, not an option: write {name}.<option>=value")
        elif not _is_open(name):
            problems.append(f"there is no option or group {name!r}{_near(name, [*keys, *groups])}")
    if problems:
        raise ConfigError("\n".join(problems), remedy="`t1 run --cfg job` prints every option")


def _near(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    last = name.rsplit(".", 1)[-1]
    matches += [key for key in known if key.rsplit(".", 1)[-1] == last and key not in matches][: 3 - len(matches)]
    if matches:
        return "; near: " + ", ".join(matches)
    return "; there are: " + ", ".join(known) if len(known) <= 12 else ""


def _explained(error: BaseException) -> str:
    """Hydra's message with that of its cause, without OmegaConf's internal lines."""
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += "\n" + str(error.__cause__)
    lines = [line.strip() for line in text.splitlines()]
    noise = ("object_type=", "reference_type=", "See https://hydra.cc")
    kept = [line for line in lines if line.strip("^") and not line.startswith(noise)]
    return "; ".join(dict.fromkeys(kept))


def _to_config(composed: DictConfig) -> Config:
    for key in OmegaConf.missing_keys(composed):
        OmegaConf.update(composed, key, "")
    try:
        result = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_explained(error)) from error
    assert isinstance(result, Config)
    return result
