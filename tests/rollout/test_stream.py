"""The token stream: append-only, origins stated, routes merged by absolute position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.record import EndReason, Header, Origin
from tests.rollout.conftest import SHAPE, completion, contract, routes_for


def ids(*values):
    return np.array(values, dtype=np.int32)


def header(turns):
    return Header("demo-0", "demo", 0, 0, (0,) * turns, EndReason.SUBMITTED, None, {}, contract())


def test_three_turns_leave_only_the_very_last_token_without_a_route():  # NeMo-RL#3485, vllm#28284
    stream = TokenStream(SHAPE)
    stream.append(ids(1, 2, 3), Origin.PROMPT)
    expected = np.zeros((0, 3, 2), np.uint8)
    for turn in range(3):
        start = stream.routes_from
        assert start == len(expected)
        rows = routes_for(len(stream) + 2 - 1 - start, seed=turn)
        stream.append_sampled(completion([10 + turn, 2], len(stream), routes_from=start, routes=rows))
        expected = np.concatenate([expected, rows])
        if turn < 2:
            stream.append(ids(4), Origin.REPAIR)
            stream.append(ids(5, 6), Origin.ENVIRONMENT)
    record = stream.finish(header(3))
    assert record.routed.tolist() == [True] * (len(record) - 1) + [False]
    assert (record.routes[:-1] == expected).all()
    assert stream.route_overlap == 0
    assert record.origin.tolist() == [0, 0, 0, 1, 1, 4, 3, 3, 1, 1, 4, 3, 3, 1, 1]
    assert record.turn.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_bytes_of_routes_grow_linearly():  # vllm#57966
    stream = TokenStream(SHAPE)
    stream.append(ids(1, 2, 3), Origin.PROMPT)
    rows = 0
    for _ in range(300):
        made = completion([9, 2], len(stream), routes_from=stream.routes_from)
        rows += len(made.routes)
        stream.append_sampled(made)
        stream.append(ids(4, 5, 6), Origin.ENVIRONMENT)
    assert rows == len(stream) - 3 - 1


def test_first_recording_wins_and_differences_are_counted():
    stream = TokenStream(SHAPE)
    stream.append(ids(1, 2, 3), Origin.PROMPT)
    first = routes_for(4, seed=1)
    stream.append_sampled(completion([7, 2], 3, routes_from=0, routes=first))
    stream.append(ids(5), Origin.ENVIRONMENT)
    again = np.concatenate([first, routes_for(3, seed=2)])
    again[1, 0] = again[1, 0, ::-1]  # the same set in another order is no difference
    again[2, 1] = (first[2, 1] + 1) % 8
    stream.append_sampled(completion([8, 2], 6, routes_from=0, routes=again))
    record = stream.finish(header(2))
    assert (record.routes[:4] == first).all() and (record.routes[4:7] == again[4:]).all()
    assert (stream.route_overlap, stream.route_differences) == (4, 1)


def test_sampled_tokens_come_from_the_engine_only():  # trl#5224, ms-swift#10012
    stream = TokenStream()
    stream.append(ids(1), Origin.PROMPT)
    for origin in (Origin.SAMPLED, Origin.DEMONSTRATION):
        with pytest.raises(ValueError, match="not appended from text"):
            stream.append(ids(5), origin)
    with pytest.raises(TypeError, match="Completion"):
        stream.append_sampled(ids(5))


def test_wrong_places_are_refused():
    stream = TokenStream()
    with pytest.raises(ValueError, match="needs a prompt"):
        stream.append_demonstration(ids(5))
    with pytest.raises(ValueError, match="after 0 turns"):
        stream.append(ids(5), Origin.ENVIRONMENT)
    stream.append(ids(1), Origin.PROMPT)
    with pytest.raises(ValueError, match="continues a stream of 3 tokens, this one has 1"):
        stream.append_sampled(completion([5, 2], 3))
    stream.append_sampled(completion([5, 2], 1))
    with pytest.raises(ValueError, match="after 1 turns"):
        stream.append(ids(1), Origin.PROMPT)
    with pytest.raises(ValueError, match="int32"):
        stream.append(np.array([1]), Origin.ENVIRONMENT)


def test_missing_routes_fail_at_once():  # miles#407
    stream = TokenStream(SHAPE)
    stream.append(ids(1), Origin.PROMPT)
    with pytest.raises(ValueError, match="no routes"):
        stream.append_sampled(completion([5, 2], 1))


def test_ids_are_a_read_only_view():
    stream = TokenStream()
    stream.append(ids(1, 2), Origin.PROMPT)
    with pytest.raises(ValueError):
        stream.ids[0] = 9


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 500), min_size=1, max_size=40),
        st.lists(st.integers(0, 500), max_size=60),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), turns)
def test_mask_counts_exactly_the_sampled_tokens(prompt, parts):  # slime#330, slime#1418
    stream = TokenStream(SHAPE)
    stream.append(ids(*prompt), Origin.PROMPT)
    everything, sampled, logprobs = list(prompt), 0, []
    for number, (answer_ids, reply, overlap) in enumerate(parts):
        start = max(0, stream.routes_from - overlap)
        made = completion(answer_ids, len(stream), routes_from=start)
        stream.append_sampled(made)
        everything += answer_ids
        sampled += len(answer_ids)
        logprobs += made.logprobs.tolist()
        if number + 1 < len(parts):
            stream.append(ids(*reply), Origin.ENVIRONMENT)
            everything += reply
    record = stream.finish(header(len(parts)))
    assert record.ids.tolist() == everything
    assert int(record.loss_mask.sum()) == sampled == stream.sampled_tokens
    assert np.allclose(record.logprobs[record.loss_mask], logprobs)
    assert np.isnan(record.logprobs[~record.loss_mask]).all()
    assert record.routed[:-1].all() and not record.routed[-1]
    assert (np.diff(record.turn.astype(int)) >= 0).all() and record.turn[-1] == len(parts) - 1
