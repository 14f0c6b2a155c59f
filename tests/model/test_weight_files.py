from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_t1.model.weight_files import INDEX_FILE, weight_problems


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
    "index", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": "../a"}}', '{"weight_map": {}}']
)
def test_a_bad_index_is_named(weights, index):
    (weights / INDEX_FILE).write_text(index)
    (problem,) = weight_problems(weights)
    assert problem.startswith(f"{weights / INDEX_FILE}: no readable index")
