"""What a training came to, to compare it with another one that was sampled with the same seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths, numbered
from megatron_t1.phase import PhaseResult, missing_outputs
from megatron_t1.trajectory.store import RolloutStore
from tests.workshop import played

# Weights trained on the same tokens but, after near ties that a prefix cache decides otherwise, not the same experts.
TOLERANCE = 1e-4
COUNTED = ("optimizer_steps", "learning_rate")


@dataclass(frozen=True)
class Difference:
    """Two trainings whose tokens, steps and counters are equal.

    Attributes:
        weights, optimizer: largest difference of a tensor's elements, over its largest element; 0: equal to the bit.
        records: trajectories of which experts or rewards, which the update reads beside the tokens, differ.
    """

    weights: float
    optimizer: float
    records: int


def outcome(paths: RunPaths) -> dict[str, Any]:
    """What must be equal: trajectories to the token, steps, data cursor, seeds, versions and counters."""
    manifest = Manifest.read_exactly(paths.manifest)
    found: dict[str, Any] = {"steps": [step.key for step in manifest.finished]}
    for step in manifest.finished:
        result = PhaseResult.read(paths.phase(*step.key))
        assert missing_outputs(result, paths.root, digests=True) == []
        found[f"{step.key}"] = step.position
        if step.phase in ("critic", "actor"):
            names = (*(f"{step.phase}/{name}" for name in COUNTED), "batch/loss_tokens", "batch/mean_reward")
            found[f"{step.key}, metrics"] = {name: result.metrics[name] for name in names}
    for directory in numbered(paths.root / "rollouts"):
        found[directory.name] = played(directory)
    return found


def difference(one: RunPaths, other: RunPaths) -> Difference:
    """Of two finished trainings with equal `outcome`: exports, and what the newest checkpoints hold.

    Raises:
        AssertionError: the records are equal, and weights or optimizer state are not; or they differ by too much.
    """
    weights = max(_distance(_export(a), _export(b)) for a, b in _pairs(one, other, "hf"))
    optimizer = max(
        _distance(_checkpoint(a), _checkpoint(b))
        for role in ("actor", "critic")
        for a, b in _pairs(one, other, f"checkpoints/{role}")
    )
    records = sum(
        _trained_on(a) != _trained_on(b)
        for directory in numbered(one.root / "rollouts")
        for a, b in zip(RolloutStore(directory), RolloutStore(other.root / "rollouts" / directory.name), strict=True)
    )
    found = Difference(weights, optimizer, records)
    assert max(weights, optimizer) <= (TOLERANCE if records else 0.0), found
    return found


def _pairs(one: RunPaths, other: RunPaths, folder: str) -> list[tuple[Path, Path]]:
    names = [[directory.name for directory in numbered(paths.root / folder)] for paths in (one, other)]
    assert names[0] == names[1] != [], names
    return [(one.root / folder / name, other.root / folder / name) for name in names[0]]


def _trained_on(record: Any) -> tuple[Any, ...]:
    parts = (record.ids, record.origin, record.routes)
    return *(hashlib.sha256(np.ascontiguousarray(part)).hexdigest() for part in parts), record.header.reward


def _export(directory: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: array for path in directory.glob("*.safetensors") for name, array in load_file(path).items()}


def _checkpoint(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a torch_dist checkpoint: weights, master weights, moments."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(_tensors("", state))


def _tensors(name: str, value: Any):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _tensors(f"{name}/{number}", inner)
    elif hasattr(value, "detach"):
        yield name, value.detach().to(dtype=_wide(value)).numpy()


def _wide(tensor: Any) -> Any:
    import torch

    return torch.float64 if tensor.is_floating_point() else tensor.dtype


def _distance(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    assert first.keys() == second.keys() != set()
    worst = 0.0
    for name, values in first.items():
        a, b = values.astype(np.float64), second[name].astype(np.float64)
        assert a.shape == b.shape, name
        if a.size:
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-12)))
    return worst
