"""Which trajectories are trained on: one predicate, shared by losses, metrics and counts (verl#7970).

What is left out is excluded as a whole and counted under its reason; nothing is turned into a reward of zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_t1.errors import ConfigError
from megatron_t1.trajectory.record import EndReason, Origin, Trajectory

UNVERIFIED = "unverified"
UNTRUSTED = "untrusted_verdict"
NO_REWARD = "no_reward"
NO_SAMPLED_TOKEN = "no_sampled_token"
NO_DEMONSTRATION = "no_demonstration_token"
MIXED = "sampled_and_demonstrated"
TIMED_OUT = "agent_timeout"
INFRASTRUCTURE = "infrastructure_lost"
TIMED_OUT_POLICIES = ("score", "exclude")


def trainable(trajectory: Trajectory, *, timed_out_policy: str = "score") -> str | None:
    """Why PPO must not train on a trajectory, or None when it may.

    A truncated trajectory (turn or token limit) with a trusted verdict is trained on: its reward is known. One that
    lost its sandbox or engine isn't: its end says nothing about the policy.

    Args:
        timed_out_policy: `env.timed_out_policy`: "score" trains on verified trajectories that ended by agent timeout,
            "exclude" doesn't. Of a task of several steps one that ended so is enough.
    """
    if timed_out_policy not in TIMED_OUT_POLICIES:
        raise ConfigError(f"timed_out_policy is {timed_out_policy!r}, known: {', '.join(TIMED_OUT_POLICIES)}")
    header = trajectory.header
    if header.end_reason in EndReason.LOST:
        return INFRASTRUCTURE
    if header.verdict is None:
        return UNVERIFIED
    if not header.verdict.trusted:
        return UNTRUSTED
    ends = {header.end_reason, *(step.end_reason for step in header.steps)}
    if EndReason.AGENT_TIMEOUT in ends and timed_out_policy == "exclude":
        return TIMED_OUT
    if not np.isfinite(header.reward.get("total", np.nan)):
        return NO_REWARD
    return _only(trajectory, Origin.SAMPLED, NO_SAMPLED_TOKEN)


def demonstrates(trajectory: Trajectory) -> str | None:
    """Why SFT can't train on a trajectory, or None when it can."""
    return _only(trajectory, Origin.DEMONSTRATION, NO_DEMONSTRATION)


def _only(trajectory: Trajectory, origin: Origin, none: str) -> str | None:
    """None where the loss is on tokens of this origin alone; a loss reads its whole mask, so a mixture has no place."""
    own = trajectory.origin[trajectory.loss_mask] == origin
    if not own.any():
        return none
    return None if own.all() else MIXED


@dataclass
class Selection:
    """Trajectories to train on, and how many were left out for which reason."""

    kept: list[Trajectory] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)  # trajectory id -> reason

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(self.excluded.values()))

    def metrics(self) -> dict[str, float]:
        """Flat metrics: trajectories kept, and excluded by reason."""
        found = {"selection/kept": float(len(self.kept)), "selection/excluded": float(len(self.excluded))}
        return {**found, **{f"selection/{reason}": float(number) for reason, number in sorted(self.counts.items())}}


def select(trajectories: Iterable[Trajectory], *, timed_out_policy: str = "score") -> Selection:
    """Apply `trainable` to all of them, in order."""
    selection = Selection()
    for trajectory in trajectories:
        reason = trainable(trajectory, timed_out_policy=timed_out_policy)
        if reason is None:
            selection.kept.append(trajectory)
        else:
            selection.excluded[trajectory.header.trajectory_id] = reason
    return selection
