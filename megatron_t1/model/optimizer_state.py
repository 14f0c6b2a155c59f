"""What a checkpoint needs to know about a Megatron optimizer."""

from __future__ import annotations

from typing import Any

import torch


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch (or fused) optimizers inside a Megatron optimizer, one for each group of parameters."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if getattr(part, "optimizer", None) is not None]


def complete_adam_state(optimizer: Any) -> None:
    """Give torch's Adam the state of zero steps wherever it has none, `step` included.

    Megatron stores moments and one common step; it asks for the moments of every parameter, and a torch Adam whose
    state lacks `step` fails at its next step.
    """
    for inner in inner_optimizers(optimizer):
        if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                state.setdefault("exp_avg", torch.zeros_like(parameter.data))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter.data))


def restore_zero_steps(state: Any) -> None:
    """Put a step count of 0 into a loaded optimizer state that has none: Megatron doesn't store zero.

    Args:
        state: what dist_checkpointing loaded for a Megatron optimizer; nested where optimizers are chained.
    """
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return
    if "param_groups" not in state:
        for part in state.values():
            restore_zero_steps(part)
        return
    moments = state["state"]
    counted = "common_step" in moments or any("step" in group for group in state["param_groups"])
    if moments and not counted and not any("step" in entry for entry in moments.values()):
        moments["common_step"] = torch.tensor(0.0)


def optimizer_metadata(optimizer: Any) -> dict[str, Any] | None:
    """How a distributed optimizer's shards are written: so that they load in another data-parallel size."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if any(type(part).__name__ == "DistributedOptimizer" for part in parts):
        return {"distrib_optim_sharding_type": "fully_reshardable"}
    return None


def optimizer_identity(config: Any, optimizer: Any | None) -> dict[str, Any] | None:
    """What must be equal for a stored optimizer to be loaded: Megatron names its entries by these."""
    if optimizer is None:
        return None
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return {
        "kind": type(parts[0]).__name__,
        "chained": len(parts),
        "expert_parallel": config.expert_model_parallel_size > 1,
    }
