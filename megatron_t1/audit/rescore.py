"""A sample of trajectories scored again by an engine, from prompt log-probabilities: shifts show that no log can hide.

The engine serves the model that sampled them and is given each whole trajectory as a prompt. What it then says about
the sampled tokens is computed in another way (prefill instead of decoding), so float32 differs by rounding only. Prompt
scores know no temperature: trajectories of temperature 1 without truncation can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.audit.findings import Finding, Kind, TrajectoryAudit
from megatron_t1.config.schema import EngineConfig
from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import Origin, Trajectory

# Largest mean |difference| in nats of one trajectory. A shift by one token makes it of the order of 1.
TOLERANCE = {"float32": 1e-3}
OTHER_TOLERANCE = 0.15  # bfloat16: rounding and flipped near ties
SHIFTS = (-1, 1)


@dataclass
class Rescored:
    """What scoring again came to.

    Attributes:
        mean: |difference| over all rescored tokens, in nats; largest: of one token.
        shifted: mean |difference| when the log-probs are moved by one token, the smaller of both ways: a shift's mark.
    """

    trajectories: int = 0
    tokens: int = 0
    mean: float = 0.0
    largest: float = 0.0
    shifted: float = 0.0
    failed: int = 0
    differences: dict[int, list[np.ndarray]] = field(default_factory=dict, repr=False)  # by shift

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "differences"}

    def __str__(self) -> str:
        return (
            f"{self.trajectories} trajectories scored again ({self.tokens:,} tokens), {self.failed} failed: "
            f"mean |difference| {self.mean:.2g} nats, largest {self.largest:.2g}; "
            f"with the log-probs moved by one token it would be {self.shifted:.2g}"
        )


def choose(names: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """A sample of `count` names, the same for the same names and seed."""
    random = np.random.default_rng(seed)
    picked = random.permutation(len(names))[:count]
    return [sorted(names)[index] for index in sorted(picked.tolist())]


def can_rescore(trajectory: Trajectory) -> bool:
    contract = trajectory.header.contract
    return contract is not None and contract.temperature == 1.0 and contract.top_p == 1.0


async def rescore(
    sample: Sequence[tuple[Trajectory, TrajectoryAudit]],
    model_dir: Path,
    engine: EngineConfig,
    *,
    log_path: Path,
) -> Rescored:
    """Score `sample` again with an engine that serves `model_dir`; findings are added to the audits.

    Raises:
        T1Error: the sample can't be compared (temperature, top-p), or is of several engine dtypes.
        EngineLost: the engine didn't start.
    """
    from megatron_t1.rollout.engine.client import EngineClient
    from megatron_t1.rollout.engine.server import VllmServer

    refused = [trajectory.header.trajectory_id for trajectory, _ in sample if not can_rescore(trajectory)]
    if refused:
        raise T1Error(
            "only what was sampled at temperature 1 and top-p 1 can be scored again: so are the engine's prompt scores",
            where=f"trajectory {refused[0]}",
            remedy="leave --rescore out for this rollout",
        )
    dtypes = {trajectory.header.contract.engine_dtype for trajectory, _ in sample}
    if len(dtypes) > 1:
        raise T1Error(f"the trajectories were sampled in {', '.join(sorted(dtypes))}", remedy="audit them one by one")
    (dtype,) = dtypes
    longest = max(len(trajectory) for trajectory, _ in sample) + 1
    result = Rescored()
    server = VllmServer(engine, model_dir, dtype, log_path, max_model_len=longest, routes=False)
    async with server, EngineClient(server.url, check_alive=server.check_alive, model=server.served_name) as client:
        for trajectory, audit in sample:
            scores = await client.score(trajectory.ids, where=trajectory.header.trajectory_id)
            _count(result, trajectory, audit, scores, TOLERANCE.get(dtype, OTHER_TOLERANCE))
    joined = {shift: np.concatenate(parts) for shift, parts in result.differences.items()}
    if joined:
        result.mean, result.largest = float(joined[0].mean()), float(joined[0].max())
        result.shifted = min(float(joined[shift].mean()) for shift in SHIFTS)
    return result


def _count(
    result: Rescored, trajectory: Trajectory, audit: TrajectoryAudit, scores: np.ndarray, tolerance: float
) -> None:
    at = np.flatnonzero(trajectory.origin == Origin.SAMPLED)
    result.trajectories += 1
    result.tokens += len(at)
    if not len(at):
        return
    stated = trajectory.logprobs[at].astype(np.float64)
    for shift in (0, *SHIFTS):
        moved = np.clip(at + shift, 1, len(trajectory) - 1)
        result.differences.setdefault(shift, []).append(np.abs(scores[moved] - stated))
    difference = result.differences[0][-1]
    mean = float(difference.mean())
    if not mean <= tolerance:
        worst = int(at[difference.argmax()])
        result.failed += 1
        detail = f"mean |difference| {mean:.3g} nats over {len(at)} sampled tokens, allowed {tolerance:g}"
        audit.findings.append(Finding(Kind.RESCORED, detail, worst, int(trajectory.turn[worst]), len(at), len(at)))
