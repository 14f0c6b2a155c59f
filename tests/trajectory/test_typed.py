"""JSON of another shape is refused with the name of its field, in headers and in exchange logs, before it is used."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.cli import main
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory import exchange, tensorfile
from megatron_t1.trajectory.exchange import END, HEADER, MAGIC, SESSION, STATE, TURN, TURN_FIELDS, make_frame
from megatron_t1.trajectory.exchange_reader import read_exchange, rebuild
from megatron_t1.trajectory.record import RECORD_FORMAT, SCHEMA_VERSION, Header, load, parse_header
from megatron_t1.trajectory.typed import anything, check, integer, nothing, number, text, truth
from tests.trajectory.conftest import build

WRONG = {
    "trajectory_id": [None, 5, ["a"]],
    "task": [None, {}],
    "attempt": ["1", 1.5, True, 10**30],
    "policy_versions": [5, ["a"], [1e999], [[1]], [10**400]],
    "end_reason": [None],
    "verdict": [[], "x", {"passed": 1}],
    "reward": [None, [1], {"total": None}, {"total": "x"}, {"total": 10**400}],
    "contract": [[1], "x", {"temperature": 1.0}],
    "counts": [None, [1], {"a": "b"}],
    "timings_s": [None, {"a": []}],
    "extra": [None, "x", [["a", 1]]],
    "schema": [None, "2"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_field_of_another_type_is_named(tmp_path, name, capsys):
    record = build("task-1")
    for value in WRONG[name]:
        raw = {**record.header.to_json(), name: value}
        with pytest.raises(IncompleteError, match=f"header.{name}"):
            parse_header(raw, where="here")
        path = tmp_path / "x.safetensors"
        metadata = {
            "format": RECORD_FORMAT,
            "schema": str(SCHEMA_VERSION),
            "header": json.dumps(raw),
            "digest": "0" * 64,
        }
        tensorfile.write(path, record.arrays(), metadata)
        assert main(["audit", str(path)]) == 2 and main(["inspect", str(path)]) == 1
        assert f"header.{name}" in capsys.readouterr().err


def test_values_are_taken_as_they_are(tmp_path):
    header = build("task-1").header
    raw = json.loads(json.dumps(header.to_json()))
    assert Header.from_json(raw) == header and Header.from_json(raw).to_json() == raw
    raw["reward"] = {"total": 1}  # stays whole: a digest is taken of what is written
    assert json.dumps(Header.from_json(raw).to_json()["reward"]) == '{"total": 1}'


def test_a_shape_names_the_first_misfit():
    shape = {"a": integer, "b?": [text], "c?": (nothing, truth), None: number}
    assert check({"a": 1, "b": ["x"], "c": None, "d": 2.5}, shape, "v")
    for value, said in (
        ([], "v is"),
        ({}, "v has no 'a'"),
        ({"a": True}, "v.a is True"),
        ({"a": 1, "b": ["x", 2]}, r"v.b\[1\] is 2"),
        ({"a": 1, "c": "x"}, "v.c is 'x', expected null or true or false"),
        ({"a": 1, "d": "x"}, r"v\['d'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            check(value, shape, "v")
    with pytest.raises(ValueError, match="unknown field"):
        check({"b": 1}, {"a?": anything}, "v")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(build("a-0").header.to_json())), JSON)
def test_any_json_makes_a_header_or_a_typed_error(name, value):
    raw = {**build("a-0").header.to_json(), name: value}
    try:
        header = parse_header(raw, where="here")
    except IncompleteError as error:
        assert name in error.problem
    else:
        json.dumps(header.to_json())


def write_log(path, *frames, tail=b""):
    body = MAGIC
    for kind, payload in frames:
        body += make_frame(kind, payload if isinstance(payload, bytes) else json.dumps(payload).encode())
    body += make_frame(END, json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode())
    path.write_bytes(body + tail)
    return path


def turn(kept=0, prompt=2, sampled=1, start=-1, rows=0, overlap=0, new=(1, 2)):
    new = np.array(new, np.int32)
    head = TURN_FIELDS.pack(
        0, kept, prompt, sampled, 0, start, rows, overlap, 0, hashlib.sha256(new).digest(), *[bytes(32)] * 3
    )
    return TURN, head + new.tobytes() + bytes(8 * sampled)


HEAD = (HEADER, {"schema": exchange.SCHEMA, "facts": {"engine": "x"}})
BEGIN = (SESSION, {"session": 0, "trajectory": "a", "policy": 0})
UNDER = (STATE, {"session": 0, "temperature": 1.0})

LOGS = {
    "facts that are a list": ([(HEADER, {"schema": 1, "facts": [1]})], "facts is"),
    "a fact that is an object": ([(HEADER, {"schema": 1, "facts": {"engine": {}}})], "engine"),
    "weights that are a list": ([HEAD, BEGIN, (STATE, {"session": 0, "weights": ["a"]})], "state.weights"),
    "a state that is a list": ([HEAD, BEGIN, (STATE, [1])], "state is"),
    "an infinite session": ([HEAD, (SESSION, b'{"session":1e999,"trajectory":"a","policy":0}')], "session.session"),
    "a policy without end": ([HEAD, (SESSION, {"session": 0, "trajectory": "a", "policy": 10**400})], "session.policy"),
    "a trajectory that is a number": ([HEAD, (SESSION, {"session": 0, "trajectory": 5, "policy": 0})], "trajectory"),
    "a session that begins twice": ([HEAD, BEGIN, UNDER, turn(), BEGIN], "begins twice"),
    "16 GiB of tokens": (
        [HEAD, BEGIN, UNDER, turn(kept=2**32 - 20, prompt=2**32 - 18)],
        "keeps 4294967276 tokens of 0",
    ),
    "more rows again than rows": ([HEAD, BEGIN, UNDER, turn(start=0, rows=1, overlap=2)], "1 rows of routes, 2"),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_another_shape_is_refused(tmp_path, name, capsys):
    frames, said = LOGS[name]
    path = write_log(tmp_path / "exchange.0.x.log", *frames)
    with pytest.raises(T1Error, match=said):
        read_exchange(path)
    assert main(["inspect", str(path)]) == 1
    capsys.readouterr()


@pytest.mark.parametrize("tail", [b"\0", b"\xff" * 8, b"\xff" * 100, make_frame(SESSION, b"{}")])
def test_whatever_follows_the_last_frame_is_noticed(tmp_path, tail):
    path = write_log(tmp_path / "exchange.0.x.log", HEAD, BEGIN, UNDER, turn())
    assert rebuild(read_exchange(path).sessions[0]).ids.tolist() == [1, 2, 0]
    write_log(path, HEAD, BEGIN, UNDER, turn(), tail=tail)
    for verify in (True, False):
        with pytest.raises(IncompleteError, match="goes on after its last frame"):
            read_exchange(path, verify=verify)


def test_a_record_that_is_a_directory_is_refused(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(IncompleteError, match="Is a directory"):
        load(tmp_path / "x.safetensors")
