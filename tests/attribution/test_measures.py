from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.attribution.measures import (
    Measure,
    Step,
    Sums,
    attribute,
    lowering,
    measure,
    paired_sums,
    quantile_95,
    raising,
    ratio_error,
)


def measured(gap: float, change: float, error: float = 1e-6, tokens: int = 100) -> Measure:
    return Measure(tokens, gap, gap**2, 2 * gap, change, error)


def test_a_setting_is_compared_on_the_tokens_it_has():
    sampler = [np.array([-1.0, -2.0]), np.array([-3.0, -4.0, -5.0])]
    before = [np.array([-1.5, -2.5]), np.array([-3.5, -4.5, -5.5])]
    trainer = [np.array([-1.25, np.nan]), np.array([-3.0, -5.0, np.nan])]
    sums = paired_sums(trainer, before, sampler)
    assert sums.tokens.tolist() == [1, 2] and sums.largest == 1.0
    assert sums.gap.tolist() == [0.25, 1.0]
    assert sums.change.tolist() == [-0.25, 0.0]  # |.25| - |.5|; |0| + |1| - 2 x |.5|
    found = measure(sums)
    assert found.tokens == 3 and found.gap == pytest.approx(1.25 / 3) and found.change == pytest.approx(-0.25 / 3)
    k3 = [math.exp(d) - 1 - d for d in (-0.25, 0.0, -1.0)]
    assert found.kl == pytest.approx(np.mean(k3))


def test_what_is_not_finite_is_left_out_and_does_not_spread():
    sampler, before = [np.array([-1.0, -2.0, -3.0])], [np.array([-1.5, np.nan, -3.5])]
    found = measure(paired_sums([np.array([-np.inf, -2.5, -3.0])], before, sampler))
    assert found.tokens == 1 and found.gap == 0 and found.change == -0.5


def test_few_trajectories_have_a_wider_interval():
    for freedom, exact in ((1, 12.706), (3, 3.182), (10, 2.228), (11, 2.201), (30, 2.042), (1000, 1.962)):
        assert quantile_95(freedom) == pytest.approx(exact, abs=0.03)
    assert math.isnan(quantile_95(0))
    random, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        changes = random.normal(0.3, 1.0, 4)
        sums = Sums(np.full(4, 9.0), np.ones(4), np.ones(4), 9.0 * changes, 1.0)
        found = measure(sums)
        covered += abs(found.change - 0.3) <= found.error
    assert covered / 2000 > 0.93  # 1.96 standard errors cover it in 86%


def test_no_token_gives_no_number():
    found = measure(paired_sums([np.array([np.nan])], [np.array([-1.0])], [np.array([-1.0])]))
    assert found.tokens == 0 and math.isnan(found.gap) and not found.lowers and not found.raises
    assert found.to_json()["gap"] is None
    assert math.isnan(
        ratio_error(np.array([1.0, 0.0]), np.array([3.0, 0.0]))
    )  # one trajectory says nothing about others


def test_the_uncertainty_is_that_of_trajectories_not_of_tokens():
    """Tokens of a trajectory that all move together are one observation: the interval covers the truth as often as
    it says, where one that counts tokens would not."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        lengths = random.integers(5, 60, 40).astype(float)
        changes = lengths * random.normal(0.3, 1.0, 40)  # the whole trajectory moves
        estimate, error = changes.sum() / lengths.sum(), 1.96 * ratio_error(changes, lengths)
        covered += abs(estimate - 0.3) <= error
    assert 0.91 < covered / 400 < 0.98


def test_the_largest_part_of_each_component_counts():
    component_of = {"a": "routing", "b": "weights", "c": "weights", "d": "head"}
    measures = {
        "a": measured(0.08, -0.02),
        "b": measured(0.03, -0.07),
        "c": measured(0.05, -0.05),
        "d": measured(0.3, 0.2),
    }
    assert lowering(component_of, measures) == {"weights": "b", "routing": "a"}  # largest part first
    assert raising(component_of, measures) == {"head": "d"}
    found = attribute(component_of, measures, 0.1, [Step("weights", "b", -0.07), Step("routing", "a", -0.01)])
    assert found.shares["weights"].alone == pytest.approx(0.7) and found.shares["routing"].alone == pytest.approx(0.2)
    assert found.shares["routing"].in_turn == pytest.approx(0.1)
    assert found.shares["head"].alone == 0 and found.shares["head"].setting == ""
    assert found.interaction == pytest.approx(0.8 - 0.9) and found.remainder == pytest.approx(0.2)


def test_what_is_within_the_noise_or_tiny_has_no_share():
    component_of = {"a": "routing", "b": "head"}
    measures = {"a": measured(0.08, -0.02, error=0.03), "b": measured(0.0999, -0.0001, error=1e-6)}
    found = attribute(component_of, measures, 0.1, [])
    assert all(share.alone == 0 for share in found.shares.values()) and found.remainder == 1


def test_other_ids_are_not_added_to_what_is_measured_on_all_tokens():
    component_of = {"a": "tokens", "b": "weights"}
    assert raising(component_of, {"a": measured(2.0, 1.9), "b": measured(0.3, 0.2)}) == {"weights": "b"}


def test_no_gap_has_no_parts():
    found = attribute({"a": "routing"}, {"a": measured(0.1, 0.1)}, 0.0, [])
    assert found.remainder == 0 and found.interaction == 0 and found.shares["routing"].alone == 0


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0.0, 1.0))
def test_parts_in_turn_and_remainder_make_the_whole(seed, components, noise):
    """Causes that shift log-probs by amounts of their own, undone one after another."""
    random = np.random.default_rng(seed)
    sampler = [random.normal(-3, 1, 50) for _ in range(8)]
    shifts = [[random.normal(0, 0.1, 50) for _ in range(8)] for _ in range(components)]
    rest = [random.normal(0, 0.05 * noise, 50) for _ in range(8)]

    def scored(undone: set[int]) -> list[np.ndarray]:
        kept = [c for c in range(components) if c not in undone]
        return [
            s + r + sum((shifts[c][m] for c in kept), 0.0) for m, (s, r) in enumerate(zip(sampler, rest, strict=True))
        ]

    names = {f"s{c}": f"component{c}" for c in range(components)}
    before = scored(set())
    measures = {f"s{c}": measure(paired_sums(scored({c}), before, sampler)) for c in range(components)}
    gap = measure(paired_sums(before, before, sampler)).gap
    steps, undone = [], set()
    for component, name in lowering(names, measures).items():
        current, undone = scored(undone), undone | {int(name[1:])}
        steps.append(Step(component, name, measure(paired_sums(scored(undone), current, sampler)).change))
    found = attribute(names, measures, gap, steps)
    assert sum(share.in_turn for share in found.shares.values()) + found.remainder == pytest.approx(1.0)
    left = measure(paired_sums(scored(undone), before, sampler)).gap
    assert found.remainder * gap == pytest.approx(left, rel=1e-9)
