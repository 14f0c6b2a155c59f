"""What a checkpoint needs to know about a Megatron optimizer.

Megatron's optimizers without shards (FP32Optimizer, Float16OptimizerWithFloat16Params) are stored as moments and master
weights by parameter name, and one count of steps: these load in any layout. Everything else in Megatron's own state
follows from the configuration, or changes with the layout (whether experts have an optimizer of their own, and which
prefix it gives its names). A DistributedOptimizer's state is left as Megatron makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

_CHAINED = re.compile(r"chained_\d+\.")  # Megatron's prefix of names where experts have an optimizer of their own


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch (or fused) optimizers inside a Megatron optimizer, one for each group of parameters."""
    return [part.optimizer for part in _parts(optimizer) if getattr(part, "optimizer", None) is not None]


def optimizer_entries(optimizer: Any, model_entries: dict[str, Any]) -> Any:
    """An optimizer's sharded state, as Megatron's `save` takes it."""
    return _portable(_sharded(optimizer, model_entries)) if is_portable(optimizer) else _whole(optimizer, model_entries)


class OptimizerLoader:
    """Loads what `optimizer_entries` stored, into an optimizer of any layout that can take it.

    Attributes:
        entries: what Megatron's `load` is to fill.
    """

    def __init__(self, optimizer: Any, model_entries: dict[str, Any]):
        self.optimizer = optimizer
        self.state: Any = None
        if is_portable(optimizer):
            self.state = _sharded(optimizer, model_entries, is_loading=True)
            self.entries = _portable(self.state)
        else:
            self.entries = _whole(optimizer, model_entries, is_loading=True)

    def fill(self, loaded: Any, identity: dict[str, Any]) -> None:
        """Take over what Megatron's `load` returned in place of `entries`.

        Args:
            identity: the stored optimizer's (`optimizer_identity`).
        """
        if self.state is None:
            _restore_zero_steps(loaded)
            state = loaded
        else:
            state = self.state
            for number, (container, key, _) in enumerate(list(_leaves(state, ShardedBase))):
                container[key] = loaded[str(number)]
            for container, key, leaf in list(_leaves(state, LocalNonpersistentObject)):
                container[key] = leaf.unwrap()
            self._count(state, identity["steps"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state)

    def _count(self, state: dict, steps: int) -> None:
        """Put the step count where torch's Adam (beside the moments) or a fused one (in its groups) looks for it."""
        chained = [state[number] for number in sorted(state)] if all(isinstance(key, int) for key in state) else [state]
        for part, inner in zip(chained, inner_optimizers(self.optimizer), strict=True):
            own = part.get("optimizer", part)
            if _counts_by_parameter(inner):
                own["state"]["common_step"] = torch.tensor(float(steps))
            else:
                for group in own["param_groups"]:
                    group["step"] = steps


def begin_anew(optimizer: Any) -> None:
    """Moments and step counts of zero. What an optimizer keeps stays where it is: a fused one saves what it has."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if name in state:
                    state[name].zero_()
        for group in inner.param_groups:
            if "step" in group:  # where fused optimizers count
                group["step"] = group["step"] * 0


def is_portable(optimizer: Any) -> bool:
    """Whether the optimizer's state loads in any layout."""
    return all(type(part).__name__ != "DistributedOptimizer" for part in _parts(optimizer))


def optimizer_identity(config: Any, optimizer: Any | None) -> dict[str, Any] | None:
    """What a checkpoint notes about its optimizer. What isn't called `steps` must be equal for it to be loaded.

    Args:
        config: Megatron's of the model. A DistributedOptimizer's entries are named by whether experts are parallel.
    """
    if optimizer is None:
        return None
    # Megatron's own class: a stage with parameters of two types has one of ours for the same state (mixed_optimizer).
    kind = next(base for base in type(_parts(optimizer)[0]).__mro__ if base.__module__.startswith("megatron.core"))
    identity = {"kind": kind.__name__, "steps": _steps(optimizer)}
    if not is_portable(optimizer):
        identity["chained"] = len(_parts(optimizer))
        identity["expert_parallel"] = config.expert_model_parallel_size > 1
    return identity


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _counts_by_parameter(inner: Any) -> bool:
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def _steps(optimizer: Any) -> int:
    counts = [0]
    for inner in inner_optimizers(optimizer):
        if _counts_by_parameter(inner):
            counts += [int(state["step"]) for state in list(inner.state.values())[:1] if "step" in state]
        else:
            counts += [int(group.get("step", 0)) for group in inner.param_groups]
    return max(counts)


def _complete_adam_state(optimizer: Any) -> None:
    """Give torch's Adam the state of zero steps wherever it has none, `step` included.

    Megatron stores moments and one common step; it asks for the moments of every parameter, and a torch Adam whose
    state lacks `step` fails at its next step.
    """
    for inner in inner_optimizers(optimizer):
        if not _counts_by_parameter(inner):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                state.setdefault("exp_avg", torch.zeros_like(parameter.data))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter.data))


def _whole(optimizer: Any, model_entries: dict[str, Any], *, is_loading: bool = False) -> Any:
    """Megatron's own form of a DistributedOptimizer, sharded so that it loads in another data-parallel size."""
    return _sharded(
        optimizer, model_entries, is_loading=is_loading, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
    )


def _sharded(optimizer: Any, model_entries: dict[str, Any], **options: Any) -> Any:
    _complete_adam_state(optimizer)
    return optimizer.sharded_state_dict(dict(model_entries), **options)


def _portable(state: Any) -> dict[str, ShardedBase]:
    """The sharded entries alone, by their number, under names without Megatron's prefix."""
    entries = {}
    for number, (_, _, leaf) in enumerate(_leaves(state, ShardedBase)):
        leaf.key = _CHAINED.sub("", leaf.key, count=1)
        entries[str(number)] = leaf
    return entries


def _leaves(state: Any, kind: type) -> Iterator[tuple[Any, Any, Any]]:
    """(container, key, leaf) of every leaf of this kind, in the state's order."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, kind):
            yield state, key, value
        elif isinstance(value, dict | list):
            yield from _leaves(value, kind)


def _restore_zero_steps(state: Any) -> None:
    """Put a step count of 0 into a loaded optimizer state that has none: Megatron doesn't store zero.

    Args:
        state: what dist_checkpointing loaded for a DistributedOptimizer; nested where optimizers are chained.
    """
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return
    if "param_groups" not in state:
        for part in state.values():
            _restore_zero_steps(part)
        return
    moments = state["state"]
    counted = "common_step" in moments or any("step" in group for group in state["param_groups"])
    if moments and not counted and not any("step" in entry for entry in moments.values()):
        moments["common_step"] = torch.tensor(0.0)
