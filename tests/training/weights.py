"""Parameters of a checkpoint of any layout, as one vector in a lone process."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from megatron_t1.config.schema import Config
from megatron_t1.paths import RunPaths
from tests.tiny_model import tiny_config


def parameters(config: Config, backend, role: str, version: int) -> torch.Tensor:
    """float64 [parameters] of actor or critic `version`; actor 0 and critic 0 are the start model."""
    if version:
        return checkpoint_parameters(RunPaths.of(config.run.dir).checkpoint(role, version), backend, role)
    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import load_hf

    kind = "policy" if role == "actor" else "value"
    chunks = build_model(tiny_config(), backend, kind, initialize=False)
    load_hf(chunks, config.model.path, kind)
    return _vector(chunks)


def checkpoint_parameters(directory: Path, backend, role: str) -> torch.Tensor:
    """float64 [parameters] of a checkpoint that any layout wrote."""
    from megatron_t1.model.build import build_model
    from megatron_t1.model.checkpoint import load_checkpoint

    chunks = build_model(tiny_config(), backend, "policy" if role == "actor" else "value", initialize=False)
    load_checkpoint(directory, chunks, None)
    return _vector(chunks)


def _vector(chunks: list) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1).double() for _, value in sorted(chunks[0].named_parameters())])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def tree_digest(directory: Path) -> dict[str, str]:
    """Content of every file below `directory`."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
