"""Batch statistics from sums, and the gap between sampler and trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.ppo import sums
from megatron_t1.ppo.gap import logprob_gap, route_difference
from megatron_t1.ppo.statistics import (
    advantage_sums,
    explained_variance,
    explained_variance_of,
    explained_variance_sums,
    normalise,
)


def test_normalisation_modes():
    advantages = torch.tensor([1.0, 2.0, 6.0])
    assert torch.equal(normalise(advantages), advantages)
    assert normalise(advantages, "centred").tolist() == pytest.approx([-2.0, -1.0, 3.0])
    whitened = normalise(advantages, "whitened")
    assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened.square().mean().item() == pytest.approx(1, rel=1e-5)
    assert normalise(torch.full((3,), 2.0), "whitened").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="'batch'"):
        normalise(advantages, "batch")


@pytest.mark.parametrize("mode", ["centred", "whitened"])
def test_ranks_normalise_with_the_statistics_of_all(mode):  # slime#2235
    advantages = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 3 + 1
    parts = advantages.split([10, 60, 30])
    total = sum(advantage_sums(part) for part in parts)
    together = torch.cat([normalise(part, mode, total) for part in parts])
    torch.testing.assert_close(together, normalise(advantages, mode), rtol=1e-6, atol=1e-6)


def test_statistics_over_nothing_are_named():  # verl#498
    with pytest.raises(T1Error, match="0 tokens"):
        normalise(torch.zeros(0), "whitened")
    with pytest.raises(T1Error, match="can't be centred"):
        normalise(torch.tensor([1.0, float("nan")]), "centred")
    assert normalise(torch.zeros(0), "raw").shape == (0,)
    assert math.isnan(explained_variance(torch.zeros(0), torch.zeros(0)))


def test_explained_variance():
    random = np.random.default_rng(0)
    target = random.normal(size=500) * 2 + 7
    values = target + random.normal(size=500)
    weights = random.random(500) * (random.random(500) < 0.8)

    def variance(x):
        return np.average((x - np.average(x, weights=weights)) ** 2, weights=weights)

    found = explained_variance(torch.tensor(values), torch.tensor(target), torch.tensor(weights))
    assert found == pytest.approx(1 - variance(target - values) / variance(target), rel=1e-9)
    assert explained_variance(torch.tensor(target), torch.tensor(target)) == 1.0
    assert explained_variance(torch.full((500,), 7.0), torch.tensor(target)) == pytest.approx(0.0)
    assert math.isnan(explained_variance(torch.zeros(4), torch.ones(4)))


def test_explained_variance_has_no_scale_of_its_own():
    returns = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    values = torch.tensor([1.5, 2.0, 3.0], dtype=torch.float64)
    for scale in (1e-9, 1.0, 1e9):
        assert explained_variance(values * scale, returns * scale) == pytest.approx(0.75)
        assert math.isnan(explained_variance(values * scale, torch.full_like(returns, 0.1 * scale)))


def test_explained_variance_adds_up_and_skips_poison():
    target, values = torch.tensor([1.0, 2.0, 5.0, float("nan")]), torch.tensor([1.5, 2.5, 4.0, float("nan")])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])
    parts = [explained_variance_sums(values[s], target[s], weights[s]) for s in (slice(0, 1), slice(1, 4))]
    assert explained_variance_of(sum(parts)) == pytest.approx(explained_variance(values[:3], target[:3]))


def test_sums_are_weighted_merged_and_divided_once():  # trl#6380
    one = {"a": sums.weighted(torch.tensor([1.0, 3.0]), torch.ones(2))}
    two = {
        "a": sums.weighted(torch.tensor([8.0, float("nan")]), torch.tensor([1.0, 0.0])),
        "b": torch.tensor([0.0, 0.0]),
    }
    merged = sums.merge([one, two])
    assert merged["a"].tolist() == [12.0, 3.0] and one["a"].tolist() == [4.0, 2.0]
    assert sums.means(merged) == {"a": 4.0}
    assert sums.reduce(merged) == merged


def test_logprob_gap():
    trainer = torch.tensor([-1.0, -2.0, float("nan")])
    sampler = torch.tensor([-1.01, -2.5, -3.0])
    found, maxima = logprob_gap(trainer, sampler, torch.tensor([1.0, 1.0, 0.0]))
    values = sums.means(found)
    assert values["logprob_gap"] == pytest.approx((0.01 + 0.5) / 2, rel=1e-4)
    assert values["gap_above_tenth"] == 0.5
    expected = np.mean([math.exp(r) - 1 - r for r in (0.01, 0.5)])
    assert values["sampler_kl"] == pytest.approx(expected, rel=1e-3)
    assert maxima["logprob_gap_max"].item() == pytest.approx(0.5)
    empty, maxima = logprob_gap(torch.zeros(0), torch.zeros(0))
    assert sums.means(empty) == {} and maxima["logprob_gap_max"] == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_route_difference_compares_sets(dtype):
    random = np.random.default_rng(0)
    one = np.stack([[random.permutation(16)[:4] for _ in range(3)] for _ in range(50)])
    two = np.stack([[random.permutation(choice) for choice in token] for token in one])  # another order, the same sets
    changed = random.random((50, 3)) < 0.2
    for token, layer in zip(*np.nonzero(changed), strict=True):
        two[token, layer, 1] = next(expert for expert in range(16) if expert not in two[token, layer])
    mask = random.random(50) < 0.6
    slow = sum(set(one[t, l]) != set(two[t, l]) for t in np.flatnonzero(mask) for l in range(3))  # noqa: E741
    found = route_difference(torch.tensor(one).to(dtype), torch.tensor(two).to(dtype), torch.tensor(mask))
    assert found["route_difference"].tolist() == [slow, mask.sum() * 3] and slow == changed[mask].sum() > 0
    assert found["token_route_difference"].tolist() == [changed[mask].any(axis=1).sum(), mask.sum()]
    assert found["expert_difference"].tolist() == [slow, mask.sum() * 12]


def test_route_difference_refuses_other_shapes():
    routes = torch.zeros(4, 3, 2, dtype=torch.uint8)
    with pytest.raises(ValueError):
        route_difference(routes, routes[:, :2], torch.ones(4, dtype=torch.bool))
