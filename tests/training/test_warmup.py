from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.config.schema import GaeConfig
from megatron_t1.errors import T1Error
from megatron_t1.training.advantages import compute_advantages
from megatron_t1.training.samples import Sample
from megatron_t1.training.warmup import StopRule, discounted_rewards, explained, explained_by_tasks, split_tasks


def sample(task: str, attempt: int, reward: float = 0.0, tokens: int = 3, turns: int = 1) -> Sample:
    mask = np.array([False] + [True] * tokens)
    name = f"{task}-{attempt}"
    fields = {"turn": np.arange(tokens) * turns // tokens, "old_values": np.zeros(tokens, np.float32)}
    return Sample(name, name, np.zeros(tokens + 1, np.int32), mask, None, ~mask, reward, fields, task)


def targets_of(samples: list[Sample], gamma: float = 1.0) -> list[np.ndarray]:
    return discounted_rewards(samples, GaeConfig(gamma=gamma))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=12), st.integers(1, 20))
def test_whole_tasks_are_held_out(attempts, count):
    samples = [sample(f"t{task}", attempt) for task, number in enumerate(attempts) for attempt in range(number)]
    try:
        held_out, training = split_tasks(samples, count)
    except T1Error as error:
        assert error.where == "train.critic.warmup_holdout"
        return
    assert not {one.task for one in held_out} & {one.task for one in training}
    assert len(held_out) >= count and training and len(held_out) + len(training) == len(samples)
    assert split_tasks(samples[::-1], count)[0] == held_out[::-1]  # the same tasks, whatever the order


def test_holding_out_everything_is_refused():
    with pytest.raises(T1Error, match="leaves none of 2"):
        split_tasks([sample("a", 0), sample("b", 0)], 2)


def test_when_a_series_stops_rising():
    def epochs(series, minimum, patience):
        rule = StopRule(minimum, patience)
        for value in series:
            rule.add(value)
            if rule.is_over:
                break
        return rule.count, rule.best_at

    rising = [0.1, 0.3, 0.2, 0.25, 0.1, 0.9]
    assert epochs(rising, 1, 2) == (4, 2)
    assert epochs(rising, 5, 2) == (5, 2)
    assert epochs(rising, 1, 4) == (6, 6)
    assert epochs([math.nan] * 3, 1, 9) == (3, 0)
    assert epochs([0.5, 0.5, 0.5], 1, 2) == (3, 1)  # no better is no rise


def test_a_critic_to_go_on_from_is_a_candidate():
    rule = StopRule(1, 2, before=0.5)
    assert not rule.add(0.4) and not rule.is_over and not rule.add(0.5) and rule.is_over
    assert (rule.best, rule.best_at) == (0.5, 0)
    unknown = StopRule(1, 2, before=math.nan)
    assert not unknown.has_best and unknown.add(-3.0) and unknown.best_at == 1


def test_tasks_that_are_held_out_stay_so_whatever_is_played_beside_them():
    random = np.random.default_rng(0)
    pool = [f"task{number}" for number in range(300)]
    held_out, trained = set(), set()
    for _ in range(4):
        played = [sample(task, attempt) for task in random.choice(pool, 128, replace=False) for attempt in (0, 1)]
        out, rest = split_tasks(played, 64, 0.4)
        assert len(out) >= 64
        held_out |= {one.task for one in out}
        trained |= {one.task for one in rest}
    assert held_out and not held_out & trained
    few = [sample(task, 0) for task in sorted(trained)[:100]]  # none of them below the threshold
    assert len(split_tasks(few, 64, 0.4)[0]) == 64


@pytest.mark.parametrize("turn_level", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_a_critic_that_knows_its_targets_explains_them(gamma, turn_level):
    """What is measured on held-out tasks is what the critic is trained towards."""
    random = np.random.default_rng(0)
    samples = [
        sample(f"t{n // 2}", n % 2, float(random.integers(8)) / 4, tokens=int(random.integers(4, 40)), turns=4)
        for n in range(60)
    ]
    options = GaeConfig(gamma=gamma, turn_level=turn_level)
    compute_advantages(samples, options)
    targets = discounted_rewards(samples, options)
    for one, own in zip(samples, targets, strict=True):
        np.testing.assert_allclose(own, one.fields["returns"], rtol=1e-6)
    assert explained(targets, [one.fields["returns"] for one in samples]) == pytest.approx(1.0)


def test_trajectories_weigh_equally():
    samples = [sample("a", 0, 1.0, tokens=2), sample("a", 1, 3.0, tokens=50), sample("b", 0, 8.0, tokens=5)]
    targets = targets_of(samples)
    found = explained(targets, [2.0, 2.0, 8.0])
    assert found == pytest.approx(1 - np.var([-1.0, 1.0, 0.0]) / np.var([1.0, 3.0, 8.0]))
    # Three trajectories of two tasks: one degree of freedom is left for what the tasks don't explain.
    assert explained_by_tasks(samples, targets) == pytest.approx(1 - 3 * (1 - found))
    assert math.isnan(explained_by_tasks([samples[0], samples[2]], [targets[0], targets[2]]))
    by_hand = [one.reward * 0.9 ** np.arange(one.loss_tokens)[::-1] for one in samples]
    assert explained(targets_of(samples, 0.9), by_hand) == pytest.approx(1)
    assert math.isnan(explained(targets[:1], [0.0]))


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.95])
def test_what_tasks_explain_is_what_their_true_means_would(gamma):
    """Two attempts at each task: the means of the very attempts would explain half of the noise as well.

    What the discount spreads inside a trajectory is no part of that noise.
    """
    random = np.random.default_rng(0)
    rewards = {f"t{number}": 2 + random.normal() for number in range(3000)}
    samples = [sample(task, n, mean + random.normal(), tokens=20) for task, mean in rewards.items() for n in (0, 1)]
    targets = targets_of(samples, gamma)
    discount = np.mean(gamma ** np.arange(20))
    truth = explained(targets, [discount * rewards[one.task] for one in samples])
    assert explained_by_tasks(samples, targets) == pytest.approx(truth, abs=0.03)
    if gamma == 1:
        assert truth == pytest.approx(0.5, abs=0.03)
