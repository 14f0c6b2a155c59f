from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.errors import ConfigError
from megatron_t1.routing.padding import padding_routes
from megatron_t1.routing.validation import RoutesError, check_routes, validate_routes
from megatron_t1.trajectory.record import EndReason, Header, Origin, Trajectory

T, L, E, K = 40, 3, 8, 2


def valid_routes(num_experts: int = E, length: int = T) -> np.ndarray:
    random = np.random.default_rng(0)
    rows = random.random((length, L, num_experts)).argsort(axis=2)[:, :, :K]
    return rows.astype(np.uint8 if num_experts <= 256 else np.uint16)


def check(routes, routed=None, num_experts: int = E, length: int = T, top_k: int = K, turns: int | None = None) -> None:
    check_routes(
        routes,
        np.arange(length) < length - 1 if routed is None else routed,
        (np.arange(length if turns is None else turns) // 10).astype(np.uint16),
        num_experts=num_experts,
        top_k=top_k,
        num_moe_layers=L,
        name="task-7-1",
        tokens=length,
    )


def test_routes_of_a_trajectory_are_checked():
    header = Header("task-7-1", "task-7", 1, 0, (0,), EndReason.SUBMITTED, None, {}, None)
    trajectory = Trajectory(
        header=header,
        ids=np.arange(T, dtype=np.int32),
        origin=np.where(np.arange(T) < 5, Origin.PROMPT, Origin.SAMPLED).astype(np.uint8),
        turn=np.zeros(T, np.uint16),
        logprobs=np.where(np.arange(T) < 5, np.nan, -1.0).astype(np.float32),
        routes=valid_routes(),
        routed=np.arange(T) < T - 1,
    )
    validate_routes(trajectory, E, K, L)
    with pytest.raises(RoutesError, match="have shape") as caught:
        validate_routes(trajectory, E, K, L + 1)
    assert caught.value.where == "trajectory task-7-1"


def test_complete_routes_pass():
    check(valid_routes())
    check(valid_routes(), np.ones(T, bool))


def test_last_row_may_hold_anything_but_only_the_last():  # vllm#28284 slime#1045 NeMo-RL#3485 prime-rl#1807
    routes = valid_routes()
    routes[-1] = 255
    check(routes)
    routed = np.arange(T) != T - 1
    routed[23] = False
    with pytest.raises(RoutesError, match="1 tokens before the last") as caught:
        check(valid_routes(), routed)
    assert caught.value.where == "trajectory task-7-1, turn 2, token 23"


@pytest.mark.parametrize("num_experts", [128, 256, 257, 512])
def test_type_follows_the_number_of_experts(num_experts):
    routes = valid_routes(num_experts)
    check(routes, num_experts=num_experts)
    wrong = routes.astype(np.uint16 if num_experts <= 256 else np.int32)
    with pytest.raises(RoutesError, match="with .* experts they are"):
        check(wrong, num_experts=num_experts)


@pytest.mark.parametrize(
    ("change", "message", "where"),
    [
        (lambda r: r[11, 2].__setitem__(1, E), "the model has 8", "turn 1, token 11, MoE layer 3 of 3"),
        (
            lambda r: r[12, 1].__setitem__(slice(None), 3),
            r"experts \[3, 3\] repeat",
            "turn 1, token 12, MoE layer 2 of 3",
        ),
        (lambda r: r[:, 1].__setitem__(slice(None), 0), "never written", "MoE layer 2 of 3"),
    ],
)
def test_bad_values_are_named(change, message, where):  # verl#4986 vllm-ascend#15451
    routes = valid_routes()
    change(routes)
    with pytest.raises(RoutesError, match=message) as caught:
        check(routes)
    assert caught.value.where.endswith(where)


def test_bad_value_far_into_a_long_trajectory_is_found():
    routes = valid_routes(length=20_000)
    routes[17_001, 2] = 5
    with pytest.raises(RoutesError, match="repeat") as caught:
        check(routes, length=20_000)
    assert "token 17001, MoE layer 3" in caught.value.where


@pytest.mark.parametrize(("trained", "sampled"), [(256, 128), (512, 257), (512, 128)])
def test_routes_of_a_model_with_other_experts_are_refused(trained, sampled):
    """128 experts fit into the type and the range of 256; that the upper half is never taken gives them away."""
    routes = valid_routes(sampled, length=8000).astype(np.uint8 if trained <= 256 else np.uint16)
    if 2 * sampled > trained:
        check(routes, num_experts=trained, length=8000)  # 257 of 512: can't be told
        return
    with pytest.raises(RoutesError, match=f"the model has {trained}: routes of a smaller model"):
        check(routes, num_experts=trained, length=8000)
    check(routes[:100], num_experts=trained, length=100)  # too few to be sure


@pytest.mark.parametrize("num_experts", [128, 257, 512])
def test_experts_out_of_range_are_refused(num_experts):
    routes = valid_routes(num_experts)
    routes[7, 1, 0] = num_experts
    with pytest.raises(RoutesError, match=f"the model has {num_experts}") as caught:
        check(routes, num_experts=num_experts)
    assert caught.value.where.endswith("turn 0, token 7, MoE layer 2 of 3")


def test_marks_and_turns_that_do_not_fit_the_tokens_are_refused():
    with pytest.raises(RoutesError, match="are uint8, they must be bool"):  # ~1 is 254: every row would be missing
        check(valid_routes(), np.ones(T, np.uint8))
    broken = valid_routes()
    broken[11, 2, 1] = E
    with pytest.raises(RoutesError, match=f"3 turn numbers for {T} tokens"):
        check(broken, turns=3)


def test_missing_routes_and_wrong_shapes_are_refused():  # miles#407
    with pytest.raises(RoutesError, match="no routes were recorded"):
        check(None)
    for shape in ((T, L - 1, K), (T, L, K + 1), (T, L)):
        with pytest.raises(RoutesError, match="have shape"):
            check(np.zeros(shape, np.uint8))
    with pytest.raises(RoutesError, match="39 rows"):
        check(valid_routes()[:-1])


def test_one_expert_per_token_may_be_expert_zero_in_one_layer_not_in_all():
    routes = np.ones((T, L, 1), np.uint8)
    routes[:, 0] = 0
    check(routes, top_k=1)
    with pytest.raises(RoutesError, match="never written"):
        check(np.zeros((T, L, 1), np.uint8), top_k=1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_padding_is_distinct_and_even(data):  # slime#2308 miles#2697 prime-rl#3350 SkyRL#2091 verl#7524
    ranks = data.draw(st.sampled_from([1, 2, 4, 8]))
    num_experts = ranks * data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, num_experts))
    count, offset = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 1000))
    routes = padding_routes(count, 3, num_experts, top_k, ranks, offset=offset)
    assert routes.shape == (count, 3, top_k)
    assert routes.dtype == (np.uint8 if num_experts <= 256 else np.uint16)
    for layer in range(3):
        rows = np.sort(routes[:, layer].astype(int), axis=1)
        assert (np.diff(rows, axis=1) > 0).all()
        by_expert = np.bincount(rows.ravel(), minlength=num_experts)
        assert len(by_expert) == num_experts and np.ptp(by_expert) <= 1
        assert np.ptp(by_expert.reshape(ranks, -1).sum(axis=1)) <= 1


def test_padding_load_is_within_one_percent_of_the_mean():
    routes = padding_routes(1000, 48, 256, 8, 32)
    for layer in range(48):
        load = np.bincount(routes[:, layer].ravel() // 8, minlength=32)
        assert load.max() / load.mean() <= 1.01


def test_padding_that_cannot_be_distinct_or_even_is_refused():
    with pytest.raises(ConfigError, match="9 distinct"):
        padding_routes(1, 1, 8, 9)
    with pytest.raises(ConfigError, match="over 3 ranks"):
        padding_routes(1, 1, 8, 2, 3)


def test_padding_passes_validation():
    routes = padding_routes(T, L, E, K, 2)
    check(routes)
