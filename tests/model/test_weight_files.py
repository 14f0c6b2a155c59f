from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from megatron_t1.model.weight_files import INDEX_FILE, read_entries, weight_problems


@pytest.fixture
def weights(tmp_path):
    for name in ("a", "b"):
        save_file({f"{name}.weight": np.ones((3, 4), np.float32)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    return tmp_path


def test_whole_files_are_fine_with_and_without_an_index(weights):
    assert weight_problems(weights) == []
    (weights / INDEX_FILE).unlink()
    assert weight_problems(weights) == []


@pytest.mark.parametrize("cut", [1, 50, 10_000])
def test_a_file_that_was_cut_off_is_named(weights, cut):
    path = weights / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-cut] if cut < path.stat().st_size else b"")
    (problem,) = weight_problems(weights)
    assert problem.startswith(str(path)) and "cut off" in problem


@pytest.mark.parametrize("content", [b"\xff" * 40, (20).to_bytes(8, "little") + b"[1, 2, 3]          .."])
def test_something_else_is_no_safetensors_file(weights, content):
    (weights / "a.safetensors").write_bytes(content)
    (problem,) = weight_problems(weights)
    assert problem.startswith(str(weights / "a.safetensors"))


def test_a_listed_file_that_is_missing_is_named(weights):
    (weights / "a.safetensors").unlink()
    assert weight_problems(weights) == [f"{weights / INDEX_FILE} lists a.safetensors, which is missing"]


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": ["a.safetensors"]}',
        "[" * 100_000,
        *(
            f'{{"weight_map": {{"x": {name}}}}}'
            for name in (
                '"../a.safetensors"',
                '"/etc/a.safetensors"',
                '".."',
                '""',
                '"a\\u0000.safetensors"',
                '"a.bin"',
                "[1]",
                "null",
            )
        ),
    ],
)
def test_a_bad_index_is_named(weights, index):
    (weights / INDEX_FILE).write_text(index)
    (problem,) = weight_problems(weights)
    assert problem.startswith(f"{weights / INDEX_FILE}: no readable index")


def header(directory, text, data=b""):
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    (directory / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("text", "data", "said"),
    [
        ({"x": {**FLOATS, "shape": [-2]}}, 8, "no type, shape or place of x"),
        ({"x": {**FLOATS, "shape": [True]}}, 8, "no type, shape or place of x"),
        ({"x": {**FLOATS, "shape": [2.0]}}, 8, "no type, shape or place of x"),
        ({"x": {**FLOATS, "shape": [1] * 65}}, 8, "no type, shape or place of x"),
        ({"x": {**FLOATS, "data_offsets": ["0", "8"]}}, 8, "no type, shape or place of x"),
        ({"x": {**FLOATS, "data_offsets": [0, 8, 8]}}, 8, "no type, shape or place of x"),
        ({"x": [0, 8]}, 8, "no type, shape or place of x"),
        ({"x": {**FLOATS, "shape": [10**6]}}, 8, "takes 4000000 bytes, and has 8"),
        ({"x": {**FLOATS, "data_offsets": [8, 0]}}, 0, "has -8 by its header"),
        ({"x": FLOATS, "y": FLOATS}, 8, "y begins at byte"),
        ({"x": FLOATS, "y": {**FLOATS, "data_offsets": [16, 24]}}, 24, "y begins at byte"),
        ({"x": FLOATS, "__metadata__": [1]}, 8, "__metadata__"),
        ({"x": FLOATS}, 9, "bytes after its last tensor"),
        (b'{"x": {}, "x": {}}', 0, "a name occurs twice"),
        (b"[" * 100_000, 0, "can't be read"),
        (b"[1]", 0, "holds list"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(weights, text, data, said):
    """safetensors' own rules: sizes of their types, back to back, from the header's end to the file's."""
    header(weights, text, b"0" * data)
    (problem,) = weight_problems(weights)
    assert problem.startswith(str(weights / "a.safetensors")) and said in problem


def test_a_type_that_is_not_known_here_is_passed_on(weights):
    header(weights, {"x": {**FLOATS, "dtype": "F4"}}, b"0" * 8)
    assert read_entries(weights / "a.safetensors")["x"].code == "F4"
    assert weight_problems(weights) == []


@pytest.mark.parametrize("name", ["a.safetensors", INDEX_FILE])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "nowhere"])
def test_what_is_no_file_is_a_problem_and_nobody_waits_for_it(weights, kind, name):
    (weights / name).unlink()
    make = {
        "pipe": os.mkfifo, "directory": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path),
        "nowhere": lambda path: os.symlink("/nowhere", path),
    }[kind]  # fmt: skip
    make(weights / name)
    (problem,) = weight_problems(weights)
    assert problem.startswith(str(weights / name))


def test_links_into_a_store_of_files_are_followed(weights, tmp_path_factory):
    """As the hub's cache lays checkpoints out."""
    store = tmp_path_factory.mktemp("blobs")
    for name in ("a.safetensors", "b.safetensors", INDEX_FILE):
        (weights / name).rename(store / name)
        (weights / name).symlink_to(store / name)
    assert weight_problems(weights) == []


def test_a_tensor_in_two_files_is_named(weights):
    save_file({name: np.ones((3, 4), np.float32) for name in ("a.weight", "b.weight")}, weights / "b.safetensors")
    (problem,) = weight_problems(weights)
    assert problem == "1 tensors of b.safetensors are in another file too: a.weight"


WIDTHS = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8, "F8_E4M3": 1, "BOOL": 1}
WRONG = (None, "F32", [1], [0, 4], [4, 8], [2.0], [-1], [True], 5, [0, 0], [[1]], {})


@st.composite
def files(draw):
    """Bytes of a small file, often with something wrong in its header or its length."""
    text, end = {}, 0
    for name in draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True)):
        code, shape = draw(st.sampled_from([*WIDTHS])), draw(st.lists(st.integers(0, 3), max_size=3))
        begin, end = end, end + WIDTHS[code] * int(np.prod(shape))
        text[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    if text and draw(st.booleans()):
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        text[draw(st.sampled_from([*text]))][field] = draw(st.sampled_from(WRONG))
    if draw(st.booleans()):
        text["__metadata__"] = draw(st.sampled_from([{"a": "b"}, {"a": 1}, [], None]))
    raw = json.dumps(text).encode() + b" " * draw(st.integers(0, 9))
    length = len(raw) + draw(st.sampled_from([0, 0, 0, 1, -1]))
    return struct.pack("<Q", length) + raw + b"0" * max(0, end + draw(st.sampled_from([0, 0, 0, 1, -1])))


@settings(deadline=None, max_examples=200)
@given(files())
def test_headers_are_believed_when_the_safetensors_package_believes_them(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    try:
        with safe_open(path, framework="np") as opened:
            known = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except Exception:
        known = None
    try:
        assert {name: entry.shape for name, entry in read_entries(path).items()} == known
    except ValueError:
        assert known is None
