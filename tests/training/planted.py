"""Rollouts whose log-probs and routes are this trainer's own, so that the gap is exactly what a test plants in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_t1.atomic import sha256_file
from megatron_t1.config.schema import Config
from megatron_t1.trajectory.record import Trajectory
from tests.training.synthetic import contract, episode


def records(count: int, model: Path, *, temperature: float = 1.0) -> list[Trajectory]:
    """Episodes under a contract that names the temperature; what they hold as log-probs is made up."""
    agreed = contract(sha256_file(model / "tokenizer.json"), temperature=temperature)
    return [episode(f"task{number}-0", turns=2 + number % 4, agreed=agreed) for number in range(count)]


def played(
    config: Config,
    backend: Any,
    model: Path,
    taken: list[Trajectory],
    *,
    temperature: float = 1.0,
    rounded: torch.dtype | None = None,
) -> list[Trajectory]:
    """The records with the log-probs and routes that a sampler with these weights and this temperature reports.

    Args:
        config: of the sampler: its type of parameters counts.
    """
    from megatron_t1.model.convert import load_hf
    from megatron_t1.training.context import Context
    from megatron_t1.training.engine import Engine
    from megatron_t1.training.passes import read_logprobs
    from megatron_t1.training.samples import Sample

    engine = Engine(config, backend, "policy", None, replay=False)
    load_hf(engine.chunks, model, role="policy")
    samples = [Sample.of(record) for record in taken]
    groups = Context(config, backend, 0).groups(samples)
    batches = engine.micro_batches(groups, replay=False)

    def read(hidden, batch):
        found = read_logprobs(
            engine.chunks[-1], hidden, batch, temperature=temperature, projected_at_once=64, rounded=rounded
        )
        return {"logprobs": found["logprobs"]}

    found = {}
    for batch, result, routes in zip(batches, engine.score(batches, read), engine.record_routes(batches), strict=True):
        rows = batch.layout.scatter([routes.numpy()])
        for sample, scores, own in zip(batch.samples, batch.per_sample(result["logprobs"].numpy()), rows, strict=True):
            found[sample.name] = scores, own
    return [_with(record, *found[record.header.trajectory_id]) for record in taken]


def _with(record: Trajectory, scores: np.ndarray, routes: np.ndarray) -> Trajectory:
    logprobs = np.full(len(record), np.nan, np.float32)
    logprobs[record.loss_mask] = scores
    return replace(record, logprobs=logprobs, routes=routes)
