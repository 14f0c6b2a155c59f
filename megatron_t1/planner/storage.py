"""Bytes that an iteration writes, by the formats' own sizes. Compression is nowhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_t1.config.dtypes import OPTIMIZER_BYTES, WIDTHS
from megatron_t1.config.schema import Config
from megatron_t1.planner.parameters import total_parameters
from megatron_t1.planner.work import Volume
from megatron_t1.trajectory.exchange import FRAME, TURN_FIELDS
from megatron_t1.trajectory.routes import route_row_bytes
from megatron_t1.trajectory.validation import FIELD_DTYPES, OPTIONAL_FIELDS

VALUE_FIELDS = 3  # old value, advantage and return of a sampled token, float32
LOGGED_PROMPT, LOGGED_SAMPLED = 4, 8  # bytes of the exchange log for one token: its id; id and log-probability


def token_bytes() -> int:
    """Of one token in a record, without its routes."""
    return sum(np.dtype(kinds[0]).itemsize for name, kinds in FIELD_DTYPES.items() if name not in OPTIONAL_FIELDS)


def record_bytes(config: Config) -> float:
    """Records of an iteration, with routes."""
    routes = route_row_bytes(config.model.architecture) if config.rollout.routes else 0
    return Volume.of(config).tokens * (token_bytes() + routes)


def checkpoint_bytes(config: Config, role: str) -> int:
    """One checkpoint of a role: parameters, both moments, and master copies where the model isn't in float32."""
    dtype = config.model.dtype
    return total_parameters(config.model.architecture, role) * (WIDTHS[dtype] + OPTIMIZER_BYTES[dtype])


def export_bytes(config: Config) -> int:
    """One export: what is trained. What only passes through (vision, multi-token prediction) comes on top."""
    return total_parameters(config.model.architecture) * WIDTHS[config.model.dtype]


@dataclass(frozen=True)
class Written:
    """What one iteration writes, and how much of it stays.

    Attributes:
        parts: what -> bytes of one iteration.
        lasting: bytes that a run of `loop.iterations` has on its disk in the end.
    """

    parts: dict[str, int]
    lasting: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def written(config: Config) -> Written:
    """Of one iteration with an actor update."""
    volume, loop, routed = Volume.of(config), config.loop, config.rollout.routes
    routes = volume.tokens * route_row_bytes(config.model.architecture) if routed else 0
    sampled = volume.trajectories * volume.sampled_tokens
    frames = volume.trajectories * volume.turns * (FRAME.size + TURN_FIELDS.size)
    parts = {
        "records, without routes": record_bytes(config) - routes,
        "routes": routes,
        "exchange log": frames + LOGGED_SAMPLED * sampled + LOGGED_PROMPT * (volume.tokens - sampled),
        "values": 4 * VALUE_FIELDS * sampled,
        "critic's checkpoint": checkpoint_bytes(config, "value"),
        "actor's checkpoint": checkpoint_bytes(config, "policy"),
        "export": export_bytes(config),
    }
    parts = {name: int(size) for name, size in parts.items()}
    iterations = loop.warmup_iterations + loop.iterations
    kept = min(iterations, config.train.keep_checkpoints)
    rollouts = min(iterations, loop.keep_rollouts or iterations)
    exports = min(loop.iterations, loop.keep_exports or kept)
    lasting = (
        kept * (parts["critic's checkpoint"] + parts["actor's checkpoint"])
        + rollouts * sum(parts[name] for name in ("records, without routes", "routes", "exchange log", "values"))
        + exports * parts["export"]
    )
    return Written(parts, lasting)
