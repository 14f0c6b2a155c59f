"""The exchange log: what the client writes is what a reader rebuilds; cuts and damage are noticed; size is linear."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory.exchange import ExchangeLog
from megatron_t1.trajectory.exchange_reader import read_exchange, rebuild, seal_abandoned

STATE = {"temperature": 1.0, "top_p": 1.0, "stop_ids": [2], "weights": "w"}


def ids(*values):
    return np.array(values, np.int32)


def add(session, prompt, sampled, **changes):
    options = dict(
        sampled=ids(*sampled),
        logprobs=-np.arange(1, len(sampled) + 1, dtype=np.float32) / 7,
        response_sha256=hashlib.sha256(repr(sampled).encode()).hexdigest(),
        finish_reason="stop",
        state=STATE,
    )
    session.add(ids(*prompt), **{**options, **changes})


turn = st.tuples(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=6))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(turn, min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 99))
def test_interleaved_sessions_are_rebuilt(tmp_path_factory, sessions, seed):
    directory = tmp_path_factory.mktemp("log")
    with ExchangeLog(directory, facts={"engine": "x"}) as log:
        handles = [log.session(f"t-{number}", number) for number in range(len(sessions))]
        order = [number for number, turns in enumerate(sessions) for _ in turns]
        random.Random(seed).shuffle(order)
        streams, left = [[7] for _ in sessions], [list(turns) for turns in sessions]
        for number in order:
            between, sampled = left[number].pop(0)
            streams[number] += between
            add(handles[number], streams[number], sampled)
            streams[number] += sampled
    found = read_exchange(log.path)
    assert found.sealed and found.torn == 0 and found.facts == {"engine": "x"}
    for number, session in found.sessions.items():
        exchanged = rebuild(session)
        assert session.trajectory == f"t-{number}" and session.policy == number and exchanged.problems == []
        assert exchanged.ids.tolist() == streams[number]
        assert exchanged.sampled.sum() == sum(len(sampled) for _, sampled in sessions[number])
        assert np.isnan(exchanged.logprobs[~exchanged.sampled]).all()
        assert exchanged.turns[0].state == STATE


def test_bytes_are_linear_in_tokens(tmp_path):
    sizes = []
    for turns in (100, 300):
        with ExchangeLog(tmp_path / str(turns)) as log:
            session, stream = log.session("t", 0), [1]
            for _ in range(turns):
                add(session, stream, [5] * 20)
                stream += [5] * 20 + [6] * 30
        sizes.append(log.path.stat().st_size)
        assert log.path.stat().st_size < 500 + turns * (170 + 20 * 8 + 30 * 4)
    assert sizes[1] / sizes[0] == pytest.approx(3, rel=0.02)


def test_an_answer_that_was_taken_back_is_not_part_of_the_stream(tmp_path):
    with ExchangeLog(tmp_path) as log:
        session = log.session("t", 0)
        add(session, [1, 2], [3, 4])
        add(session, [1, 2], [5])  # the same turn again
        add(session, [1, 2, 5, 6], [7, 8])
        add(session, [1, 2, 5, 6, 7, 8], [9])  # goes on with the turn
    exchanged = rebuild(read_exchange(log.path).sessions[0])
    assert exchanged.ids.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert exchanged.turn.tolist() == [-1, -1, 0, -1, 1, 1, 1]
    assert [turn.sampled.tolist() for turn in exchanged.turns] == [[5], [7, 8], [9]]


def test_rows_that_came_before_are_told_apart(tmp_path):
    first, second = np.zeros((3, 2, 2), np.uint8), np.ones((4, 2, 2), np.uint8)
    with ExchangeLog(tmp_path) as log:
        session = log.session("t", 0)
        add(session, [1, 2], [3, 4], routes=first, routes_start=0)
        add(session, [1, 2, 3, 4], [5, 6], routes=second, routes_start=1)
    one, other = read_exchange(log.path).sessions[0].turns
    assert (one.routes_start, one.routes_rows, one.routes_overlap) == (0, 3, 0)
    assert one.routes_sha256 == one.new_routes_sha256 == hashlib.sha256(first).hexdigest()
    assert (other.routes_start, other.routes_rows, other.routes_overlap) == (1, 4, 2)
    assert other.new_routes_sha256 == hashlib.sha256(second[2:]).hexdigest()


@pytest.fixture
def written(tmp_path):
    with ExchangeLog(tmp_path) as log:
        session, stream = log.session("t", 3), [1, 2]
        for number in range(4):
            add(session, stream, [number, 9])
            stream += [number, 9, 5]
    return log.path


def test_every_cut_is_noticed_and_leaves_what_is_whole(written):
    content = written.read_bytes()
    whole = read_exchange(written)
    for size in range(1, len(content)):
        written.write_bytes(content[:size])
        if size < 25:  # within the magic
            with pytest.raises(IncompleteError):
                read_exchange(written)
            continue
        log = read_exchange(written)
        assert not log.sealed and log.whole + log.torn == size
        turns = log.sessions[0].turns if log.sessions else []
        assert [turn.sampled.tolist() for turn in turns] == [
            turn.sampled.tolist() for turn in whole.sessions[0].turns[: len(turns)]
        ]


def test_every_changed_byte_is_noticed(written):
    content = written.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        written.write_bytes(changed)
        try:
            assert not read_exchange(written).sealed  # a length that points behind the end: cut
        except IncompleteError as error:
            assert str(written) in error.where


def test_a_killed_writers_log_is_sealed_once(written):
    content = written.read_bytes()
    written.write_bytes(content[: len(content) - 150])
    seal_abandoned([written])
    log = read_exchange(written)
    assert log.sealed and len(log.sessions[0].turns) == 3
    sealed = written.read_bytes()
    seal_abandoned([written])
    assert written.read_bytes() == sealed


def test_a_log_that_goes_on_after_its_end_is_refused(written):
    content = written.read_bytes()
    written.write_bytes(content + content[25:60])
    with pytest.raises(IncompleteError, match="goes on after its last frame|damaged"):
        read_exchange(written)


@pytest.mark.parametrize("content", [b"", b"hello", b"megatron-t1 exchange log\n" + b"\xff" * 40])
def test_foreign_files_are_refused_or_empty(tmp_path, content):
    path = tmp_path / "exchange.0.x.log"
    path.write_bytes(content)
    try:
        log = read_exchange(path)
        assert not log.sealed and not log.sessions
    except IncompleteError as error:
        assert str(path) in error.where


def test_a_session_that_contradicts_itself_says_where(written):
    session = read_exchange(written).sessions[0]
    turns = session.turns
    object.__setattr__(turns[2], "prompt_sha256", "0" * 64)
    assert "request 2 has another SHA-256" in rebuild(session).problems[0]
    object.__setattr__(turns[1], "kept", 99)
    assert "request 1 keeps 99 tokens of 4" in rebuild(session).problems[0]


def test_a_frame_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(T1Error, match="only 40 of"), ExchangeLog(tmp_path) as log:
        session = log.session("t", 0)
        add(session, [1, 2], [3])
        file = log._file

        class Full:
            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, data):
                return file.write(data[:40]) if len(data) > 200 else file.write(data)

        monkeypatch.setattr(log, "_file", Full())
        add(session, [1, 2, 3], [4] * 50)
    found = read_exchange(log.path)
    assert found.sealed and [turn.sampled.tolist() for turn in found.sessions[0].turns] == [[3]]
