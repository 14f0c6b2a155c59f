"""Names, files and options that an import refuses, and that it leaves nothing behind when it does."""

from __future__ import annotations

import os

import pytest

from megatron_t1.cli import main
from megatron_t1.errors import T1Error
from megatron_t1.importing.harbor import TrialReader
from megatron_t1.importing.jsonlines import read_lines
from tests.importing.test_import import DETAILS, lines, trial


def test_a_name_that_stands_twice_in_an_object_is_refused(tmp_path):
    path = lines(tmp_path, {})
    path.write_text(path.read_text().replace('"reward": 0.5', '"reward": 0.5, "reward": 5'))
    with pytest.raises(T1Error, match="the field 'reward' stands twice") as caught:
        list(read_lines(path))
    assert "line 1" in caught.value.where


def test_an_id_that_is_null_is_none_and_a_number_is_its_digits(tmp_path):
    found = read_lines(lines(tmp_path, {"id": None, "task": None}, {"id": 7}))
    assert [(foreign.name, foreign.task) for foreign in found] == [("data-1", "data-1"), ("7", "t")]


@pytest.mark.parametrize(
    "last, said",
    [
        ({"id": "x.shard"}, "id: 'x.shard' can't be a trajectory id"),
        ({"id": "stored"}, "id: another trajectory is called 'stored' already"),
        ({"id": "line 0"}, "the ids 'line/0' and 'line 0' both become the file name 'line_0'"),
    ],
)
def test_nothing_is_written_when_the_last_line_is_refused(tmp_path, capsys, last, said):
    out = tmp_path / "out"
    assert main(["import", "jsonl", str(lines(tmp_path, {"id": "stored", "reward": 2.0})), "--out", str(out)]) == 0
    before = sorted(out.iterdir())
    path = lines(tmp_path, {"id": "line/0"}, *({"id": f"more-{n}"} for n in range(140)), last)
    assert main(["import", "jsonl", str(path), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert said in error and "data.jsonl, line 142" in error
    assert sorted(out.iterdir()) == before


def test_a_file_without_lines_has_no_trajectory(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main(["import", "jsonl", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "out")]) == 1
    assert "there is no trajectory" in (said := capsys.readouterr().err) and "Harbor" not in said


@pytest.mark.parametrize("scale", ["1e300", "1e-300", "nan"])
def test_a_scale_beyond_float32_is_refused(tmp_path, capsys, scale):
    trial(tmp_path / "a", [DETAILS], ctrf=2)
    assert main(["import", "harbor", str(tmp_path / "a"), "--out", str(tmp_path / "out"), "--scale", scale]) == 2
    assert "float32" in capsys.readouterr().err
    with pytest.raises(T1Error, match="no finite float32"):
        list(TrialReader(scale=3e38).read(tmp_path / "a"))


def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "data.jsonl")
    with pytest.raises(T1Error, match="not a regular file"):
        list(read_lines(tmp_path / "data.jsonl"))
