"""A sandbox's disk is its own and bounded; where it can't be, a full file system makes verdicts untrusted."""

import asyncio
import ctypes
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox import disk, scratch
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.verifier import verify

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
FILL = "for n in 1 2 3 4 5 6 7 8 9; do head -c 8000000 /dev/zero > /tmp/fill$n; done 2>/dev/null; true"


@contextmanager
def small_file_system(path):
    """A tmpfs of 64 MiB that several sandboxes share."""
    assert disk.mount_bounded(path, 64, 4096)
    path.chmod(0o755)
    try:
        yield path
    finally:
        disk.unmount(path)


async def play(sandbox, task, command, other=None, fill=""):
    """Start, let another sandbox fill the disk, play, verify."""
    await sandbox.start(task)
    if other is not None:
        await other.start(task)
        await other.run(fill, 60)
    result = await sandbox.run(command, 60)
    return result, await verify(sandbox, task)


def two(base, body):
    async def main():
        made = [BubblewrapSandbox(SandboxConfig(disk_mb=16, max_files=2000), base) for _ in range(2)]
        try:
            return await body(*made)
        finally:
            for sandbox in made:
                await sandbox.stop()

    return asyncio.run(main())


SOLUTION = "head -c 5000000 /dev/zero > /app/big"
CHECK = "r=0; [ $(stat -c %s /app/big) = 5000000 ] && r=1; echo $r > /logs/verifier/reward.txt\n"


@needs_root
@pytest.mark.parametrize("fill", [FILL, "mkdir /tmp/n; cd /tmp/n; seq 5000 | xargs touch 2>/dev/null; true"])
def test_one_agent_does_not_fill_anothers_disk(open_path, make_task, fill):
    task = make_task({"a.txt": "a"}, CHECK)
    with small_file_system(open_path / "small") as base:
        result, verdict = two(base, lambda mine, other: play(mine, task, SOLUTION, other, fill))
    assert result.exit_code == 0
    assert verdict.solved


@needs_root
@pytest.mark.parametrize("fill", [FILL, "mkdir /tmp/n; cd /tmp/n; seq 5000 | xargs touch 2>/dev/null; true"])
def test_where_nothing_can_be_mounted_a_full_disk_is_no_trusted_zero(open_path, make_task, fill, monkeypatch):
    def may_not_mount(path, size_mb, max_files):
        path.mkdir()
        path.chmod(0o711)
        return False

    task = make_task({"a.txt": "a"}, CHECK)
    with small_file_system(open_path / "small") as base:
        monkeypatch.setattr(scratch, "mount_bounded", may_not_mount)
        _, verdict = two(base, lambda mine, other: play(mine, task, SOLUTION, other, fill))
        assert (verdict.trusted, verdict.reason) == (False, disk.FULL)

        async def emptied_before_the_verifier(mine, other):
            await mine.start(task)
            await other.start(task)
            await other.run(FILL, 60)
            await mine.run(SOLUTION, 60)
            await other.run("rm -f /tmp/fill*", 60)
            first = await verify(mine, task)
            await mine.start(task)
            await mine.run(SOLUTION, 60)
            return first, await verify(mine, task)

        first, again = two(base, emptied_before_the_verifier)
    assert (first.trusted, first.reason) == (False, disk.FULL)
    assert again.solved


@needs_root
def test_a_verifier_that_fills_the_disk_is_not_trusted(in_sandbox, make_task):
    task = make_task(test_sh=f"{FILL}; echo 1 > /logs/verifier/reward.txt\n")

    async def body(sandbox):
        await sandbox.start(task)
        return await verify(sandbox, task)

    verdict = in_sandbox(body, disk_mb=16)
    assert not verdict.trusted and verdict.reason.startswith(disk.FULL)


@needs_root
def test_a_full_disk_is_empty_after_a_new_start(in_sandbox, make_task):
    async def body(sandbox):
        task = make_task()
        await sandbox.start(task)
        mounted = os.stat(sandbox._scratch.disk).st_dev
        await sandbox.run(FILL, 60)
        full = await sandbox.run("echo more > /tmp/more", 60)
        await sandbox.start(task)
        assert os.stat(sandbox._scratch.disk).st_dev == mounted  # one mount for many episodes
        return full, await sandbox.run("df -m / | tail -1", 60), await verify(sandbox, task)

    full, after, verdict = in_sandbox(body, disk_mb=16)
    assert full.exit_code == 1 and "No space left" in full.output
    assert after.output.split()[1:3] == ["16", "1"]
    assert verdict.solved


@needs_root
def test_a_driver_that_may_not_mount_goes_on_and_others_are_told_apart(tmp_path, monkeypatch):
    class Library:
        def mount(self, *_):
            ctypes.set_errno(self.number)
            return -1

    library = Library()
    monkeypatch.setattr(disk, "_libc", lambda: library)
    library.number = 1  # EPERM
    made = scratch.ScratchDirectory(str(tmp_path), 16, 100)
    assert not made.bounded and made.disk.is_dir()
    made.remove()
    library.number = 12  # ENOMEM
    with pytest.raises(OSError, match="Cannot allocate"):
        scratch.ScratchDirectory(str(tmp_path), 16, 100)
    assert list(tmp_path.iterdir()) == []


def test_room_is_measured_in_bytes_and_files(monkeypatch):
    def status(**changes):
        values = dict(f_blocks=10_000_000, f_frsize=4096, f_bavail=5_000_000, f_files=1_000_000, f_favail=500_000)
        return type("Status", (), values | changes)

    config, path = SandboxConfig(file_size_mb=64), Path("/")
    for expected, changes in [
        (True, {}),
        (False, {"f_bavail": (64 << 20) // 4096 - 1}),
        (True, {"f_bavail": (64 << 20) // 4096}),
        (False, {"f_favail": 1000}),
        (True, {"f_files": 0, "f_favail": 0}),
        (True, {"f_blocks": 10_000, "f_bavail": 700}),
        (False, {"f_blocks": 10_000, "f_bavail": 600}),
    ]:
        monkeypatch.setattr(os, "statvfs", lambda _, changes=changes: status(**changes))
        assert disk.has_room(path, config) is expected, changes
