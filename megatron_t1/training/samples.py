"""What training sees of the records: trainable trajectories, checked, with per-loss-token fields.

N is the number of loss tokens of one trajectory. A field is an array of N numbers in stream order, so a field can't be
shifted against another one: positions are only assigned in `batch.py`, by the layout.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1 import atomic
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.routing.validation import validate_routes
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.selection import demonstrates, select
from megatron_t1.trajectory.sidecar import Sidecar
from megatron_t1.trajectory.store import RolloutStore

DEMONSTRATIONS_MANIFEST = "demonstrations.json"  # written by rollout.demonstrate


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
    task: str = ""

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
            fields={"sampler_logprobs": trajectory.logprobs[mask], "turn": trajectory.turn[mask]},
            task=trajectory.header.task,
        )


@dataclass
class SampleSet:
    samples: list[Sample]
    excluded: dict[str, int]  # reason -> trajectories

    @property
    def loss_tokens(self) -> int:
        return sum(sample.loss_tokens for sample in self.samples)


def load_rollouts(
    directory: Path, config: Config, model_facts: Mapping[str, Any], *, only: Collection[str] | None = None
) -> SampleSet:
    """Trainable trajectories of a rollout, in the order of their ids.

    Args:
        model_facts: fields of the sampling contract that the model in training fixes, and its vocab_size.
        only: ids of the trajectories that are wanted; None: all.

    Raises:
        IncompleteError: the rollout is missing or holds nothing to train on.
        MismatchError: it was sampled under another contract, or has ids the model doesn't know.
        T1Error: routes that don't fit the model, or missing while replay is on (miles#407).
    """
    if not directory.is_dir():
        raise IncompleteError("no rollout to train on", where=str(directory), remedy="run the rollout phase first")
    store = RolloutStore(directory)
    wanted = (store.load(name) for name in store.ids() if only is None or name in only)
    selection = select(wanted, timed_out_policy=config.env.timed_out_policy)
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
    own_router = expected.pop("router_dtype", "")
    warn_of_other_router(selection.kept, own_router, where=str(directory))
    replaying = config.train.replaying_roles
    for trajectory in selection.kept:
        where = f"{directory}, trajectory {trajectory.header.trajectory_id}"
        if trajectory.header.contract is None:
            raise T1Error(
                "a trajectory without a sampling contract can't be trained on by PPO",
                where=where,
                remedy="demonstrations belong to `t1 train sft`",
            )
        trajectory.header.contract.require_equal(expected, where=where)
        trajectory.header.contract.require_comparable(where=where)
        _require_known_ids(trajectory, model_facts.get("vocab_size", 0), where)
        if replaying:
            if trajectory.routes is None:
                raise T1Error(
                    "routing replay is on but the trajectory has no routes",
                    where=where,
                    remedy="roll out with rollout.routes=true, or set "
                    + " and ".join(f"train.replay.{role}=false" for role in replaying),
                )
            validate_routes(
                trajectory,
                num_experts=expected["num_experts"],
                top_k=expected["top_k"],
                num_moe_layers=expected["num_moe_layers"],
            )
    return SampleSet([Sample.of(trajectory) for trajectory in selection.kept], selection.counts)


def router_dtype(config: Config) -> str:
    """Type of the router's logits in training; "" for a model without experts."""
    if not config.model.architecture.num_experts:
        return ""
    return config.model.dtype if config.train.router_dtype == "model" else config.train.router_dtype


def warn_of_other_router(trajectories: Iterable[Trajectory], own: str, *, where: str) -> None:
    """Warn where the sampler's routers computed in another type than training's: near ties fall otherwise.

    No error: replay takes the sampler's choice whatever the type, and what is left (the gates' probabilities) is
    rounding, as in the rest of a bfloat16 model. prime-rl#2952 Automodel#3650
    """
    contracts = [trajectory.header.contract for trajectory in trajectories if trajectory.header.contract is not None]
    others = sorted({contract.router_dtype for contract in contracts} - {"", own})
    if others and own:
        warnings.warn(
            f"{where}: the sampler's routers computed in {', '.join(others)}, training's compute in {own}; without "
            "replay they choose other experts. train.router_dtype=model (in a checkout: no --moe-router-dtype) takes "
            "the model's type; `t1 gap` says what that changes",
            stacklevel=2,
        )


def load_demonstrations(directory: Path, *, vocab_size: int = 0, tokenizer_sha256: str = "") -> list[Sample]:
    """Demonstrations in the order of their ids.

    Args:
        vocab_size, tokenizer_sha256: of the model in training; not compared where they aren't given.

    Raises:
        IncompleteError: there are none, or one was changed after it was written.
        MismatchError: they were written with another tokenizer.
        T1Error: a record that demonstrates nothing.
    """
    _require_same_tokenizer(directory, tokenizer_sha256)
    samples = []
    store = RolloutStore(directory)
    for name in store.ids():
        trajectory = store.load(name, verify=True)
        where = f"{directory}, trajectory {trajectory.header.trajectory_id}"
        if (reason := demonstrates(trajectory)) is not None:
            raise T1Error(
                f"the record is no demonstration: {reason.replace('_', ' ')}",
                where=where,
                remedy="train.sft.demonstrations names what `t1 tasks demonstrate` wrote; rollouts belong to PPO",
            )
        _require_known_ids(trajectory, vocab_size, where)
        samples.append(Sample.of(trajectory))
    if not samples:
        raise IncompleteError(
            "no demonstrations found", where=str(directory), remedy="make them with `t1 tasks demonstrate`"
        )
    return samples


def _require_same_tokenizer(directory: Path, tokenizer_sha256: str) -> None:
    """Compare with what `t1 tasks demonstrate` noted beside the records, where it did."""
    path = directory / DEMONSTRATIONS_MANIFEST
    if not tokenizer_sha256 or not path.is_file():
        return
    try:
        found = json.loads(path.read_text())["tokenizer_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IncompleteError(f"the manifest can't be read: {error}", where=str(path)) from error
    if found != tokenizer_sha256:
        raise MismatchError(
            f"the demonstrations were written with tokenizer {found}, the model has {tokenizer_sha256}",
            where=str(path),
            remedy="make demonstrations with this model: `t1 tasks demonstrate model.path=...`",
        )


def _require_known_ids(trajectory: Trajectory, vocab_size: int, where: str) -> None:
    largest = int(trajectory.ids.argmax())
    if vocab_size and trajectory.ids[largest] >= vocab_size:
        raise MismatchError(
            f"token {largest} is {trajectory.ids[largest]}, the model has {vocab_size} tokens",
            where=where,
            remedy="train the model whose tokenizer wrote it",
        )


def attach(samples: Iterable[Sample], sidecar: Sidecar, names: Sequence[str]) -> None:
    """Add fields of a sidecar (values, advantages, ...) to their samples, by record digest.

    Raises:
        IncompleteError: a sample has no entry, or one of another length: the rollout changed after the critic phase.
    """
    for sample in samples:
        for name in names:
            try:
                sample.fields[name] = sidecar.array(sample.key, name, sample.loss_tokens)
            except IncompleteError as error:
                raise IncompleteError(
                    error.problem, where=f"{error.where}, trajectory {sample.name}", remedy=error.remedy
                ) from error


def tokenizer_digest(model_dir: Path) -> str:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise IncompleteError("the model has no tokenizer.json", where=str(model_dir), remedy="check model.path")
    return atomic.sha256_file(path)
