"""Where sandboxes lie on the host."""

import tempfile
from pathlib import Path

import pytest

from megatron_t1.environment.sandbox.scratch import reachable
from megatron_t1.errors import T1Error

OWNER = 64321


def test_a_closed_temporary_directory_is_passed_over(tmp_path, monkeypatch):
    """A batch job's own TMPDIR often admits nobody but the job's user."""
    closed = tmp_path / "job"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(closed))
    found = Path(reachable(closed / "sandboxes", OWNER))
    assert closed not in (found, *found.parents)
    assert all(folder.stat().st_mode & 0o001 for folder in (found, *found.parents))
    assert reachable(closed / "sandboxes", None) == str(closed / "sandboxes")  # the driver's own user plays


def test_no_directory_to_enter_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "stat", lambda self: type("Closed", (), {"st_mode": 0o40700}))
    with pytest.raises(T1Error, match="can enter none of these"):
        reachable(None, OWNER)
