"""Control groups: where they are found, what is written, and what is said where they can't be."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox import cgroup, scratch
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.cgroup import CONTROLLERS, ControlGroups, Parents, find_parents
from megatron_t1.environment.sandbox.guarantees import guarantees
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.errors import T1Error

needs_groups = pytest.mark.skipif(
    bool(find_parents(SandboxConfig()).missing), reason="this driver can't make control groups"
)


@pytest.fixture(autouse=True)
def fresh_search():
    cgroup._find.cache_clear()
    yield
    cgroup._find.cache_clear()


@pytest.fixture
def hierarchies(monkeypatch):
    """Put text in place of /proc/self/cgroup and /proc/self/mountinfo."""

    def put(own, mounts):
        texts = {"/proc/self/cgroup": own, "/proc/self/mountinfo": mounts}
        read = Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: texts.get(str(self)) or read(self, *a, **k))

    return put


def directories(path, **files):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_version_1_below_the_drivers_own_groups(tmp_path, hierarchies):
    for name in ("memory/jobs/7", "pids", "cpu,cpuacct"):
        directories(tmp_path / name)
    hierarchies(
        "4:memory:/jobs/7\n3:pids:/\n2:cpu,cpuacct:/\n0::/\n",
        f"30 20 0:1 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"31 20 0:2 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
        f"32 20 0:3 / {tmp_path}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
    )
    found = cgroup._version_1()
    assert found == {
        "memory": tmp_path / "memory/jobs/7", "pids": tmp_path / "pids", "cpu": tmp_path / "cpu,cpuacct",
    }  # fmt: skip


def test_a_containers_view_of_its_group(tmp_path, hierarchies):
    """Inside a container /proc names the group from the host's root on, and the mount shows only what is below it."""
    hierarchies("0::/docker/abc/inner\n", f"30 20 0:1 /docker/abc {tmp_path} rw - cgroup2 cgroup rw\n")
    assert cgroup._version_2() == tmp_path / "inner"


def test_version_2_hands_controllers_on(tmp_path):
    own = directories(
        tmp_path / "own", cgroup__controllers="cpu memory", cgroup__subtree_control="cpu\n", cgroup__procs="1\n2\n"
    )
    assert cgroup._enable(own, "cpu") == ""
    assert cgroup._enable(own, "memory") == "" and (own / "cgroup.subtree_control").read_text() == "+memory"
    assert "does not have it" in cgroup._enable(own, "pids")
    assert "No such file" in cgroup._enable(tmp_path / "none", "pids")


def test_a_group_with_only_this_driver_is_moved_down(tmp_path):
    own = directories(tmp_path / "own", cgroup__procs=f"{os.getpid()}\n")
    cgroup._move_into_leaf(own)
    assert (own / "t1-driver" / "cgroup.procs").read_text() == str(os.getpid())
    directories(own, cgroup__procs=f"1\n{os.getpid()}\n")
    with pytest.raises(OSError, match="other processes"):
        cgroup._move_into_leaf(own)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (1, {"memory.limit_in_bytes": "4096", "pids.max": "7", "cpu.cfs_period_us": "100000",
             "cpu.cfs_quota_us": "150000"}),
        (2, {"memory.max": "4096", "pids.max": "7", "cpu.max": "150000 100000"}),
    ],
)  # fmt: skip
def test_what_is_written(tmp_path, version, expected):
    parents = Parents({name: tmp_path for name in CONTROLLERS}, dict.fromkeys(CONTROLLERS, version))
    groups = ControlGroups(parents, "t1-sandbox-x", memory_bytes=4096, max_processes=7, cpus=1.5)
    groups.add(123)
    (path,) = groups.paths
    assert {file.name: file.read_text() for file in path.iterdir()} == {**expected, "cgroup.procs": "123"}
    unlimited = ControlGroups(parents, "y", memory_bytes=1, max_processes=1, cpus=0)
    assert "-1" in unlimited.paths[0].joinpath("cpu.cfs_quota_us").read_text() if version == 1 else True
    assert version == 1 or (unlimited.paths[0] / "cpu.max").read_text() == "max 100000"


def test_a_directory_that_is_no_group_is_named(tmp_path):
    with pytest.raises(T1Error, match="no memory groups") as caught:
        find_parents(SandboxConfig(cgroup=str(tmp_path)))
    assert str(tmp_path) in caught.value.where
    off = guarantees(SandboxConfig(cgroup="off", memory_mb=77))
    assert off["memory"].startswith("77 MB address space of each process, RLIMIT_AS")
    assert "env.sandbox.cgroup=off" in off["cpu"]


@needs_groups
def test_a_sandbox_is_in_its_groups_and_leaves_none(make_task, tmp_path):
    async def main():
        sandbox = BubblewrapSandbox(SandboxConfig(memory_mb=100, disk_mb=20, max_processes=33, cpus=0.5))
        try:
            await sandbox.start(make_task())
            await sandbox.run("setsid sleep 1000 & true", 60)
            groups = list(sandbox._groups.paths)
            pid = sandbox._shell._process.init_pid
            own = Path(f"/proc/{pid}/cgroup").read_text()
            return (
                sandbox.guarantees(),
                groups,
                [len((path / "cgroup.procs").read_text().split()) for path in groups],
                own,
            )
        finally:
            await sandbox.stop()

    said, groups, counts, own = asyncio.run(main())
    assert all(count >= 3 for count in counts)  # bwrap's first process, the shell, the daemon
    assert own.count(groups[0].name) == len(groups)
    assert not any(path.exists() for path in groups)
    assert re.match(r"100 MB together, cgroup v[12] below /", said["memory"])
    assert said["cpu"].startswith("0.5 processors together")
    assert set(said) == {"memory", "processes", "cpu", "calls", "network", "disk", "system"}


@needs_groups
def test_fork_bomb_takes_no_more_than_its_processes(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        await sandbox.run(":(){ :|:& };:", 1.0)
        (group,) = [path for path in sandbox._groups.paths if (path / "pids.max").exists()]
        held = (group / "pids.max").read_text().strip(), int((group / "pids.current").read_text())
        first = await sandbox.run("echo alive", 5.0)
        await sandbox.start(make_task())
        return held, first, await sandbox.run("echo alive", 60)

    (limit, current), _, after = in_sandbox(body, max_processes=40)
    assert limit == "40" and current <= 40
    assert after.output == "alive\n"


@needs_groups
def test_processor_time_is_bounded(in_sandbox, make_task):
    burn = (
        "python3 -I -c 'import time; used, began = time.process_time(), time.monotonic()\n"
        "while time.monotonic() - began < 0.6: pass\nprint(time.process_time() - used)'"
    )

    async def body(sandbox):
        await sandbox.start(make_task())
        return float((await sandbox.run(burn, 60)).output)

    assert in_sandbox(body, cpus=0.25) < 0.35


@needs_groups
def test_groups_of_a_killed_driver_are_removed(tmp_path):
    left = scratch.ScratchDirectory(str(tmp_path), 16, 100)
    groups = left.limit(SandboxConfig())
    os.close(left._lock)
    assert groups.paths and scratch.remove_abandoned(str(tmp_path)) == 1
    assert not any(path.exists() for path in groups.paths)


@needs_groups
def test_groups_of_a_driver_killed_while_it_made_them_are_removed(tmp_path, monkeypatch):
    left = scratch.ScratchDirectory(str(tmp_path), 16, 100)
    find_parents(SandboxConfig())  # which tries once, by making a group
    made, mkdir = [], Path.mkdir

    def killed_after_one(path, *arguments, **keywords):
        mkdir(path, *arguments, **keywords)
        made.append(path)
        raise KeyboardInterrupt  # as abrupt as a signal: no OSError to clean up after

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "mkdir", killed_after_one)
        left.limit(SandboxConfig())
    os.close(left._lock)
    assert made[0].exists() and scratch.remove_abandoned(str(tmp_path)) == 1
    assert not made[0].exists()


@needs_groups
def test_groups_that_refuse_a_process_lose_the_sandbox_and_leak_nothing(in_sandbox, make_task, monkeypatch):
    async def body(sandbox):
        await sandbox.start(make_task())
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(ControlGroups, "add", lambda self, pid: (_ for _ in ()).throw(OSError(16, "busy")))
            with pytest.raises(SandboxLost, match="no limits by control groups: busy"):
                await sandbox.run("true", 60)
        assert len(os.listdir("/proc/self/fd")) == before
        return await sandbox.run("echo works", 60)

    assert in_sandbox(body).output == "works\n"
