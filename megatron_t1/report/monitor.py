"""Monitors of the rollouts of a run: has something jumped between iterations? Shown, never acted upon.

Trajectory length, checks per task, reward per check and the shares of failed verifiers, sandboxes and engines are what
a dense reward needs watched: a policy that found a way around the checks, or a verifier that broke, shows there first
(strands-env#183). Each value is compared with the median of the iterations before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_t1.config.schema import MonitorConfig

MIN_HISTORY = 2  # earlier iterations before a comparison says anything
# metric of a rollout -> (what it is called, option of `monitor` with its threshold)
FACTORS = {
    "turns": ("turns of a trajectory", "length"),
    "tokens": ("tokens of a trajectory", "length"),
    "turns_p90": ("turns of a trajectory, 90th percentile", "length"),
    "tokens_p90": ("tokens of a trajectory, 90th percentile", "length"),
    "checks_per_task": ("checks of a task", "checks"),
    "reward_per_check": ("reward of a passed check", "reward_per_check"),
}
RISES = {
    "verifier_errors": ("episodes whose verifier failed", "errors"),
    "infrastructure_errors": ("episodes whose sandbox or engine failed", "errors"),
    "end_format_error": ("episodes that ended by format errors", "errors"),
}


@dataclass(frozen=True)
class Alarm:
    """One metric of one iteration that differs too much from the median before it."""

    iteration: int
    metric: str
    text: str
    value: float
    before: float

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.text}: {self.value:.4g}, {self.before:.4g} before"


def alarms(lines: list[dict[str, Any]], options: MonitorConfig) -> list[Alarm]:
    """Every alarm of a run's metrics, in the order of iterations.

    Args:
        lines: `report.metrics.read_metrics`.
    """
    rollouts = {line["iteration"]: line["metrics"] for line in lines if line["phase"] == "rollout"}
    found = []
    for iteration in sorted(rollouts):
        earlier = [rollouts[other] for other in sorted(rollouts) if other < iteration][-options.history :]
        found += alarms_of(iteration, rollouts[iteration], earlier, options)
    return found


def alarms_of(
    iteration: int,
    metrics: Mapping[str, float | None],
    earlier: list[Mapping[str, float | None]],
    options: MonitorConfig,
) -> list[Alarm]:
    """Alarms of one iteration's rollout against those before it, oldest first."""
    found = []
    for name, (text, option) in {**FACTORS, **RISES}.items():
        value = metrics.get(f"rollout/{name}")
        known = [own for own in (before.get(f"rollout/{name}") for before in earlier) if own is not None]
        if value is None or len(known) < MIN_HISTORY:
            continue
        usual, threshold = median(known), getattr(options, option)
        jumped = value > usual + threshold if name in RISES else _differs_by_factor(value, usual, threshold)
        if jumped:
            found.append(Alarm(iteration, f"rollout/{name}", text, value, usual))
    return found


def _differs_by_factor(value: float, usual: float, factor: float) -> bool:
    """Of the same sign and within the factor, both ways; a step away from exactly 0 counts."""
    low, high = sorted((abs(value), abs(usual)))
    return high > factor * low or (value > 0) != (usual > 0)
