"""What training sees of the records: trainable trajectories, checked, with per-loss-token fields.

N is the number of loss tokens of one trajectory. A field is a float32 [N] array in stream order, so a field can't be
shifted against another one: positions are only assigned in `batch.py`, by the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1 import atomic
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.routing.validation import validate_routes
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.selection import select
from megatron_t1.trajectory.sidecar import Sidecar
from megatron_t1.trajectory.store import RolloutStore


@dataclass
class Sample:
    """One trajectory as the trainer uses it."""

    name: str
    key: str  # digest of the record
    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    routes: np.ndarray | None  # uint8 or uint16 [T, L, K]
    routed: np.ndarray  # bool [T]
    reward: float
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sample:
        mask = trajectory.loss_mask.copy()
        if mask[0]:
            raise T1Error(
                "the first token of the stream carries loss, but nothing precedes it that could predict it",
                where=trajectory.header.trajectory_id,
                remedy="start the stream with a prompt",
            )
        return cls(
            name=trajectory.header.trajectory_id,
            key=trajectory.digest,
            ids=trajectory.ids,
            loss_mask=mask,
            routes=trajectory.routes,
            routed=trajectory.routed,
            reward=float(trajectory.header.reward.get("total", 0.0)),
            fields={"sampler_logprobs": trajectory.logprobs[mask]},
        )


@dataclass
class SampleSet:
    samples: list[Sample]
    excluded: dict[str, int]  # reason -> trajectories

    @property
    def loss_tokens(self) -> int:
        return sum(sample.loss_tokens for sample in self.samples)


def load_rollouts(directory: Path, config: Config, model_facts: Mapping[str, Any]) -> SampleSet:
    """Trainable trajectories of a rollout, in the order of their ids.

    Args:
        model_facts: fields of the sampling contract that the model in training fixes.

    Raises:
        IncompleteError: the rollout is missing or holds nothing to train on.
        MismatchError: it was sampled under another contract.
        T1Error: routes that don't fit the model, or missing while replay is on (miles#407).
    """
    if not directory.is_dir():
        raise IncompleteError("no rollout to train on", where=str(directory), remedy="run the rollout phase first")
    selection = select(RolloutStore(directory), timed_out_policy=config.env.timed_out_policy)
    if not selection.kept:
        raise IncompleteError(
            f"none of {len(selection.excluded)} trajectories can be trained on: {selection.counts}",
            where=str(directory),
            remedy="look at the verdicts with `t1 show RUN`; a failing verifier or sandbox is the usual cause",
        )
    expected = {
        **model_facts,
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
    }
    needs_routes = config.train.replay.actor or config.train.replay.critic
    for trajectory in selection.kept:
        where = f"{directory}, trajectory {trajectory.header.trajectory_id}"
        if trajectory.header.contract is None:
            raise T1Error(
                "a trajectory without a sampling contract can't be trained on by PPO",
                where=where,
                remedy="demonstrations belong to `t1 train sft`",
            )
        trajectory.header.contract.require_equal(expected, where=where)
        if needs_routes:
            if trajectory.routes is None:
                raise T1Error(
                    "routing replay is on but the trajectory has no routes",
                    where=where,
                    remedy="roll out with rollout.routes=true, or set train.replay.actor=false and critic=false",
                )
            validate_routes(
                trajectory,
                num_experts=expected["num_experts"],
                top_k=expected["top_k"],
                num_moe_layers=expected["num_moe_layers"],
            )
    return SampleSet([Sample.of(trajectory) for trajectory in selection.kept], selection.counts)


def load_demonstrations(directory: Path) -> list[Sample]:
    store = RolloutStore(directory)
    samples = [Sample.of(trajectory) for trajectory in store] if directory.is_dir() else []
    if not samples:
        raise IncompleteError(
            "no demonstrations found", where=str(directory), remedy="make them with `t1 tasks demonstrate`"
        )
    return samples


def attach(samples: Iterable[Sample], sidecar: Sidecar, names: Sequence[str]) -> None:
    """Add fields of a sidecar (values, advantages, ...) to their samples, by record digest.

    Raises:
        IncompleteError: a sample has no entry, or one of another length: the rollout changed after the critic phase.
    """
    for sample in samples:
        for name in names:
            sample.fields[name] = sidecar.array(sample.key, name, sample.loss_tokens)


def tokenizer_digest(model_dir: Path) -> str:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise IncompleteError("the model has no tokenizer.json", where=str(model_dir), remedy="check model.path")
    return atomic.sha256_file(path)
