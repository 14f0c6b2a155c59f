"""Packing: a hard capacity, equal work for every rank, the same plan everywhere."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.config.compose import compose
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.trajectory.layout import TokenLayout
from megatron_t1.trajectory.packing import SequenceCost, minibatches, plan_packing

CAPACITY = 100


def slow_first_fit_decreasing(lengths, capacity):
    room = []
    for length in sorted(lengths, reverse=True):
        place = next((i for i, left in enumerate(room) if left >= length), None)
        if place is None:
            room.append(capacity - length)
        else:
            room[place] -= length
    return len(room)


@given(
    st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 4]),
    st.one_of(st.none(), st.integers(0, 99)),
)
@settings(max_examples=300, deadline=None)
def test_plans_hold_what_they_promise(lengths, ranks, multiple, seed):  # NeMo-RL#648 SkyRL#204
    plan = plan_packing(lengths, data_parallel=ranks, capacity=CAPACITY, multiple=multiple, seed=seed)
    padded = [-(-length // multiple) * multiple for length in lengths]
    assert len(plan.ranks) == ranks and {len(batches) for batches in plan.ranks} == {plan.slots}
    everything = [batch for batches in plan.ranks for batch in batches]
    placed = [index for batch in everything for index in batch.sequences]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(padded[i] for i in batch.sequences) <= CAPACITY for batch in everything)
    fewest = slow_first_fit_decreasing(padded, CAPACITY)
    assert plan.bins == -(-fewest // ranks) * ranks
    dummies = sum(batch.is_dummy for batch in everything)
    assert dummies == max(0, plan.bins - len(lengths))  # a rank idles only where sequences can't be divided further
    assert plan == plan_packing(lengths, data_parallel=ranks, capacity=CAPACITY, multiple=multiple, seed=seed)
    assert plan.imbalance >= 1 - 1e-9 and 0 < plan.fill <= 1


def test_too_few_sequences_give_dummies_of_zero_weight():
    plan = plan_packing([9, 3, 7], data_parallel=4, capacity=CAPACITY)
    dummies = [batch for batches in plan.ranks for batch in batches if batch.is_dummy]
    assert len(dummies) == 1 and plan.slots == 1


def test_an_over_long_sequence_is_named():  # ROLL#298
    with pytest.raises(T1Error, match="sequence git-7 with 101 tokens") as error:
        plan_packing([5, 101, 200], capacity=CAPACITY, names=["a-1", "git-7", "b-2"])
    assert "2 such sequence(s)" in error.value.problem and "capacity" in error.value.remedy


def test_padding_counts_against_the_capacity():
    assert plan_packing([99], capacity=99).bins == 1
    with pytest.raises(T1Error, match=r"padded: 100"):
        plan_packing([99], capacity=99, multiple=4)
    lengths = [7, 9, 33, 41, 5]
    plan = plan_packing(lengths, capacity=64, multiple=TokenLayout.sequence_multiple(2))
    for batch in plan.ranks[0]:
        assert TokenLayout([lengths[i] for i in batch.sequences], context_size=2).total <= 64


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_nothing_to_pack_is_an_error(lengths):
    with pytest.raises(T1Error):
        plan_packing(lengths, capacity=CAPACITY)


def test_lengths_and_multiples_are_whole_numbers():
    with pytest.raises(ConfigError, match="multiple is positive"):
        plan_packing([3, 5], capacity=CAPACITY, multiple=0)
    with pytest.raises(ConfigError, match="lengths are integers"):
        plan_packing([3.5, 5.0], capacity=CAPACITY)


def test_the_seed_orders_slots_only():
    lengths = np.random.default_rng(0).integers(1, CAPACITY, 50).tolist()
    plans = [plan_packing(lengths, data_parallel=2, capacity=CAPACITY, seed=seed) for seed in (None, 1, 2)]

    def slots(plan):
        return [tuple(sorted(plan.ranks[rank][slot].sequences for rank in range(2))) for slot in range(plan.slots)]

    assert sorted(slots(plans[0])) == sorted(slots(plans[1])) == sorted(slots(plans[2]))
    assert slots(plans[1]) != slots(plans[2])
    cost = SequenceCost()
    loads = [max(cost.of(np.array([lengths[i] for i in batch])).sum() for batch in slot) for slot in slots(plans[0])]
    assert loads == sorted(loads, reverse=True)


@pytest.mark.parametrize("count, ranks", [(1402, 1), (1402, 8), (8192, 8)])
def test_large_plans_are_full_balanced_and_fast(count, ranks):
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(9.5, 0.85, count), 200, 131_072).astype(int)
    elapsed = []
    for _ in range(3):
        start = time.process_time()
        plan = plan_packing(lengths, data_parallel=ranks, capacity=131_072, seed=0)
        elapsed.append(time.process_time() - start)
    assert plan.fill > 0.99 and plan.imbalance < 1.03
    assert plan.bins - lengths.sum() / 131_072 < ranks + 1
    assert min(elapsed) < (0.05 if count == 1402 else 0.3)


def test_the_cost_of_attention_comes_from_the_architecture():
    """Multiplications counted one by one, for a token of a sequence of 100,000."""
    a = compose(["model=qwen3_5_122b_a10b"]).model.architecture
    length = 100_000
    experts = 3 * a.hidden_size * (a.num_experts_per_tok * a.moe_intermediate_size + a.shared_expert_intermediate_size)
    projections = 2 * a.hidden_size * a.head_dim * (a.num_attention_heads + a.num_key_value_heads)
    met = a.num_hidden_layers * (experts + projections + a.hidden_size * a.num_experts)
    attended = a.num_hidden_layers // a.full_attention_interval * 2 * a.num_attention_heads * a.head_dim * length / 2
    cost = SequenceCost.of_architecture(a)
    assert cost.of(np.array([length]))[0] / length == pytest.approx(1 + attended / met)
    assert 0.1 < attended / met < 10


@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_minibatches_visit_each_trajectory_once(count, parts, seed, epoch):  # OpenRLHF#1287
    batches = minibatches(count, parts, seed=seed, epoch=epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == min(parts, count) and max(sizes) - min(sizes) <= 1
    again = minibatches(count, parts, seed=seed, epoch=epoch)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_epochs_and_seeds_shuffle_differently():
    draws = {tuple(np.concatenate(minibatches(50, 5, seed=s, epoch=e))) for s in (0, 1) for e in (0, 1)}
    assert len(draws) == 4
    with pytest.raises(T1Error):
        minibatches(0, 2, seed=0, epoch=0)
