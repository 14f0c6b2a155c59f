"""From a verdict to a reward. Any callable `verdict -> dict` with a constructor argument `scale` can be used.

A reward is paid once, at the end of the trajectory. An untrusted verdict has no reward at all: {} and not zero, so that
a broken verifier excludes a trajectory instead of punishing it (rllm#677, strands-env#183).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_t1.trajectory.record import Verdict


@dataclass(frozen=True)
class DenseReward:
    """scale x number of checks that pass: absolute, with one scale for the whole training, never normalised (T1)."""

    scale: float = 0.25

    def __call__(self, verdict: Verdict) -> dict[str, float]:
        if not verdict.trusted:
            return {}
        return {"total": self.scale * verdict.passed, "passed": float(verdict.passed)}


@dataclass(frozen=True)
class BinaryReward:
    """scale when every check passes, otherwise 0. For comparison."""

    scale: float = 2.0

    def __call__(self, verdict: Verdict) -> dict[str, float]:
        if not verdict.trusted:
            return {}
        return {"total": self.scale * verdict.solved, "passed": float(verdict.passed)}


@dataclass(frozen=True)
class RatioReward:
    """scale x share of checks that pass: a check of a small task is then worth more. For comparison."""

    scale: float = 2.0

    def __call__(self, verdict: Verdict) -> dict[str, float]:
        if not verdict.trusted or verdict.total == 0:
            return {}
        return {"total": self.scale * verdict.passed / verdict.total, "passed": float(verdict.passed)}
