"""Sidecars: keyed by content, complete over ranks, each entry once."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar

KEYS = [format(number, "064x") for number in range(4)]


def values(length, start=0.0):
    return {"values": np.arange(start, start + length, dtype=np.float32), "returns": np.ones(length, np.float32)}


def test_what_all_ranks_wrote_is_one_mapping(tmp_path):
    write_sidecar(tmp_path, 0, {KEYS[0]: values(3), KEYS[1]: values(5, 0.5)}, ranks=2)
    write_sidecar(tmp_path, 1, {KEYS[2]: values(2)}, ranks=2)
    found = read_sidecar(tmp_path)
    assert sorted(found) == KEYS[:3] and len(found) == 3 and KEYS[3] not in found
    assert np.array_equal(found[KEYS[1]]["values"], values(5, 0.5)["values"])
    assert np.array_equal(found.array(KEYS[0], "returns", 3), np.ones(3))


def test_what_is_missing_is_named(tmp_path):
    write_sidecar(tmp_path, 0, {KEYS[0]: values(3)})
    found = read_sidecar(tmp_path)
    with pytest.raises(IncompleteError, match=KEYS[1][:16]):
        found[KEYS[1]]
    with pytest.raises(IncompleteError, match="'advantages'.*only returns, values"):
        found.array(KEYS[0], "advantages", 3)
    with pytest.raises(IncompleteError, match="3 rows, expected 4"):
        found.array(KEYS[0], "values", 4)


def test_all_ranks_must_be_there(tmp_path):
    with pytest.raises(IncompleteError, match="no sidecar"):
        read_sidecar(tmp_path / "absent")
    write_sidecar(tmp_path, 0, {KEYS[0]: values(3)}, ranks=3)
    with pytest.raises(IncompleteError, match=r"rank\(s\) 1, 2 of 3"):
        read_sidecar(tmp_path)
    write_sidecar(tmp_path, 0, {KEYS[0]: values(3)}, ranks=1)
    with pytest.raises(IncompleteError, match="by 1 and by 3 ranks"):
        read_sidecar(tmp_path)


def test_duplicates_are_refused(tmp_path):
    write_sidecar(tmp_path, 0, {KEYS[0]: values(3)}, ranks=2)
    write_sidecar(tmp_path, 1, {KEYS[0]: values(3)}, ranks=2)
    with pytest.raises(T1Error, match="written twice"):
        read_sidecar(tmp_path)


def test_two_ranks_may_write_different_arrays_of_a_record(tmp_path):
    write_sidecar(tmp_path, 0, {KEYS[0]: {"values": np.zeros(2, np.float32)}}, ranks=2)
    write_sidecar(tmp_path, 1, {KEYS[0]: {"logprobs": np.ones(2, np.float32)}}, ranks=2)
    assert set(read_sidecar(tmp_path)[KEYS[0]]) == {"values", "logprobs"}


def test_wrong_keys_and_dtypes_are_refused_before_writing(tmp_path):
    with pytest.raises(T1Error, match="keyed by record digest"):
        write_sidecar(tmp_path, 0, {"../../x": values(3)})
    with pytest.raises(T1Error, match="expected float32"):
        write_sidecar(tmp_path, 0, {KEYS[0]: {"values": np.zeros(3)}})
    assert list(tmp_path.iterdir()) == []
