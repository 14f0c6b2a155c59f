"""Paired differences between settings, and shares of the gap. All of it on log-probs of the same sampled tokens.

The gap of a setting is the mean of |log p_trainer - log p_sampler| over loss tokens, in nats. A component's part of the
gap under training is what it falls by when this one thing is changed. Parts of several components overlap (with wrong
weights a flatter temperature is a little less wrong), so they are also changed in turn, the largest first, and only
what still lowers the gap then is kept. Each has two shares, alone and in turn:

    1 = sum of the shares in turn + remainder,    interaction = sum in turn - sum alone

Tokens of one trajectory aren't independent, so every uncertainty is that of a ratio of sums over trajectories
(Cochran, Sampling Techniques, section 6.4, the linearised variance of a ratio estimate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_t1.attribution.settings import TOKENS

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom: few trajectories have a wider interval.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_95 = 1.96
LEAST_SHARE = 0.01  # a smaller part of the gap is not worth a pass of its own


@dataclass(frozen=True)
class Sums:
    """Sums over the loss tokens of each of M trajectories that both a setting and the baseline have a log-prob of.

    Attributes:
        tokens, gap, kl, change: float64 [M]; gap and kl of the setting (kl: k3 of KL(sampler || trainer)), change of
            |difference| against the baseline.
        largest: of any token.
    """

    tokens: np.ndarray
    gap: np.ndarray
    kl: np.ndarray
    change: np.ndarray
    largest: float


def paired_sums(trainer: Sequence[np.ndarray], baseline: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> Sums:
    """Sums of one setting.

    Args:
        trainer: float [N] of each trajectory, NaN where the setting has no counterpart of the token.
        baseline, sampler: the same tokens as training scores them, and as they were sampled.

    A token that any of the three has no finite number of is left out.
    """
    rows, largest = [], 0.0
    for scored, before, sampled in zip(trainer, baseline, sampler, strict=True):
        known = np.isfinite(scored) & np.isfinite(before) & np.isfinite(sampled)
        difference = scored[known].astype(np.float64) - sampled[known]
        gap, old = np.abs(difference), np.abs(before[known].astype(np.float64) - sampled[known])
        kl = np.expm1(difference) - difference
        rows.append((known.sum(), gap.sum(), kl.sum(), (gap - old).sum()))
        largest = max(largest, float(gap.max(initial=0.0)))
    columns = np.array(rows, np.float64).reshape(-1, 4).T
    return Sums(*columns, largest)


@dataclass(frozen=True)
class Measure:
    """One setting over the sample.

    Attributes:
        tokens: that it has a log-prob of.
        gap: mean |log p_trainer - log p_sampler|, nats; largest: of one token; kl: k3, nats.
        change: of the gap against the baseline on the same tokens; error: half of its 95% interval, NaN for one
            trajectory.
    """

    tokens: int
    gap: float
    kl: float
    largest: float
    change: float
    error: float

    @property
    def lowers(self) -> bool:
        """Whether the gap is smaller than the baseline's, beyond the uncertainty and by a part worth mentioning."""
        return self.lowers_by(LEAST_SHARE * (self.gap - self.change))

    def lowers_by(self, least: float) -> bool:
        """Whether the gap is smaller beyond the uncertainty, and by at least so many nats."""
        return self.change + self.error < 0 and -self.change >= least

    @property
    def raises(self) -> bool:
        return self.change - self.error > 0

    def to_json(self) -> dict[str, Any]:
        return {name: _number(value) for name, value in asdict(self).items()}


def measure(sums: Sums) -> Measure:
    tokens = float(sums.tokens.sum())
    if not tokens:
        return Measure(0, float("nan"), float("nan"), float("nan"), float("nan"), float("nan"))
    change = float(sums.change.sum()) / tokens
    return Measure(
        tokens=int(tokens),
        gap=float(sums.gap.sum()) / tokens,
        kl=float(sums.kl.sum()) / tokens,
        largest=sums.largest,
        change=change,
        error=quantile_95(int((sums.tokens > 0).sum()) - 1) * ratio_error(sums.change, sums.tokens),
    )


def quantile_95(freedom: int) -> float:
    """Half of a 95% interval in standard errors: of Student's t with so many degrees of freedom; NaN for none."""
    if freedom < 1:
        return float("nan")
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    return NORMAL_95 + (NORMAL_95**3 + NORMAL_95) / (4 * freedom)  # Cornish and Fisher's first term, within 0.03


def ratio_error(numerators: np.ndarray, denominators: np.ndarray) -> float:
    """Standard error of sum(numerators) / sum(denominators) over independent trajectories; NaN for fewer than two."""
    counted = denominators > 0
    count = int(counted.sum())
    if count < 2:
        return float("nan")
    top, bottom = numerators[counted], denominators[counted]
    residuals = top - bottom * (top.sum() / bottom.sum())
    return float(np.sqrt(count / (count - 1) * np.square(residuals).sum()) / bottom.sum())


@dataclass(frozen=True)
class Share:
    """A component's part of the gap under training, in 0 .. 1.

    Attributes:
        alone: of this one change; error: half of its 95% interval.
        in_turn: what it still takes away after the components before it.
        setting: the change that shows it; "" where none lowers the gap.
    """

    alone: float = 0.0
    error: float = 0.0
    in_turn: float = 0.0
    setting: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: _number(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Step:
    """A component's best setting on top of those of the steps before.

    Attributes:
        component, setting: what was added.
        change: of the gap against the step before, nats.
    """

    component: str
    setting: str
    change: float


@dataclass(frozen=True)
class Attribution:
    """What the gap under training consists of."""

    shares: dict[str, Share]
    interaction: float
    remainder: float

    def to_json(self) -> dict[str, Any]:
        shares = {name: share.to_json() for name, share in self.shares.items()}
        return {"shares": shares, "interaction": self.interaction, "remainder": self.remainder}


def lowering(component_of: Mapping[str, str], measures: Mapping[str, Measure]) -> dict[str, str]:
    """component -> the setting that lowers the gap most, for components of which any does; largest part first."""
    best = _extreme(component_of, {name: m.gap for name, m in measures.items() if m.lowers})
    return dict(sorted(best.items(), key=lambda item: measures[item[1]].change))


def raising(component_of: Mapping[str, str], measures: Mapping[str, Measure]) -> dict[str, str]:
    """component -> the setting that raises the gap most, for components of which any does.

    Re-rendered ids are left out: they are measured on fewer tokens, so that their change can't be added to others.
    """
    found = {name: -m.gap for name, m in measures.items() if m.raises and component_of[name] != TOKENS}
    return _extreme(component_of, found)


def attribute(
    component_of: Mapping[str, str], measures: Mapping[str, Measure], gap: float, steps: Sequence[Step]
) -> Attribution:
    """Shares of the baseline's gap.

    Args:
        component_of: setting -> component, of all that differ from the baseline in one component.
        measures: of those settings.
        gap: the baseline's.
        steps: what the components took away in turn.
    """
    in_turn = {step.component: -step.change / gap for step in steps}
    shares = {component: Share() for component in dict.fromkeys(component_of.values())}
    for component, name in lowering(component_of, measures).items():
        found = measures[name]
        before = found.gap - found.change  # on the tokens that the setting has
        shares[component] = Share(-found.change / before, found.error / before, in_turn.get(component, 0.0), name)
    alone, total = (sum(getattr(share, kind) for share in shares.values()) for kind in ("alone", "in_turn"))
    return Attribution(shares, total - alone, 1.0 - total if gap else 0.0)


def _extreme(component_of: Mapping[str, str], gaps: Mapping[str, float]) -> dict[str, str]:
    best: dict[str, str] = {}
    for name, gap in gaps.items():
        component = component_of[name]
        if component not in best or gap < gaps[best[component]]:
            best[component] = name
    return best


def _number(value: Any) -> Any:
    """None for NaN, which JSON doesn't have."""
    return None if isinstance(value, float) and not np.isfinite(value) else value
