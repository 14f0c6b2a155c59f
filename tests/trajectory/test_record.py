"""Records: exact round trip, files that other readers open, and every kind of damage named."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory import tensorfile
from megatron_t1.trajectory.record import Origin, load, load_header, save


def equal(one, other) -> bool:
    return one.header == other.header and all(
        np.array_equal(array, other.arrays()[name], equal_nan=array.dtype.kind == "f")
        and array.dtype == other.arrays()[name].dtype
        for name, array in one.arrays().items()
    )


@pytest.mark.parametrize("routes", [True, False])
def test_round_trip_keeps_header_arrays_and_digest(make, tmp_path, routes):
    original = make(routes=routes)
    save(original, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors", verify=True)
    assert equal(original, again) and again.digest == original.digest
    assert load_header(tmp_path / "a.safetensors") == original.header
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_safetensors_package_reads_our_files_and_we_read_its(make, tmp_path):
    original = make()
    save(original, tmp_path / "ours.safetensors")
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert set(theirs) == set(original.arrays())
    assert np.array_equal(theirs["routes"], original.routes)
    safetensors.numpy.save_file(theirs, tmp_path / "theirs.safetensors", {"note": "x"})
    file = tensorfile.TensorFile(tmp_path / "theirs.safetensors")
    assert file.metadata == {"note": "x"}
    assert all(np.array_equal(file[name], array, equal_nan=array.dtype.kind == "f") for name, array in theirs.items())


def test_numpy_scalars_in_the_header_become_numbers(make, tmp_path):
    original = make(reward={"total": np.float32(0.5)}, counts={"commands": np.int64(3)})
    save(original, tmp_path / "a.safetensors")
    assert load_header(tmp_path / "a.safetensors").reward == {"total": 0.5}
    assert load(tmp_path / "a.safetensors", verify=True).digest == original.digest


def test_loading_maps_the_file_instead_of_copying(make, tmp_path):  # NeMo-RL#3292 prime-rl#2796
    length, layers, top_k = 20_000, 48, 8
    origin = np.full(length, Origin.SAMPLED, np.uint8)
    big = replace(
        make(turns=1),
        ids=np.zeros(length, np.int32),
        origin=origin,
        turn=np.zeros(length, np.uint16),
        logprobs=np.full(length, -1, np.float32),
        routes=np.zeros((length, layers, top_k), np.uint8),
        routed=np.ones(length, bool),
    )
    save(big, tmp_path / "big.safetensors")
    per_token = (tmp_path / "big.safetensors").stat().st_size / length
    assert per_token < layers * top_k + 16  # ids, origin, turn, log-probs and routed: 12 bytes
    tracemalloc.start()
    loaded = load(tmp_path / "big.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(loaded) == length and peak < loaded.routes.nbytes / 10


def test_records_are_read_only(make):
    trajectory = make()
    with pytest.raises(ValueError):
        trajectory.ids[0] = 1


def test_truncation_cuts_every_token_aligned_field(make):  # verifiers#1394
    trajectory = make(turns=4)
    length = int(np.flatnonzero(trajectory.turn == 1)[2])
    cut = trajectory.truncated(length)
    assert {len(array) for array in cut.arrays().values()} == {length}
    assert all(
        np.array_equal(a, trajectory.arrays()[n][:length], equal_nan=a.dtype.kind == "f")
        for n, a in cut.arrays().items()
    )
    assert cut.header.policy_versions == (0, 1) and cut.digest != trajectory.digest
    with pytest.raises(ValueError):
        trajectory.truncated(0)


def test_loss_mask_is_sampled_and_demonstrated_tokens_only(make):
    trajectory = make()
    assert np.array_equal(trajectory.loss_mask, trajectory.origin == Origin.SAMPLED)
    assert trajectory.loss_mask.sum() == np.isfinite(trajectory.logprobs).sum() > 0


def edited(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def where(trajectory, origin):
    return int(np.flatnonzero(trajectory.origin == origin)[1])


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda t: {"ids": t.ids.astype(np.int64)}, "'ids' must be a numpy array of int32, found int64"),
        (lambda t: {"ids": t.ids.tolist()}, "'ids' must be a numpy array of int32, found list"),
        (lambda t: {"turn": t.turn[:-1]}, "'turn' has"),
        (lambda t: {"routes": t.routes[:-1]}, "'routes' has"),
        (lambda t: {"routes": t.routes.astype(np.int32)}, "uint8 or uint16"),
        (lambda t: {"routes": t.routes[:, 0]}, "3 dimension"),
        (lambda t: {"ids": edited(t.ids, 3, -7)}, "token 3 is -7"),
        (lambda t: {"origin": edited(t.origin, 1, 9)}, "token 1 is 9"),
        (lambda t: {"logprobs": edited(t.logprobs, where(t, Origin.SAMPLED), np.nan)}, "every sampled token"),
        (lambda t: {"logprobs": edited(t.logprobs, where(t, Origin.SAMPLED), -np.inf)}, "every sampled token"),
        (lambda t: {"logprobs": edited(t.logprobs, where(t, Origin.ENVIRONMENT), -1)}, "origin is environment"),
        (lambda t: {"logprobs": edited(t.logprobs, where(t, Origin.SAMPLED), 0.5)}, "can't be positive"),
        (lambda t: {"turn": edited(t.turn, 0, 2)}, "token 1 goes back from turn 2 to 0"),
        (lambda t: {"routes": None}, "token 0 counts as recorded"),
        (lambda t: {"header": replace(t.header, policy_versions=(0,))}, "policy_versions has 1"),
        (lambda t: {name: array[:0] for name, array in t.arrays().items()}, "no token"),
    ],
)
def test_a_contradicting_record_is_refused_with_field_and_token(make, damage, message):
    trajectory = make()
    with pytest.raises(T1Error, match=message) as error:
        replace(trajectory, **damage(trajectory))
    assert "task-0" in error.value.where


def rewrite_metadata(path, **changes):
    tensors = safetensors.numpy.load_file(path)
    metadata = {**tensorfile.TensorFile(path).metadata, **changes}
    safetensors.numpy.save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"schema": "99"}, "schema version '99'"),
        ({"format": "something"}, "expected 'megatron-t1 trajectory'"),
        ({"header": "{"}, "no readable 'header'"),
        ({"header": "[" * 100_000}, "no readable 'header'"),
        ({"header": '{"task": 1}'}, "doesn't fit the schema"),
        ({"header": "[]"}, "doesn't fit the schema"),
        ({"digest": "nonsense"}, "no digest"),
    ],
)
def test_foreign_metadata_gives_a_clear_error(make, tmp_path, changes, message):
    path = tmp_path / "a.safetensors"
    save(make(), path)
    rewrite_metadata(path, **changes)
    with pytest.raises(T1Error, match=message) as error:
        load(path)
    assert str(path) in error.value.where


def test_changed_content_is_found_when_asked(make, tmp_path):
    path = tmp_path / "a.safetensors"
    original = make()
    save(original, path)
    data = bytearray(path.read_bytes())
    data[data.index(original.ids.tobytes())] ^= 1
    path.write_bytes(data)
    load(path)
    with pytest.raises(IncompleteError, match="digest"):
        load(path, verify=True)


def header_file(header: dict, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = {
    "empty": b"",
    "text": b"hello, this is no tensor file",
    "pickle": pickle.dumps({"a": 1}) * 20,
    "huge header": (1 << 40).to_bytes(8, "little") + b"{}",
    "header beyond the end": (5000).to_bytes(8, "little") + b"{}",
    "not JSON": (4).to_bytes(8, "little") + b"abcd",
    "a list": header_file([]),
    "unknown dtype": header_file({"a": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "negative shape": header_file({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"x"),
    "overlap": header_file({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}, b"xy"),
    "outside": header_file({"a": {"dtype": "U8", "shape": [9], "data_offsets": [5, 14]}}, b"x" * 14),
    "size differs": header_file({"a": {"dtype": "I32", "shape": [9], "data_offsets": [0, 4]}}, b"x" * 4),
    "overflow": header_file({"a": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 1 << 80]}}),
    "trailing bytes": header_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xyz"),
    "metadata no text": header_file({"__metadata__": {"format": 3}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_are_no_records_are_refused(tmp_path, name):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(IncompleteError) as error:
        load(path)
    assert str(path) in error.value.where


def test_every_truncation_of_a_record_is_noticed(make, tmp_path):
    path = tmp_path / "a.safetensors"
    save(make(), path)
    data = path.read_bytes()
    for length in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:length])
        with pytest.raises(IncompleteError):
            load(path)


def test_a_failed_write_leaves_nothing_behind(make, tmp_path, monkeypatch):
    def full(file, block):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "_write_all", full)
    with pytest.raises(T1Error, match="No space left"):
        save(make(), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_excluded_tokens_carry_no_loss_and_move_with_every_edit(make, tmp_path):
    plain = make(turns=3)
    at = np.flatnonzero(plain.origin == Origin.SAMPLED)[1]
    trajectory = replace(plain, excluded=edited(np.zeros(len(plain), bool), at, True))
    assert not trajectory.loss_mask[at] and trajectory.loss_mask.sum() == plain.loss_mask.sum() - 1
    assert trajectory.digest != plain.digest
    save(trajectory, tmp_path / "a.safetensors")
    again = load(tmp_path / "a.safetensors", verify=True)
    assert np.array_equal(again.excluded, trajectory.excluded) and not again.excluded.flags.writeable
    assert len(trajectory.truncated(at).excluded) == at
    with pytest.raises(T1Error, match="'excluded' has"):
        replace(plain, excluded=np.zeros(len(plain) - 1, bool))


def test_records_of_the_first_schema_are_read(make, tmp_path):
    path = tmp_path / "a.safetensors"
    original = make()
    old = replace(original, header=replace(original.header, schema=1))
    save(old, path)
    rewrite_metadata(path, schema="1")
    assert load(path, verify=True).digest == old.digest and load(path).excluded is None
