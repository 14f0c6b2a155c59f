from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.errors import ConfigError
from megatron_t1.training.samples import Sample
from megatron_t1.training.sft import split_holdout, step_groups


def sample(number: int, length: int) -> Sample:
    return Sample(
        f"s{number}", str(number), np.zeros(length, np.int32), np.ones(length, bool), None, np.zeros(length, bool), 0.0
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100), st.integers(0, 5))
def test_every_demonstration_once_per_epoch_and_the_same_again(lengths, tokens_per_step, seed):
    data = [sample(number, length) for number, length in enumerate(lengths)]

    def epochs(count: int) -> list[list[list[str]]]:
        found, groups = [], step_groups(data, tokens_per_step, seed)
        for _ in range(count):
            epoch: list[list[str]] = []
            while sum(len(group) for group in epoch) < len(data):
                epoch.append([item.name for item in next(groups)])
            found.append(epoch)
        return found

    taken = epochs(3)
    for epoch in taken:
        assert sorted(name for group in epoch for name in group) == sorted(item.name for item in data)
        for group in epoch[:-1]:  # as large as asked for, and not a demonstration more
            sizes = [lengths[int(name[1:])] for name in group]
            assert sum(sizes) >= tokens_per_step > sum(sizes[:-1])
    assert taken == epochs(3)
    if len(data) > 20:
        assert taken[0] != taken[1]


def test_seeds_differ():
    data = [sample(number, 10) for number in range(20)]
    orders = [
        [item.name for group in itertools.islice(step_groups(data, 50, seed), 4) for item in group] for seed in (0, 1)
    ]
    assert orders[0] != orders[1]


def test_holdout_is_a_fixed_disjoint_part():
    data = [sample(number, 1) for number in range(50)]
    held_out, training = split_holdout(data, 7)
    assert len(held_out) == 7
    assert sorted(s.name for s in [*held_out, *training]) == sorted(s.name for s in data)
    assert [s.name for s in split_holdout(data, 7)[0]] == [s.name for s in held_out]
    assert [s.name for s in held_out] != [s.name for s in data[:7]]


@pytest.mark.parametrize("count", [0, 5, 6])
def test_holdout_that_leaves_nothing_is_refused(count):
    with pytest.raises(ConfigError, match="holdout"):
        split_holdout([sample(number, 1) for number in range(5)], count)
