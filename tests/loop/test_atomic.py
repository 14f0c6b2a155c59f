"""Files that are complete or absent, and that say of themselves whether they are what was written."""

import json
import os
import stat

import pytest

from megatron_t1 import atomic, sealed


def refusing(monkeypatch, refused):
    """os.fsync fails with EINVAL for descriptors of this kind."""
    sync = os.fsync

    def fsync(descriptor):
        if refused(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fsync)


def test_a_file_system_that_cannot_sync_directories_will_do(tmp_path, monkeypatch):
    refusing(monkeypatch, stat.S_ISDIR)
    atomic.write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text" and len(list(tmp_path.iterdir())) == 1


def test_one_that_cannot_sync_files_is_named(tmp_path, monkeypatch):
    refusing(monkeypatch, stat.S_ISREG)
    with pytest.raises(OSError) as caught:
        atomic.write_text(tmp_path / "file", "text")
    assert caught.value.filename == str(tmp_path / "file") and list(tmp_path.iterdir()) == []


def test_writers_of_one_process_number_are_not_in_each_other_s_way(tmp_path):
    """On two nodes, or in two containers; each file is whole, and the last one counts."""
    with atomic.replacing(tmp_path / "a") as one:
        with atomic.replacing(tmp_path / "a") as other:
            one.write_text("half ")
            other.write_text("whole")
        assert (tmp_path / "a").read_text() == "whole"
        assert atomic.temporaries(tmp_path / "a", os.getpid()) == [one]
        one.write_text("the last")
    assert (tmp_path / "a").read_text() == "the last" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(OSError, match="not a regular file"):
        sealed.read(tmp_path / "manifest.json")


def test_lines_and_files_carry_their_seal():
    line = sealed.line({"job": 12, "name": "a\nb"})
    assert line.count(b"\n") == 1 and sealed.opened(line) == {"job": 12, "name": "a\nb"}
    for changed in (line.replace(b"12", b"13"), line[:-3], b"", b"[]", b"{}", b'{"sha256": 5}'):
        with pytest.raises(ValueError):
            sealed.opened(changed)


@pytest.mark.parametrize("sealing", [False, True])
def test_names_that_are_no_text_are_written_and_read_again(tmp_path, sealing):
    value = {"name": os.fsdecode(b"\xff.py"), "other": "é"}
    (sealed.write if sealing else atomic.write_json)(tmp_path / "a.json", value)
    found = sealed.read(tmp_path / "a.json") if sealing else json.loads((tmp_path / "a.json").read_text())
    assert found == value
