"""GAE on compressed tokens against a slow walk over whole streams with tool output in them."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import advantages as slow_advantages

from megatron_t1.errors import T1Error
from megatron_t1.ppo.gae import CHUNK, generalized_advantages, lambda_returns, length_adaptive_lambda, reverse_scan

streams = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5), min_size=1, max_size=5
)
unit = st.sampled_from([0.0, 0.3, 0.95, 0.999, 1.0])


def build(turn_sizes, random):
    """A prompt, then for each turn sampled tokens and tool output: values of all positions, mask, turns."""
    mask, turns = [False] * 3, [0] * 3
    for number, (sampled, tool) in enumerate(turn_sizes):
        mask += [True] * sampled + [False] * tool
        turns += [number] * (sampled + tool)
    return random.normal(size=len(mask)), np.array(mask), np.array(turns)


def compress(values, mask):
    return values[np.flatnonzero(mask) - 1]


@given(streams, unit, st.lists(unit, min_size=5, max_size=5), st.booleans(), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_matches_the_walk_over_the_whole_stream(sizes, gamma, lambdas, by_turn, seed):
    random = np.random.default_rng(seed)
    built = [build(size, random) for size in sizes]
    rewards = random.normal(size=len(built)) * 5
    found = generalized_advantages(
        torch.tensor(np.concatenate([compress(v, m) for v, m, _ in built])),
        torch.tensor([int(m.sum()) for _, m, _ in built]),
        torch.tensor(rewards),
        gamma=gamma,
        lambda_=torch.tensor(lambdas[: len(built)]),
        turns=torch.tensor(np.concatenate([t[m] for _, m, t in built])) if by_turn else None,
    )
    slow = [
        slow_advantages(v, m, reward, gamma, lambda_, t if by_turn else None)[m]
        for (v, m, t), reward, lambda_ in zip(built, rewards, lambdas, strict=False)
    ]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), np.concatenate(slow), rtol=1e-6, atol=5e-6)


def test_three_tokens_by_hand():
    # a at position 1 is chosen at position 0, tool output follows, b at 3 is chosen at 2, c at 4 is chosen at 3
    values = torch.tensor([0.5, 1.0, -2.0])
    found = generalized_advantages(values, torch.tensor([3]), torch.tensor([4.0]), gamma=0.9, lambda_=0.5)
    c = 4.0 + 2.0
    b = 0.9 * -2.0 - 1.0 + 0.9 * 0.5 * c
    a = 0.9 * 1.0 - 0.5 + 0.9 * 0.5 * b
    assert found.tolist() == pytest.approx([a, b, c])
    targets = lambda_returns(values, torch.tensor([3]), torch.tensor([4.0]), gamma=0.9, lambda_=0.5)
    assert targets.tolist() == pytest.approx([a + 0.5, b + 1.0, c - 2.0])


@given(st.integers(0, 99), unit, unit)
@settings(max_examples=50, deadline=None)
def test_tool_output_changes_nothing(seed, gamma, lambda_):  # miles#1827 verl#2337
    random = np.random.default_rng(seed)
    plain_values, plain_mask, _ = build([(3, 0), (4, 0), (2, 0)], random)
    starts = [3, 6, 10]  # of the three turns
    values, mask = plain_values.tolist(), plain_mask.tolist()
    for start in reversed(starts[1:]):
        # Tool output goes in before a turn: its last token takes over the state the turn starts in; the rest is poison.
        values[start:start] = [1e9, float("nan"), values[start - 1]]
        values[start - 1] = float("nan")
        mask[start:start] = [False] * 3
    values += [float("inf")] * 2
    mask += [False] * 2
    results = [
        generalized_advantages(
            torch.tensor(compress(np.array(v), np.array(m))),
            torch.tensor([9]),
            torch.tensor([5.0]),
            gamma=gamma,
            lambda_=lambda_,
        )
        for v, m in ((plain_values, plain_mask), (values, mask))
    ]
    assert torch.equal(*results)


def test_the_whole_reward_arrives_when_the_episode_ends_with_tool_output():  # verl#6392 miles#1827
    values, mask, _ = build([(4, 3), (2, 5)], np.random.default_rng(0))
    found = generalized_advantages(
        torch.tensor(compress(values, mask)), torch.tensor([6]), torch.tensor([5.0]), gamma=1.0, lambda_=1.0
    )
    assert (found.numpy() + compress(values, mask)).tolist() == pytest.approx([5.0] * 6)


@given(st.lists(st.integers(1, 3 * CHUNK + 2), min_size=1, max_size=6), st.integers(0, 99), unit, st.booleans())
@settings(max_examples=60, deadline=None)
def test_chunks_are_seamless(lengths, seed, gamma, apart):
    """Trajectories around whole numbers of chunks, with one lambda and with one each."""
    random = np.random.default_rng(seed)
    lambdas = random.choice([0.0, 0.5, 0.99, 1.0], len(lengths)) if apart else np.full(len(lengths), 0.95)
    values, rewards = [random.normal(size=length) * 5 for length in lengths], random.normal(size=len(lengths)) * 5
    steps = [random.normal(size=length) * 0.1 for length in lengths]
    found = generalized_advantages(
        torch.tensor(np.concatenate(values)),
        torch.tensor(lengths),
        torch.tensor(rewards),
        gamma=gamma,
        lambda_=torch.tensor(lambdas),
        token_rewards=torch.tensor(np.concatenate(steps)),
    )
    start = 0
    for length, own, reward, lambda_, extra in zip(lengths, values, rewards, lambdas, steps, strict=True):
        expected, after, value_after = np.zeros(length), 0.0, 0.0
        for t in reversed(range(length)):
            delta = extra[t] + (reward if t == length - 1 else 0.0) + gamma * value_after - own[t]
            expected[t] = after = delta + gamma * lambda_ * after
            value_after = own[t]
        np.testing.assert_allclose(found[start : start + length].numpy(), expected, rtol=1e-5, atol=2e-5)
        start += length


def test_lambda_per_trajectory_equals_one_at_a_time():
    random = torch.Generator().manual_seed(0)
    values, lengths = torch.randn(60, generator=random), torch.tensor([7, 50, 3])
    rewards, lambdas = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.9, 1.0, 0.2])
    together = generalized_advantages(values, lengths, rewards, gamma=0.99, lambda_=lambdas)
    for number, part in enumerate(values.split(lengths.tolist())):
        alone = generalized_advantages(
            part, lengths[number : number + 1], rewards[number : number + 1], gamma=0.99, lambda_=float(lambdas[number])
        )
        torch.testing.assert_close(alone, together.split(lengths.tolist())[number], rtol=1e-6, atol=1e-6)


def test_token_rewards_are_added_to_each_step():
    values, penalty = torch.zeros(4), torch.tensor([-0.1, -0.2, -0.3, -0.4])
    found = generalized_advantages(
        values, torch.tensor([4]), torch.tensor([2.0]), gamma=1.0, lambda_=1.0, token_rewards=penalty
    )
    assert found.tolist() == pytest.approx([1.0, 1.1, 1.3, 1.6])


@pytest.mark.parametrize("gamma", [1.0, 1.0 - 1e-6])
@pytest.mark.parametrize("lambda_", [0.95, 0.999, 1.0 - 1e-6, 1.0])
def test_precision_at_full_length(lambda_, gamma):
    count = 131_072
    random = np.random.default_rng(0)
    values = (random.normal(size=count) * 3 + 10).astype(np.float32)
    found = generalized_advantages(
        torch.tensor(values), torch.tensor([count]), torch.tensor([25.0]), gamma=gamma, lambda_=lambda_
    ).numpy()
    mask = np.concatenate([[False], np.ones(count, bool)])
    slow = slow_advantages(np.concatenate([values, [np.nan]]), mask, 25.0, gamma, lambda_)[mask]
    assert np.abs(found - slow).max() < 2e-5


def test_budget_of_long_batches():  # slime#2229 NeMo-RL#4156 labs-molt#29
    values = torch.randn(32 * 131_072)
    lengths, rewards = torch.full((32,), 131_072), torch.randn(32)
    elapsed = []
    for _ in range(4):
        start = time.process_time()
        generalized_advantages(values, lengths, rewards, gamma=1.0, lambda_=0.99)
        elapsed.append(time.process_time() - start)
    assert min(elapsed) < 0.8  # seconds of processor time: 0.4 s on two cores


@given(st.integers(0, 300), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_reverse_scan(count, seed):
    random = np.random.default_rng(seed)
    inputs, decays = random.normal(size=count), random.choice([0.0, 0.5, 1.0], size=count)
    expected, following = np.zeros(count), 0.0
    for t in reversed(range(count)):
        following = expected[t] = inputs[t] + decays[t] * following
    np.testing.assert_allclose(reverse_scan(torch.tensor(inputs), torch.tensor(decays)).numpy(), expected, atol=1e-12)


def test_length_adaptive_lambda():
    assert length_adaptive_lambda(torch.tensor([10, 100, 1]), 0.5).tolist() == pytest.approx([0.8, 0.98, 0.0])
    with pytest.raises(T1Error):
        length_adaptive_lambda(torch.tensor([10]), 0.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lengths": torch.tensor([2, 2])}, "add up to 4"),
        ({"lengths": torch.tensor([5, 0])}, "trajectory 1 has no sampled token"),
        ({"rewards": torch.tensor([1.0])}, "rewards have shape"),
        ({"rewards": torch.tensor([1.0, float("nan")])}, "reward of trajectory 1"),
        ({"values": torch.tensor([0.0, 0, float("nan"), 0, 0])}, "sampled token 2"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lambda_": torch.tensor([0.5, 0.5, 0.5])}, "lambda has shape"),
        ({"lambda_": -0.1}, "lambda must be"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {
        "values": torch.zeros(5),
        "lengths": torch.tensor([3, 2]),
        "rewards": torch.tensor([1.0, 2.0]),
        "gamma": 1.0,
        "lambda_": 1.0,
    }
    with pytest.raises(T1Error, match=message):
        generalized_advantages(**{**arguments, **changes})


def test_no_trajectory_at_all():
    empty = generalized_advantages(
        torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0), gamma=1.0, lambda_=1.0
    )
    assert empty.shape == (0,)


def test_per_token_arguments_are_checked():
    values, lengths, rewards = torch.zeros(3), torch.tensor([3]), torch.ones(1)
    options = dict(gamma=1.0, lambda_=1.0)
    with pytest.raises(T1Error, match=r"turns have shape \[2\], but there are 3"):
        lambda_returns(values, lengths, rewards, turns=torch.zeros(2), **options)
    with pytest.raises(T1Error, match=r"token_rewards have shape \[4\]"):
        lambda_returns(values, lengths, rewards, token_rewards=torch.zeros(4), **options)
    with pytest.raises(T1Error, match="the reward of sampled token 1 isn't finite"):
        lambda_returns(values, lengths, rewards, token_rewards=torch.tensor([0.0, math.nan, 0.0]), **options)


def test_autocast_does_not_reach_the_returns():
    torch.manual_seed(0)
    values, lengths, rewards = torch.randn(200), torch.tensor([120, 80]), torch.randn(2)
    expected = lambda_returns(values, lengths, rewards, gamma=0.99, lambda_=0.95)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lambda_returns(values, lengths, rewards, gamma=0.99, lambda_=0.95), expected)
