"""From scores to what `t1 gap` says: measures of every setting, shares, and the tokens that differ most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_t1.attribution.measures import Measure, Step, attribute, measure, paired_sums, raising
from megatron_t1.attribution.settings import BASELINE, Alternative
from megatron_t1.trajectory.record import Trajectory

BEFORE, AFTER = 24, 6  # tokens of context shown around one
HALF = 0.5  # a setting explains a token when it takes away at least this part of its difference


@dataclass(frozen=True)
class Scored:
    """The sample and its scores.

    Attributes:
        trajectories: M records.
        scores: for each of them name of the setting -> float32 [N], NaN for tokens that the setting doesn't have.
        alternatives: what was scored, by name, the baseline first.
        routes: name -> shares of choices in which that setting's own routers differ from the recorded ones.
        steps: components in turn.
    """

    trajectories: Sequence[Trajectory]
    scores: Sequence[Mapping[str, np.ndarray]]
    alternatives: Mapping[str, Alternative]
    routes: Mapping[str, Mapping[str, float]]
    steps: Sequence[Step] = ()

    def of(self, name: str) -> list[np.ndarray]:
        return [scores[name] for scores in self.scores]

    def not_finite(self, name: str) -> int:
        """Tokens without a finite log-prob under a setting. NaN in a re-rendered stream is a token it doesn't have."""
        absent = np.isinf if self.alternatives[name].setting.retokenised else lambda numbers: ~np.isfinite(numbers)
        return sum(int(absent(numbers).sum()) for numbers in self.of(name))

    @property
    def sampler(self) -> list[np.ndarray]:
        return [trajectory.logprobs[trajectory.loss_mask] for trajectory in self.trajectories]

    @property
    def single(self) -> dict[str, str]:
        """Setting -> component, of those that differ from the baseline in one."""
        return {name: found.component for name, found in self.alternatives.items() if found.component}


def findings(scored: Scored, decode: Callable[[np.ndarray], str], worst: int) -> dict[str, Any]:
    """Settings with their measures, shares of the gap, and the `worst` tokens of every setting, as JSON values."""
    sampler, before = scored.sampler, scored.of(BASELINE)
    measures = {name: measure(paired_sums(scored.of(name), before, sampler)) for name in scored.alternatives}
    single = {name: measures[name] for name in scored.single}
    attribution = attribute(scored.single, single, measures[BASELINE].gap, scored.steps)
    return {
        "settings": [
            {
                **alternative.to_json(),
                **measures[name].to_json(),
                "not_finite": scored.not_finite(name),
                "routes": dict(scored.routes.get(name, {})),
                "worst": worst_tokens(scored, name, decode, worst),
            }
            for name, alternative in scored.alternatives.items()
        ],
        "attribution": {**attribution.to_json(), "steps": [asdict(step) for step in scored.steps]},
        "sum_of_changes": _sum_of_changes(scored.single, single),
    }


def _sum_of_changes(component_of: Mapping[str, str], measures: Mapping[str, Measure]) -> float:
    """What the settings of `together_more` add one by one: its own change differs from it by their interaction."""
    return sum(measures[name].change for name in raising(component_of, measures).values())


def worst_tokens(scored: Scored, name: str, decode: Callable[[np.ndarray], str], count: int) -> list[dict[str, Any]]:
    """The loss tokens whose log-prob under a setting differs most from the sampler's, with their text around them."""
    found: list[tuple[float, int, int]] = []
    for number, (scores, sampled) in enumerate(zip(scored.of(name), scored.sampler, strict=True)):
        difference = np.nan_to_num(np.abs(scores.astype(np.float64) - sampled), nan=-1.0)
        for ordinal in np.argsort(-difference, kind="stable")[:count]:
            if difference[ordinal] >= 0:
                found.append((-float(difference[ordinal]), number, int(ordinal)))
    return [_described(scored, name, number, ordinal, decode) for _, number, ordinal in sorted(found)[:count]]


def _described(
    scored: Scored, name: str, number: int, ordinal: int, decode: Callable[[np.ndarray], str]
) -> dict[str, Any]:
    trajectory, scores = scored.trajectories[number], scored.scores[number]
    position = int(np.flatnonzero(trajectory.loss_mask)[ordinal])
    sampled = float(trajectory.logprobs[position])
    ids = trajectory.ids
    return {
        "trajectory": trajectory.header.trajectory_id,
        "token": position,
        "turn": int(trajectory.turn[position]),
        "id": int(ids[position]),
        "sampler": sampled,
        "trainer": float(scores[name][ordinal]),
        "difference": float(scores[name][ordinal]) - sampled,
        "explained_by": _explained_by(scored, scores, name, ordinal, sampled),
        "before": decode(ids[max(0, position - BEFORE) : position]),
        "text": decode(ids[position : position + 1]),
        "after": decode(ids[position + 1 : position + 1 + AFTER]),
    }


def _explained_by(scored: Scored, scores: Mapping[str, np.ndarray], name: str, ordinal: int, sampled: float) -> str:
    """The setting under which the token comes closest to the sampler; "" where none takes half of the difference."""
    gaps = {other: abs(float(scores[other][ordinal]) - sampled) for other in (BASELINE, *scored.single)}
    own = abs(float(scores[name][ordinal]) - sampled)
    closest = min((other for other in gaps if np.isfinite(gaps[other])), key=gaps.__getitem__)
    return closest if gaps[closest] <= HALF * own and closest != name else ""
