"""Room that a file system has by its own account, and doesn't give: quotas."""

import errno
import functools
import os
import subprocess

import pytest
from loop_commands import dummy_command

from megatron_t1.config.inputs import CHECKPOINT_MARKER
from megatron_t1.errors import T1Error
from megatron_t1.loop import reserve, space
from megatron_t1.loop.launcher import Exit, require_success
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.loop.runner import opened
from megatron_t1.loop.steps import Step
from megatron_t1.paths import RunPaths

STEP = Step(0, ("rollout",))


@pytest.fixture
def small(config, monkeypatch):
    """A run whose first rollout needs 3 MiB."""
    os.makedirs(config.run.dir)
    monkeypatch.setattr(space, "FLOOR_BYTES", 3 * 2**20)
    monkeypatch.setattr(space, "expected_bytes", lambda *_: 0)
    return config


def test_what_is_reserved_is_given_back(tmp_path):
    before = os.statvfs(tmp_path).f_bfree
    assert reserve.refusal(tmp_path, 64 * 2**20) == 0
    assert not list(tmp_path.iterdir())
    assert before - os.statvfs(tmp_path).f_bfree < 64 * 2**20 // os.statvfs(tmp_path).f_frsize  # others write, too


def test_what_a_phase_has_written_before_it_was_killed_is_not_asked_for_again(config, monkeypatch):
    paths, step = RunPaths.of(config.run.dir), Step(0, ("critic",))
    written = paths.progress(0, "critic") / "step_0000001" / "__0_0.distcp"
    written.parent.mkdir(parents=True)
    (written.parent / CHECKPOINT_MARKER).touch()
    for unfinished in ("step_0000002.partial", "fields_0000001", "step_0000003"):
        (written.parent.parent / unfinished).mkdir()
        (written.parent.parent / unfinished / "file").write_bytes(bytes(500))
    (written.parent.parent / "step_0000002.partial" / CHECKPOINT_MARKER).touch()
    config.train.critic.checkpoint_every = 1
    asked = []
    monkeypatch.setattr(space, "FLOOR_BYTES", 1000)
    monkeypatch.setattr(space, "expected_bytes", lambda *_: 5000)
    monkeypatch.setattr(reserve, "refusal", lambda directory, size: asked.append(size) or 0)
    for size in (0, 2000, 9000):
        written.write_bytes(bytes(size))
        space.require_space(config, new_manifest(config), step)
    assert asked == [6000, 4000, 1000]


def test_a_phase_is_reserved_in_parts_and_a_refusal_of_any_is_one(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(reserve, "PART_BYTES", 100)
    monkeypatch.setattr(reserve, "fallocate", lambda descriptor, size: asked.append(size) or 0)
    assert reserve.refusal(tmp_path, 250) == 0 and asked == [100, 100, 50]
    codes = [0, errno.EDQUOT]
    monkeypatch.setattr(reserve, "fallocate", lambda descriptor, size: codes.pop(0))
    assert reserve.refusal(tmp_path, 250) == errno.EDQUOT and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EFBIG])
def test_where_nothing_can_be_reserved_free_space_decides(small, monkeypatch, code):
    monkeypatch.setattr(reserve, "fallocate", lambda *_: code)
    space.require_space(small, new_manifest(small), STEP)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_named_before_the_phase(small, monkeypatch, code):
    monkeypatch.setattr(reserve, "fallocate", lambda *_: code)
    with pytest.raises(
        T1Error, match=rf"refuses the space for iteration 0: rollout.*{errno.errorcode[code]}"
    ) as caught:
        space.require_space(small, new_manifest(small), STEP)
    assert caught.value.where == small.run.dir and "quota -s" in caught.value.remedy


def test_memory_is_not_reserved(tmp_path, monkeypatch):
    monkeypatch.setattr(reserve, "_in_memory", lambda path: True)
    monkeypatch.setattr(reserve, "fallocate", lambda *_: pytest.fail("reserved memory"))
    assert reserve.refusal(tmp_path, 2**40) == 0


def test_a_phase_that_could_not_write_its_error_for_a_quota_says_so(config, tmp_path, monkeypatch):
    monkeypatch.setattr(reserve, "fallocate", lambda *_: errno.EDQUOT)
    command = dummy_command(config, STEP)
    with pytest.raises(T1Error, match="the quota is used up .EDQUOT.*; the rollout phase") as caught:
        require_success(Exit(1, tmp_path / "main.log", None, "", 1.0), command)
    assert "free some space there" in caught.value.remedy


@pytest.mark.slow
def test_a_quota_met_in_the_middle_is_one_error_and_the_run_goes_on(config, monkeypatch):
    """The phase's first write is refused; then somebody makes room."""
    config.loop.warmup_iterations, config.loop.colocate_roles, config.loop.evaluate_first = 0, True, False

    def run(behave=""):
        command = functools.partial(dummy_command, behave=behave)
        with opened(config, say=lambda line: None, command=command) as runner:
            return runner.run()

    with pytest.raises(T1Error, match="Disk quota exceeded .EDQUOT.") as caught:
        run("quota")
    assert str(caught.value).count("EDQUOT") == 1 and "Traceback" not in str(caught.value)
    assert "free some of the quota" in str(caught.value)
    assert run() == 3


@pytest.fixture
def limited(config):
    """A run directory with a quota of 24 MiB on a file system of 200: btrfs, whose subvolumes have one."""
    folder = config.run.dir
    os.makedirs(folder)
    image = f"{folder}.img"
    with open(image, "wb") as file:
        file.truncate(200 * 2**20)
    lines = [["mkfs.btrfs", "-q", image], ["mount", "-o", "loop", image, folder]]
    lines += [["btrfs", "quota", "enable", folder], ["btrfs", "qgroup", "limit", "24M", folder]]
    try:
        for line in lines:
            if os.geteuid() != 0 or subprocess.run(line, capture_output=True).returncode:
                pytest.skip("only root can mount a file system with quotas, where there is btrfs")
        yield config
    except FileNotFoundError:
        pytest.skip("there is no mkfs.btrfs")
    finally:
        subprocess.run(["umount", folder], capture_output=True)


@pytest.mark.slow
def test_a_real_quota_is_seen_that_free_space_does_not_show(limited, monkeypatch):
    monkeypatch.setattr(space, "expected_bytes", lambda *_: 0)
    monkeypatch.setattr(space, "FLOOR_FILES", 0)
    for needed, fits in ((8 * 2**20, True), (60 * 2**20, False)):
        monkeypatch.setattr(space, "FLOOR_BYTES", needed)
        assert os.statvfs(limited.run.dir).f_bavail * os.statvfs(limited.run.dir).f_frsize > needed
        if fits:
            space.require_space(limited, new_manifest(limited), STEP)
            continue
        with pytest.raises(T1Error, match="Disk quota exceeded"):
            space.require_space(limited, new_manifest(limited), STEP)
