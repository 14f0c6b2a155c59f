from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.errors import T1Error
from megatron_t1.training.samples import Sample
from megatron_t1.training.warmup import StopRule, explained, explained_by_tasks, split_tasks


def sample(task: str, attempt: int, reward: float = 0.0, tokens: int = 3) -> Sample:
    mask = np.array([False] + [True] * tokens)
    name = f"{task}-{attempt}"
    return Sample(name, name, np.zeros(tokens + 1, np.int32), mask, None, ~mask, reward, task=task)


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


def test_trajectories_weigh_equally():
    samples = [sample("a", 0, 1.0, tokens=2), sample("a", 1, 3.0, tokens=50), sample("b", 0, 8.0, tokens=5)]
    means = {"a": 2.0, "b": 8.0}
    found = explained(samples, 1.0, lambda one: np.full(one.loss_tokens, means[one.task]))
    assert found == pytest.approx(1 - np.var([-1.0, 1.0, 0.0]) / np.var([1.0, 3.0, 8.0]))
    # Three trajectories of two tasks: one degree of freedom is left for what the tasks don't explain.
    assert explained_by_tasks(samples, 1.0) == pytest.approx(1 - 3 * (1 - found))
    assert math.isnan(explained_by_tasks([samples[0], samples[2]], 1.0))
    assert explained(samples, 0.9, lambda one: one.reward * 0.9 ** np.arange(one.loss_tokens)[::-1]) == pytest.approx(1)
    assert math.isnan(explained(samples[:1], 1.0, lambda one: np.zeros(one.loss_tokens)))


def test_what_tasks_explain_is_what_their_true_means_would():
    """Two attempts at each task: the means of the very attempts would explain half of the noise as well."""
    random = np.random.default_rng(0)
    rewards = {f"t{number}": random.normal() for number in range(3000)}
    samples = [sample(task, n, mean + random.normal(), tokens=1) for task, mean in rewards.items() for n in (0, 1)]
    truth = explained(samples, 1.0, lambda one: np.array([rewards[one.task]]))
    assert truth == pytest.approx(0.5, abs=0.03)
    assert explained_by_tasks(samples, 1.0) == pytest.approx(truth, abs=0.03)
