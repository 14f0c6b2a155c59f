"""From a verdict to a reward: docs/rewards.md.

A reward is any callable `(verdict, baseline) -> components` that can be made with `scale=...`: `baseline` says which
checks pass, by name, when nothing is done (None: unknown), and of the components "total" is what is paid, once, at the
end of the trajectory. All of them stay in the record. An untrusted verdict has no reward at all: {} and not zero, so
that a broken verifier excludes a trajectory instead of punishing it (rllm#677, strands-env#183).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import NOT_REACHED, Verdict

Components = dict[str, float]


class Reward(Protocol):
    """A class with `needs_baseline = True` is only used on tasks whose baseline is known by check name."""

    def __call__(self, verdict: Verdict, baseline: Mapping[str, bool] | None = None) -> Components: ...


@dataclass(frozen=True)
class DenseReward:
    """scale x number of checks that pass: absolute, with one scale for the whole training, never normalised (T1).

    Args:
        scale: reward of one check.
        cap: most checks of one task that are paid; inf: all (the paper's). Ours, for sets in which a few tasks with
            very many checks would dominate.
    """

    scale: float = 0.25
    cap: float = math.inf

    def __call__(self, verdict: Verdict, baseline: Mapping[str, bool] | None = None) -> Components:
        if not verdict.trusted:
            return {}
        paid = min(float(verdict.passed), self.cap)
        return {"total": self.scale * paid, "passed": float(verdict.passed), **_capped(verdict.passed, self.cap)}


@dataclass(frozen=True)
class GainReward:
    """scale x (checks gained - penalty x checks broken), ours (Repo2RLEnv#44 documents the need).

    A check is gained when, by name, it failed when nothing was done and passes now; broken when it passed then and
    doesn't now. What passed all along pays nothing. A check that nobody knew at baseline failed then; one of a step
    that was not reached is neither gained nor broken.

    Args:
        scale: reward of one gained check.
        penalty: what a broken check costs, in gained checks; 0: nothing.
        cap: most checks of one task that are paid; inf: all.
    """

    scale: float = 0.25
    penalty: float = 1.0
    cap: float = math.inf

    needs_baseline = True

    def __call__(self, verdict: Verdict, baseline: Mapping[str, bool] | None = None) -> Components:
        """Raises T1Error where the verdict is trusted and the baseline isn't known."""
        if not verdict.trusted:
            return {}
        if baseline is None:
            raise T1Error(
                "what passes when nothing is done is not known by check name",
                where="reward.GainReward",
                remedy="run `t1 tasks check` on the tasks, or use reward=dense",
            )
        gained = sum(passed and not baseline.get(name, False) for name, passed in verdict.checks.items())
        reached = {name: passed for name, passed in baseline.items() if verdict.statuses.get(name) != NOT_REACHED}
        broken = sum(passed and not verdict.checks.get(name, False) for name, passed in reached.items())
        paid = min(float(gained), self.cap)
        return {
            "total": self.scale * (paid - self.penalty * broken),
            "passed": float(verdict.passed),
            "gained": float(gained),
            "broken": float(broken),
            **_capped(gained, self.cap),
        }


@dataclass(frozen=True)
class BinaryReward:
    """scale when every check passes, otherwise 0. For comparison."""

    scale: float = 2.0

    def __call__(self, verdict: Verdict, baseline: Mapping[str, bool] | None = None) -> Components:
        if not verdict.trusted:
            return {}
        return {"total": self.scale * verdict.solved, "passed": float(verdict.passed)}


@dataclass(frozen=True)
class RatioReward:
    """scale x share of checks that pass: a check of a small task is then worth more. For comparison.

    Of a task of several steps it is the mean of the steps' shares (`Verdict.step_share`).
    """

    scale: float = 2.0

    def __call__(self, verdict: Verdict, baseline: Mapping[str, bool] | None = None) -> Components:
        if not verdict.trusted or verdict.total == 0:
            return {}
        if verdict.step_share is not None:
            return {"total": self.scale * verdict.step_share, "passed": float(verdict.passed)}
        return {"total": self.scale * verdict.passed / verdict.total, "passed": float(verdict.passed)}


def _capped(checks: int, cap: float) -> Components:
    """Checks that a cap leaves unpaid, where there is one."""
    return {"capped": max(0.0, checks - cap)} if math.isfinite(cap) else {}
