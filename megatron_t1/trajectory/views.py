"""Derived views of a record: spans and turns. Nothing here is stored; the stream is the source of truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_t1.trajectory.record import Origin, Trajectory


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` (exclusive) of one origin in one turn."""

    start: int
    stop: int
    origin: Origin
    turn: int


def spans(trajectory: Trajectory) -> list[Span]:
    """The stream as maximal runs of equal origin and turn, in order, without gaps."""
    origin, turn = trajectory.origin, trajectory.turn
    changes = np.flatnonzero((origin[1:] != origin[:-1]) | (turn[1:] != turn[:-1])) + 1
    edges = [0, *changes.tolist(), len(trajectory)]
    return [
        Span(start, stop, Origin(int(origin[start])), int(turn[start]))
        for start, stop in zip(edges, edges[1:], strict=False)
    ]


@dataclass(frozen=True)
class Turn:
    """What one assistant turn consists of."""

    number: int
    tokens: int  # that carry loss
    environment_tokens: int
    policy_version: int | None
    mean_logprob: float  # of its sampled tokens; NaN without any


def turns(trajectory: Trajectory) -> list[Turn]:
    """One row for each assistant turn that has tokens of its own, in order."""
    versions, mask = trajectory.header.policy_versions, trajectory.loss_mask
    found = []
    for number in np.unique(trajectory.turn[mask]).tolist():
        here = trajectory.turn == number
        sampled = trajectory.logprobs[here & (trajectory.origin == Origin.SAMPLED)]
        found.append(
            Turn(
                number=number,
                tokens=int((here & mask).sum()),
                environment_tokens=int((here & (trajectory.origin == Origin.ENVIRONMENT)).sum()),
                policy_version=versions[number] if number < len(versions) else None,
                mean_logprob=float(sampled.mean()) if len(sampled) else float("nan"),
            )
        )
    return found


def tokens_before_last_loss(trajectory: Trajectory) -> int:
    """How many leading tokens a training step needs rows of routes for: all before the last one that carries loss.

    What follows (a reply that nobody answered before the time was over) was never given to an engine, so it has none.
    """
    loss = np.flatnonzero(trajectory.loss_mask)
    return int(loss[-1]) if loss.size else 0


def route_coverage(trajectory: Trajectory) -> float:
    """Share of tokens with recorded routes, of those that can have any (the very last one can't); 0 without routes."""
    if trajectory.routes is None or len(trajectory) < 2:
        return 0.0
    return float(trajectory.routed[:-1].mean())
