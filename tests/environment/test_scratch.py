"""Where sandboxes lie on the host."""

import os
import tempfile
from pathlib import Path

import pytest

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.process import host_identity
from megatron_t1.environment.sandbox.scratch import DISK, ScratchDirectory, reachable, remove_abandoned, shared_base
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


def test_all_drivers_of_a_user_share_one_base(tmp_path):
    base = Path(shared_base(tmp_path, None))
    assert shared_base(tmp_path, None) == str(base)
    assert base.stat().st_mode & 0o777 == 0o711
    base.chmod(0o777)
    with pytest.raises(T1Error, match="not this user's own"):
        shared_base(tmp_path, None)
    base.rmdir()
    base.symlink_to(tmp_path)
    with pytest.raises(T1Error, match="not this user's own"):
        shared_base(tmp_path, None)


def test_abandoned_directories_are_removed_and_living_ones_kept(tmp_path):
    base = str(tmp_path)
    living, dead = ScratchDirectory(base, 16, 100), ScratchDirectory(base, 16, 100)
    (dead.disk / "left").write_text("x")
    os.close(dead._lock)  # what the kernel does when its driver is killed
    (tmp_path / "t1-sandbox-unlocked").mkdir()  # killed before it had a lock
    try:
        assert remove_abandoned(base) == 2
        assert list(tmp_path.iterdir()) == [living.path]
        assert str(dead.path / DISK) not in Path("/proc/mounts").read_text()
    finally:
        living.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uid", [0, -1, 2**31, 99_999_999_999])
def test_a_user_that_no_host_has_is_named(monkeypatch, uid):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(T1Error, match="env.sandbox.host_uid"):
        host_identity(SandboxConfig(host_uid=uid))
