"""The token stream: append-only, origins stated, routes merged by absolute position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.rollout.stream import Edit, EditKind, TokenStream
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


def test_bytes_of_routes_grow_linearly():  # vllm#57966 vllm#57025 vllm#56402
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


def spoken(stream, turns, *, policy=None):
    """Play `turns` (sampled ids, reply ids) with routes asked for incrementally."""
    for number, (sampled, reply) in enumerate(turns):
        stream.policy = number if policy is None else policy
        stream.append_sampled(completion(sampled, len(stream), routes_from=stream.routes_from))
        if reply:
            stream.append(ids(*reply), Origin.ENVIRONMENT)


def fields(stream):
    record = stream.finish(header(stream.turns))
    return {name: array.tolist() for name, array in record.arrays().items() if name != "logprobs"} | {
        "logprobs": np.nan_to_num(record.logprobs, nan=1.0).tolist()
    }


def test_an_aborted_turn_leaves_nothing_behind():
    """Its tokens, log-probs, routes (also those of the prompt it computed) and policy version are gone."""
    stream, plain = TokenStream(SHAPE), TokenStream(SHAPE)
    for one in (stream, plain):
        one.append(ids(1, 2, 3), Origin.PROMPT)
        spoken(one, [([7, 2], [5, 6])])
    before = stream.routes_from
    stream.policy = 8
    stream.append_sampled(completion([9, 9, 2], len(stream), routes_from=before, routes=routes_for(5, seed=99)))
    assert stream.policy_versions == (0, 8) and stream.routes_from > before
    assert stream.abort_turn() == 3
    assert (stream.turns, stream.policy_versions, stream.routes_from) == (1, (0,), before)
    assert fields(stream) == fields(plain)
    for one in (stream, plain):
        one.policy = 9
        one.append_sampled(completion([8, 2], len(one), routes_from=one.routes_from))
    assert fields(stream) == fields(plain) and stream.policy_versions == (0, 9)
    abort = [edit for edit in stream.edits if edit.kind == EditKind.ABORT]
    assert abort == [Edit(EditKind.ABORT, start=7, removed=3, inserted=0, origin=None, turn=1)]


def test_a_turn_of_which_nothing_came_is_aborted_too():
    stream = TokenStream()
    stream.append(ids(1, 2), Origin.PROMPT)
    assert stream.abort_turn() == 0 and len(stream) == 2
    stream.append_sampled(completion([7, 2], 2))
    stream.append(ids(5), Origin.ENVIRONMENT)
    assert stream.abort_turn() == 0 and stream.turns == 1  # the turn before is answered and stays
    assert [(edit.kind, edit.turn) for edit in stream.edits if edit.kind == EditKind.ABORT] == [
        (EditKind.ABORT, 0),
        (EditKind.ABORT, 1),
    ]


def test_an_interrupted_turn_is_resumed_as_one_turn():
    stream = TokenStream(SHAPE, policy=3)
    stream.append(ids(1, 2), Origin.PROMPT)
    stream.append_sampled(completion([7, 8], 2, routes_from=0, reason="length"))
    stream.append_sampled(completion([9, 2], 4, routes_from=stream.routes_from), resumes=True)
    record = stream.finish(header(1))
    assert record.turn.tolist() == [0] * 6 and stream.policy_versions == (3,)
    assert record.routed.tolist() == [True] * 5 + [False]
    assert [edit.kind for edit in stream.edits] == [EditKind.APPEND, EditKind.APPEND, EditKind.RESUME]
    stream.policy = 4
    with pytest.raises(ValueError, match="of policy 3 can't be resumed by policy 4"):
        stream.append_sampled(completion([9], 6, routes_from=stream.routes_from), resumes=True)
    stream.append(ids(5), Origin.REPAIR)
    with pytest.raises(ValueError, match="no sampled turn stands at the end"):
        stream.append_sampled(completion([9], 7, routes_from=stream.routes_from), resumes=True)
    assert len(stream) == 7 and stream.turns == 1  # a refused answer changes nothing


def test_truncation_cuts_every_field_at_the_same_place():  # verifiers#1394
    stream = TokenStream(SHAPE)
    stream.append(ids(1, 2, 3), Origin.PROMPT)
    spoken(stream, [([7, 2], [5, 6]), ([8, 9, 2], [5]), ([4, 2], [])])
    whole = fields(stream)
    assert stream.truncate(9) == 4  # in the middle of the second turn
    assert (stream.turns, stream.policy_versions) == (2, (0, 1))
    cut = fields(stream)
    assert {name: values[:9] for name, values in whole.items()} == cut
    stream.append(ids(2), Origin.REPAIR)  # the cut turn is closed by a token nobody sampled
    record = stream.finish(header(2))
    assert record.loss_mask.sum() == 4 and record.routed.tolist() == [True] * 9 + [False]
    assert (record.routes[9] == 0).all()
    with pytest.raises(ValueError, match="can't cut 10 tokens to 0"):
        stream.truncate(0)
    assert stream.truncate(4) == 6 and stream.turns == 1


def test_routes_with_a_gap_are_refused():
    stream = TokenStream(SHAPE)
    stream.append(ids(1, 2, 3), Origin.PROMPT)
    with pytest.raises(ValueError, match="start at position 2, recorded are those up to 0"):
        stream.append_sampled(completion([7, 2], 3, routes_from=2))
    assert (len(stream), stream.turns) == (3, 0)


def test_every_change_is_one_recorded_edit():
    stream = TokenStream()
    stream.append(ids(1, 2), Origin.PROMPT)
    stream.append_sampled(completion([7], 2, reason="length"))
    stream.append(ids(2), Origin.REPAIR)
    stream.append(ids(5, 6), Origin.ENVIRONMENT)
    stream.append_demonstration(ids(8))
    stream.abort_turn()
    stream.truncate(4)
    assert stream.edits == [
        Edit(EditKind.APPEND, 0, 0, 2, Origin.PROMPT, 0),
        Edit(EditKind.APPEND, 2, 0, 1, Origin.SAMPLED, 0),
        Edit(EditKind.APPEND, 3, 0, 1, Origin.REPAIR, 0),
        Edit(EditKind.APPEND, 4, 0, 2, Origin.ENVIRONMENT, 0),
        Edit(EditKind.APPEND, 6, 0, 1, Origin.DEMONSTRATION, 1),
        Edit(EditKind.ABORT, 6, 1, 0, None, 1),
        Edit(EditKind.TRUNCATE, 4, 2, 0, None, 0),
    ]


actions = st.lists(
    st.tuples(st.sampled_from(["turn", "resume", "reply", "abort", "truncate"]), st.integers(0, 40)), max_size=40
)


@settings(max_examples=80, deadline=None)
@given(actions)
def test_arrays_that_follow_the_edits_stay_aligned(steps):
    """Whoever keeps an array of its own beside the stream needs nothing but the edits."""
    stream = TokenStream(SHAPE)
    stream.append(ids(1, 2, 3), Origin.PROMPT)
    for number, (step, size) in enumerate(steps):
        at_turn = stream.edits[-1].origin == Origin.SAMPLED
        if step == "turn" or (step == "resume" and at_turn):
            made = completion(range(number, number + size + 1), len(stream), routes_from=stream.routes_from)
            stream.append_sampled(made, resumes=step == "resume")
        elif step == "reply" and stream.turns:
            stream.append(ids(*[500 + number] * size), Origin.ENVIRONMENT)
        elif step == "abort":
            stream.abort_turn()
        elif step == "truncate":
            stream.truncate(max(1, len(stream) - size))
    origin, turn = [], []
    for edit in stream.edits:
        assert len(origin) == edit.start + edit.removed
        origin[edit.start :] = [edit.origin] * edit.inserted
        turn[edit.start :] = [edit.turn] * edit.inserted
    record = stream.finish(header(max(1, stream.turns)))
    assert record.origin.tolist() == origin and record.turn.tolist() == turn
    assert stream.routes_from == record.routed.sum() <= len(record) and stream.sampled_tokens == record.loss_mask.sum()
    assert len(stream.policy_versions) == stream.turns


def test_the_cost_of_a_turn_does_not_grow_with_the_stream(monkeypatch):  # trl#6250
    """What is written in a turn is what is new, apart from the times at which the arrays grow by a quarter."""
    stream, grown = TokenStream(SHAPE), []
    reserve = TokenStream._reserve

    def counting(self, length):
        if length > len(self._ids):
            grown.append(len(self))
        reserve(self, length)

    monkeypatch.setattr(TokenStream, "_reserve", counting)
    stream.append(ids(*range(20)), Origin.PROMPT)
    for _ in range(300):
        stream.append_sampled(completion(range(30), len(stream), routes_from=stream.routes_from))
        stream.append(ids(*range(30)), Origin.ENVIRONMENT)
    assert len(grown) <= 20 and sum(grown) <= 5 * len(stream)  # a geometric series: linear in the tokens


def test_memory_of_a_token():
    stream = TokenStream(SHAPE)
    stream.append(ids(*range(400)), Origin.PROMPT)
    most = 0
    for _ in range(400):
        stream.append_sampled(completion(range(60), len(stream), routes_from=stream.routes_from))
        stream.append(ids(*range(60)), Origin.ENVIRONMENT)
        most = max(most, stream.nbytes / len(stream))
    assert most <= 16


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
def test_mask_counts_exactly_the_sampled_tokens(prompt, parts):  # slime#330, slime#1418, slime#1563
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
