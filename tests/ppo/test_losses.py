"""Losses and corrections against the oracle; masked tokens don't exist; splits don't matter."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from megatron_t1.errors import ConfigError
from megatron_t1.ppo.corrections import effective_sample_share, geometric_ratios, importance_correction
from megatron_t1.ppo.losses import entropy_sum, kl_estimate, kl_loss, policy_loss, value_loss
from megatron_t1.ppo.sums import means, merge

COUNT = 40


@pytest.fixture
def batch():
    random = np.random.default_rng(3)
    old = -random.random(COUNT) * 3
    return {
        "new": (old + random.normal(size=COUNT) * 0.5).astype(np.float32),
        "old": old.astype(np.float32),
        "advantages": random.normal(size=COUNT).astype(np.float32) * 4,
        "weights": (random.random(COUNT) < 0.7).astype(np.float32),
        "correction": random.random(COUNT).astype(np.float32) * 2,
        "values": random.normal(size=COUNT).astype(np.float32),
        "old_values": random.normal(size=COUNT).astype(np.float32),
        "returns": random.normal(size=COUNT).astype(np.float32) * 3,
    }


def tensors(batch, *names):
    return [torch.tensor(batch[name]) for name in names]


def derivative(function, at):
    """float64 central differences."""
    gradient = np.zeros(len(at))
    for index in range(len(at)):
        step = np.zeros(len(at))
        step[index] = 1e-6
        gradient[index] = (function(at.astype(np.float64) + step) - function(at.astype(np.float64) - step)) / 2e-6
    return gradient


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("corrected", [False, True])
def test_policy_loss_and_its_gradient(batch, dual_clip, corrected):
    new, old, advantage, weights, correction = tensors(batch, "new", "old", "advantages", "weights", "correction")
    new.requires_grad_()
    factor = batch["correction"] if corrected else np.ones(COUNT)

    def slow(at):
        return oracle.policy_loss(at, batch["old"], batch["advantages"], 0.2, 0.28, dual_clip, batch["weights"], factor)

    loss, metrics = policy_loss(
        new,
        old,
        advantage,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
        weights=weights,
        correction=correction if corrected else None,
    )
    loss.backward()
    assert loss.item() == pytest.approx(slow(batch["new"]), rel=1e-5)
    np.testing.assert_allclose(new.grad.numpy(), derivative(slow, batch["new"]), atol=2e-4)
    ratio, used = np.exp(batch["new"] - batch["old"]), batch["weights"] != 0
    high = used & (ratio > 1.28) & (batch["advantages"] > 0)
    low = used & (ratio < 0.8) & (batch["advantages"] < 0)
    found = means(metrics)
    assert metrics["clip_fraction"].tolist() == [(high | low).sum(), used.sum()]
    assert found["clip_fraction_high"] == pytest.approx(high.sum() / used.sum())
    assert found["ratio"] == pytest.approx(ratio[used].mean(), rel=1e-5)
    assert np.all(new.grad.numpy()[(high | low) & (factor == 1)] == 0)


def poisoned(tensor, weights):
    return torch.where(weights == 0, torch.tensor(float("nan")), tensor)


def test_masked_tokens_may_hold_anything(batch):
    names = ("new", "old", "advantages", "correction", "values", "old_values", "returns", "weights")
    *fields, weights = tensors(batch, *names)
    results = []
    for change in (lambda t: t, lambda t: poisoned(t, weights)):
        new, old, advantage, correction, values, old_values, target = (change(field.clone()) for field in fields)
        new.requires_grad_()
        values.requires_grad_()
        one, first = policy_loss(
            new, old, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0, weights=weights, correction=correction
        )
        two, second = value_loss(values, old_values, target, value_clip=0.3, weights=weights)
        three, third = kl_loss(new, old, weights=weights)
        four, fourth = entropy_sum(new, weights=weights)
        (one + two + three - four).backward()
        pairs = torch.cat([pair for part in (first, second, third, fourth) for pair in part.values()])
        results.append((torch.stack([one, two, three, four]).detach(), pairs, new.grad, values.grad))
    assert all(torch.equal(clean, poison) for clean, poison in zip(*results, strict=True))
    assert torch.isfinite(results[1][2]).all() and (results[1][2][weights == 0] == 0).all()


@pytest.mark.parametrize("count", [0, 5])
def test_nothing_to_train_on_gives_zero_with_a_graph(count):  # NeMo-RL#158 Automodel#3796 Automodel#3797 verl#498
    new, values = torch.zeros(count, requires_grad=True), torch.zeros(count, requires_grad=True)
    nothing = torch.zeros(count)
    bad = torch.full((count,), float("nan"))
    one, metrics = policy_loss(new, bad, bad, clip_low=0.2, clip_high=0.2, weights=nothing)
    two, more = value_loss(values, bad, bad, value_clip=0.1, weights=nothing)
    (one + two).backward()
    assert one.item() == 0 and two.item() == 0 and not new.grad.any() and not values.grad.any()
    assert means({**metrics, **more}) == {}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sums_do_not_depend_on_the_split(batch, parts):  # verl#6957 miles#3231 SkyRL#1296 trl#6380
    names = ("new", "old", "advantages", "weights", "values", "old_values", "returns")
    fields = dict(zip(names, tensors(batch, *names), strict=True))

    def whole(piece):
        one, first = policy_loss(
            fields["new"][piece],
            fields["old"][piece],
            fields["advantages"][piece],
            clip_low=0.2,
            clip_high=0.2,
            weights=fields["weights"][piece],
        )
        two, second = value_loss(
            fields["values"][piece],
            fields["old_values"][piece],
            fields["returns"][piece],
            weights=fields["weights"][piece],
        )
        return one + two, {**first, **second}

    expected, metrics = whole(slice(None))
    edges = [0, *sorted(np.random.default_rng(parts).choice(COUNT, parts - 1, replace=False).tolist()), COUNT]
    split = [whole(slice(start, stop)) for start, stop in zip(edges, edges[1:], strict=False)]
    assert sum(loss for loss, _ in split).item() == pytest.approx(expected.item(), rel=1e-6)
    merged = means(merge(part for _, part in split))
    assert merged == pytest.approx(means(metrics), rel=1e-6)


@pytest.mark.parametrize("kind", ["mse", "huber"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_value_loss_and_its_gradient(batch, kind, clip):
    values, old, target, weights = tensors(batch, "values", "old_values", "returns", "weights")
    values.requires_grad_()

    def slow(at):
        return oracle.value_loss(at, batch["old_values"], batch["returns"], clip, kind, 0.7, batch["weights"])

    loss, metrics = value_loss(values, old, target, value_clip=clip, kind=kind, huber_delta=0.7, weights=weights)
    loss.backward()
    assert loss.item() == pytest.approx(slow(batch["values"]), rel=1e-5)
    np.testing.assert_allclose(values.grad.numpy(), derivative(slow, batch["values"]), atol=1e-4)
    assert (means(metrics)["value_clip_fraction"] > 0) == (clip > 0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators(batch, kind):
    new, old, weights = tensors(batch, "new", "old", "weights")
    expected = [oracle.kl(n, o, kind) for n, o in zip(batch["new"], batch["old"], strict=True)]
    np.testing.assert_allclose(kl_estimate(new, old, kind).numpy(), expected, rtol=1e-4, atol=1e-6)
    loss, metrics = kl_loss(new, old, kind=kind, weights=weights)  # slime#1370
    assert loss.item() == pytest.approx(np.sum(np.array(expected) * batch["weights"]), rel=1e-4)
    assert metrics["reference_kl"][1] == batch["weights"].sum()


def test_kl_estimators_estimate_the_kl():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_extreme_ratios_stay_finite():
    new = torch.tensor([0.0, -500.0], requires_grad=True)
    loss, metrics = policy_loss(
        new, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(new.grad).all() and torch.isfinite(metrics["approx_kl"]).all()


def test_tokens_beyond_the_bound_of_the_ratio_are_counted():
    new = torch.tensor([-1.0, -30.0, -30.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.5, -1.0, -1.0, -30.0])
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])
    loss, metrics = policy_loss(new, old, torch.tensor([1.0, 1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.2,
                                weights=weights)  # fmt: skip
    loss.backward()
    assert metrics["log_ratio_bounded"].tolist() == [2.0, 3.0]
    assert new.grad[1] == 0 and new.grad[3] == 0


def test_the_pull_to_the_reference_is_strongest_where_the_policy_is_furthest_off():
    far = torch.tensor([0.0, -30.0], requires_grad=True)
    reference = torch.tensor([-30.0, 0.0])
    (gradient,) = torch.autograd.grad(kl_estimate(far, reference, "k2").sum(), far)
    assert gradient.tolist() == [30.0, -30.0]
    (gradient,) = torch.autograd.grad(kl_estimate(far, reference, "k3").sum(), far)
    assert gradient.tolist() == [1.0, 0.0]


def test_unknown_choices_are_refused():
    zeros = torch.zeros(2)
    with pytest.raises(ConfigError, match="'k4'"):
        kl_estimate(zeros, zeros, "k4")
    with pytest.raises(ConfigError, match="'l1'"):
        value_loss(zeros, zeros, zeros, kind="l1")
    with pytest.raises(ConfigError, match="dual_clip is 0.5"):
        policy_loss(zeros, zeros, zeros, clip_low=0.2, clip_high=0.2, dual_clip=0.5)
    with pytest.raises(ConfigError, match="'icepop'"):
        importance_correction(zeros, zeros, kind="icepop")
    with pytest.raises(ConfigError, match="is empty"):
        importance_correction(zeros, zeros, kind="band", low=3.0)


def test_corrections_by_example():
    sampler = torch.zeros(4)
    trainer = torch.tensor([0.4, 1.0, 4.0, 1.5]).log()
    kinds = {
        "none": [1.0, 1.0, 1.0, 1.0],
        "truncated": [0.4, 1.0, 2.0, 1.5],
        "band": [0.0, 1.0, 0.0, 1.5],
    }
    for kind, expected in kinds.items():
        factor, metrics = importance_correction(trainer, sampler, kind=kind, cap=2.0, low=0.5)
        assert factor.tolist() == pytest.approx(expected)
        assert means(metrics)["correction_rejected"] == expected.count(0.0) / 4
        share = sum(expected) ** 2 / (4 * sum(value**2 for value in expected))
        assert effective_sample_share(metrics) == pytest.approx(share)
    lengths = torch.tensor([3, 1])
    factor, _ = importance_correction(trainer, sampler, kind="sequence", cap=2.0, lengths=lengths)
    assert factor.tolist() == pytest.approx([1.6 ** (1 / 3)] * 3 + [1.5])


def test_rejected_tokens_stay_in_the_denominator():
    new = old = torch.tensor([0.0, 3.0]) - 4
    factor, _ = importance_correction(old, torch.tensor([-4.0, -4.0]), kind="band", low=0.5, cap=2.0)
    loss, metrics = policy_loss(new, old, torch.ones(2), clip_low=0.2, clip_high=0.2, correction=factor)
    assert factor.tolist() == [1.0, 0.0] and loss.item() == -1.0 and metrics["policy_loss"].tolist() == [-1.0, 2.0]


def test_geometric_ratios_do_not_vanish_on_long_trajectories():  # NeMo-RL#2269
    gap = torch.full((8000,), -0.001)
    weights = torch.ones(8000)
    assert geometric_ratios(gap, torch.tensor([8000]), weights).item() == pytest.approx(0.999, rel=1e-4)
    masked = geometric_ratios(gap, torch.tensor([4000, 4000]), torch.cat([torch.ones(4000), torch.zeros(4000)]))
    assert masked.tolist() == pytest.approx([0.999, 1.0], rel=1e-4)


def test_masked_tokens_do_not_enter_a_correction():
    weights = torch.tensor([1.0, 0.0])
    sampler = torch.tensor([-1.0, float("nan")])
    factor, metrics = importance_correction(torch.tensor([-1.0, -1.0]), sampler, kind="truncated", weights=weights)
    assert torch.isfinite(factor).all() and metrics["correction"].tolist() == [1.0, 1.0]
