from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_t1.config.schema import GaeConfig
from megatron_t1.training.advantages import compute_advantages
from megatron_t1.training.samples import Sample


def sample(values: list[float], reward: float) -> Sample:
    """Prompt, one sampled token, two tokens of tool output, then the other sampled tokens."""
    count = len(values)
    mask = np.array([False, True, False, False, *[True] * (count - 1)])
    return Sample(
        "s", "s", np.zeros(len(mask), np.int32), mask, None, np.zeros(len(mask), bool), reward,
        {"old_values": np.array(values, np.float32)},
    )  # fmt: skip


def test_three_tokens_by_hand():  # miles#1827 verl#6392
    # delta_c = 1 - 0.6, delta_b = 0.9 * 0.6 - 0.4, delta_a = 0.9 * 0.4 - 0.2; trace 0.9 * 0.5
    one = sample([0.2, 0.4, 0.6], 1.0)
    statistics = compute_advantages([one], GaeConfig(gamma=0.9, lambda_actor=0.5, lambda_critic=1.0))
    c, b = 0.4, 0.14 + 0.45 * 0.4
    assert one.fields["advantages"] == pytest.approx([0.16 + 0.45 * b, b, c], abs=1e-6)
    assert one.fields["returns"] == pytest.approx([0.81, 0.9, 1.0], abs=1e-6)  # the reward, discounted
    assert statistics["mean_return"] == pytest.approx(np.mean([0.81, 0.9, 1.0]), abs=1e-6)
    assert statistics["mean_value"] == pytest.approx(0.4, abs=1e-6)
    assert statistics["advantage_std"] == pytest.approx(np.std(one.fields["advantages"]), abs=1e-6)


def test_without_discount_every_advantage_is_reward_minus_value():
    one = sample([0.2, 0.4, 0.6], 1.5)
    compute_advantages([one], GaeConfig())
    assert one.fields["advantages"] == pytest.approx([1.3, 1.1, 0.9], abs=1e-6)


def test_nothing_leaks_from_one_episode_into_the_next():
    alone, beside, other = sample([0.2, 0.4], 1.0), sample([0.2, 0.4], 1.0), sample([100.0, -50.0, 3.0], 9.0)
    compute_advantages([alone], GaeConfig(gamma=0.9, lambda_actor=0.7))
    compute_advantages([other, beside], GaeConfig(gamma=0.9, lambda_actor=0.7))
    assert np.array_equal(alone.fields["advantages"], beside.fields["advantages"])


def test_length_adaptive_lambda_is_the_actors_alone():
    short, long = sample([0.5] * 2, 1.0), sample([0.5] * 10, 1.0)
    compute_advantages([short, long], GaeConfig(length_adaptive_alpha=0.5))
    assert short.fields["advantages"] == pytest.approx([0.0, 0.5], abs=1e-6)  # lambda 0: only its own error
    assert long.fields["advantages"][0] == pytest.approx(0.5 * 0.8**9, abs=1e-6)
    assert long.fields["returns"] == pytest.approx([1.0] * 10, abs=1e-6)


def test_turn_level_advantages_by_hand():
    """Two turns, a alone and b c together; inside the second neither discount nor trace."""
    one = sample([0.2, 0.4, 0.6], 1.0)
    one.fields["turn"] = np.array([0, 1, 1], np.uint16)
    compute_advantages([one], GaeConfig(gamma=0.9, lambda_actor=0.5, lambda_critic=1.0, turn_level=True))
    assert one.fields["returns"] == pytest.approx([0.9, 1.0, 1.0], abs=1e-6)
    assert one.fields["advantages"] == pytest.approx([0.9 * (0.5 * 0.4 + 0.5 * 1.0) - 0.2, 0.6, 0.4], abs=1e-6)


@pytest.mark.parametrize("mode", ["raw", "centred", "whitened"])
def test_statistics_span_all_replicas(monkeypatch, mode):  # slime#2235
    """Two replicas, whose reduction is replayed by hand, give what one process with all samples gives."""

    def data() -> list[Sample]:
        return [sample([0.1, 0.7], 1.0), sample([0.3, 0.2, 0.9, 0.4], -0.5), sample([1.2, 0.1, 0.0], 2.0)]

    options = GaeConfig(gamma=0.95, lambda_actor=0.8, lambda_critic=0.9, advantages=mode)
    together = data()
    expected = compute_advantages(together, options)
    parts = (data()[:1], data()[1:])

    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: sums.append(tensor.clone()))
    for part in (data()[:1], data()[1:]):
        compute_advantages(part, options)
    total = sums[0] + sums[1]
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.copy_(total))
    for part in parts:
        assert compute_advantages(part, options) == pytest.approx(expected)
    for one, other in zip([*parts[0], *parts[1]], together, strict=True):
        assert one.fields["advantages"] == pytest.approx(other.fields["advantages"], abs=1e-6)
        assert np.array_equal(one.fields["returns"], other.fields["returns"])
    joined = np.concatenate([one.fields["advantages"] for one in together])
    if mode != "raw":
        assert joined.mean() == pytest.approx(0, abs=1e-6)
    if mode == "whitened":
        assert joined.std() == pytest.approx(1, abs=1e-5)


def test_a_replica_without_samples_takes_part(monkeypatch):
    import torch.distributed as dist

    seen = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: seen.append(tensor.add_(1.0)))
    statistics = compute_advantages([], GaeConfig())
    assert len(seen) == 1 and np.isfinite(statistics["mean_return"])


def test_equal_returns_have_no_explained_variance():
    one, two = sample([0.5, 0.5], 1.0), sample([0.1, 0.3, 0.5], 1.0)
    assert np.isnan(compute_advantages([one, two], GaeConfig())["explained_variance"])
    one, two = sample([0.0, 0.0], 0.0), sample([1.0, 1.0], 1.0)
    assert compute_advantages([one, two], GaeConfig())["explained_variance"] == pytest.approx(1.0)
