"""Options that name code: can it be imported, and can it be used in that place? Nothing named is called."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import Config

SANDBOX_METHODS = (
    "start", "run", "execute", "put_files", "get_files", "changes", "guarantees", "run_verifier", "resume", "stop",
)  # fmt: skip


def target_problems(config: Config) -> list[str]:
    """One line for each of the options that names nothing usable."""
    problems = []
    reward, sandbox = config.reward._target_, config.env.sandbox._target_
    for option, target, unusable in (
        ("reward._target_", reward, _unusable_reward),
        ("env.sandbox._target_", sandbox, _unusable_sandbox),
    ):
        module, _, name = target.rpartition(".")
        if not module or not name.isidentifier():
            problems.append(f"{option}={target!r} is not package.module.Class")
        elif problem := _unresolvable(module, name) or unusable(_resolved(module, name)):
            problems.append(f"{option}={target}: {problem}")
        elif option == "reward._target_":
            problems += _unknown_reward_options(config, _resolved(module, name))
    return problems + _chat_format(config.model.chat_format)


def renderers_families() -> list[str] | None:
    """Names for model.chat_format=renderers:FAMILY; None where the package isn't installed (the rollout's environment
    may be another one than the driver's)."""
    try:
        import renderers
    except ImportError:
        return None
    classes = [getattr(renderers, name) for name in renderers.__all__ if name.endswith("RendererConfig")]
    names = {c.model_fields["name"].default for c in classes if "name" in getattr(c, "model_fields", {})}
    # Left out: what has no bridge (default), looks a model up in the network (auto), or names code (custom).
    return sorted(name for name in names if isinstance(name, str) and name not in ("auto", "custom", "default"))


def _chat_format(name: str) -> list[str]:
    known = "there are chatml_bash, renderers:FAMILY, template, template:PATH and package.module:Class"
    module, colon, attribute = name.partition(":")
    if name in ("chatml_bash", "template"):
        return []
    if module == "renderers":
        families = renderers_families()
        if attribute and (families is None or attribute in families):
            return []
        listed = f"; the families are {', '.join(families)}" if families else ""
        return [f"model.chat_format={name!r}: renderers has no family {attribute!r}{listed}"]
    if module == "template" and colon:
        return [] if Path(attribute).is_file() else [f"model.chat_format={name!r}: there is no such template file"]
    if not module or not attribute.isidentifier():
        return [f"model.chat_format={name!r} is unknown; {known}"]
    problem = _unresolvable(module, attribute)
    return [f"model.chat_format={name}: {problem}; {known}"] if problem else []


def reward_options(config: Config) -> dict[str, float]:
    """What the configured reward is made with: the scale, and those other options that are set."""
    others = {name: getattr(config.reward, name) for name in ("cap", "penalty")}
    return {"scale": config.reward.scale, **{name: value for name, value in others.items() if value}}


def _unknown_reward_options(config: Config, found: Any) -> list[str]:
    return [
        f"reward.{name}={value:g}: {config.reward._target_} has no such option"
        for name, value in reward_options(config).items()
        if not _accepts(found, **{"scale": 1.0, name: value})
    ]


def _unusable_reward(found: Any) -> str:
    """A reward is made with `scale` and then called with a verdict and a baseline."""
    if not _accepts(found, scale=1.0):
        return "is no reward: it can't be made with scale=..., as megatron_t1.environment.reward.DenseReward is"
    if inspect.isclass(found) and not any("__call__" in vars(base) for base in found.__mro__):
        return "is no reward: what it makes can't be called with a verdict"
    if inspect.isclass(found) and not _accepts(found.__call__, None, None, None):
        return "is no reward: what it makes can't be called with a verdict and a baseline"
    return ""


def _unusable_sandbox(found: Any) -> str:
    if not _accepts(found, None, None, 0):
        return "is no sandbox: it can't be made with (config, scratch_dir, output_limit)"
    lacking = [name for name in SANDBOX_METHODS if inspect.isclass(found) and not hasattr(found, name)]
    return f"is no sandbox: it has no {', '.join(lacking)}" if lacking else ""


def _accepts(found: Any, *arguments: Any, **named: Any) -> bool:
    try:
        inspect.signature(found).bind(*arguments, **named)
    except (TypeError, ValueError):  # not callable, other parameters, or a built-in without a signature
        return False
    return True


def _resolved(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _unresolvable(module: str, name: str) -> str:
    """Why `module.name` can't be imported; "" when it can."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"can't be imported ({error})"
    if found is None:
        return f"there is no module {module}"
    try:
        if not hasattr(importlib.import_module(module), name):
            return f"module {module} has no {name}"
    except Exception as error:  # a user's module may fail in any way while it is imported
        return f"can't be imported ({type(error).__name__}: {error})"
    return ""
