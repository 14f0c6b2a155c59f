"""Putting files in, getting files out, and what changed: while the agent's processes run and work against it."""

import asyncio
import ctypes
import os
import threading

import pytest

from megatron_t1.environment.sandbox.changes import Snapshot
from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.interface import Change, Fetched, Sandbox, SandboxLost


def test_put_and_get(in_sandbox, make_task):
    async def body(sandbox):
        assert isinstance(sandbox, Sandbox)
        with pytest.raises(SandboxLost, match="not started"):
            await sandbox.get_files(["/app/a.txt"], 10)
        await sandbox.start(make_task({"a.txt": "a"}))
        await sandbox.run(
            "cd /tmp; export KEPT=1; ln -s /app there; mkfifo pipe; mkdir folder; head -c 100 /dev/zero > big", 60
        )
        await sandbox.put_files({"/opt/new/x.sh": (b"echo $KEPT", 0o755), "/tmp/there/y": (b"\0\xff", 0o600)})
        ran = await sandbox.run("bash -c /opt/new/x.sh; stat -c '%a %u' /opt/new/x.sh /opt/new /app/y", 60)
        got = await sandbox.get_files(
            ["/app/a.txt", "/tmp/there/y", "/tmp/pipe", "/tmp/folder", "/tmp/big", "/none", "/usr/bin/env"], 99
        )
        with pytest.raises(SandboxLost, match="read-only system"):
            await sandbox.put_files({"/usr/bin/x": (b"", 0o755)})
        with pytest.raises(SandboxLost, match="names no file"):
            await sandbox.put_files({"/tmp/..": (b"", 0o755)})
        with pytest.raises(SandboxLost, match="can't write /tmp/folder"):
            await sandbox.put_files({"/tmp/folder": (b"", 0o644)})
        return ran, got

    ran, got = in_sandbox(body)
    assert ran.output == "1\n755 0\n755 0\n600 0\n"
    assert got.files == {"/app/a.txt": b"a", "/tmp/there/y": b"\0\xff"}
    assert {path: problem for path, problem in got.problems.items()} == {
        "/tmp/pipe": "is not a regular file",
        "/tmp/folder": "is not a regular file",
        "/tmp/big": "is larger than 99 bytes",
        "/none": "No such file or directory",
        "/usr/bin/env": "lies in the read-only system",
    }


def test_links_stay_inside(in_sandbox, make_task, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host")

    async def body(sandbox):
        await sandbox.start(make_task())
        up = "../" * 30
        await sandbox.run(
            f"ln -s {secret} /app/s; ln -s {up}{secret} /app/r; ln -s {tmp_path} /app/d; ln -s loop /app/loop;"
            " ln -s /proc/self/root /app/p; ln -s . /app/here",
            60,
        )
        got = await sandbox.get_files(
            ["/app/s", "/app/r", "/app/d/secret", "/app/loop", "/app/p/etc/passwd", f"/{up}{secret}"], 1000
        )
        await sandbox.put_files({"/app/s": (b"mine", 0o644), "/app/d/secret": (b"mine", 0o644)})
        return got, await sandbox.get_files(["/app/here/here/s", "/app/d/secret", str(secret)], 1000)

    got, put = in_sandbox(body)
    assert got.files == {}
    assert len(got.problems) == 6
    assert put.files == {"/app/here/here/s": b"mine", "/app/d/secret": b"mine", str(secret): b"mine"}
    assert secret.read_text() == "host"


def test_a_link_put_in_a_directorys_place_leads_nowhere(tmp_path):
    """Somebody swaps a directory for a link to the host as fast as possible, while the driver writes and reads."""
    victim, root = tmp_path / "victim", tmp_path / "root"
    for path in (victim, root, root / "a"):
        path.mkdir()
    (victim / "file").write_text("host")
    (root / "link").symlink_to(victim)
    inside, stop = Inside(root, None), threading.Event()

    def swap():
        exchange = ctypes.CDLL(None).renameat2
        while not stop.is_set():
            exchange(-100, bytes(root / "a"), -100, bytes(root / "link"), 2)  # AT_FDCWD, RENAME_EXCHANGE

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes = set()
    try:
        for number in range(500):
            try:
                inside.write("/a/file", b"agent", 0o644)
                outcomes.add(inside.read("/a/file", 100))
            except OSError:
                outcomes.add(b"refused")
            if number % 100 == 0:
                for _, status in inside.walk():
                    assert status.st_ino != (victim / "file").stat().st_ino
    finally:
        stop.set()
        thread.join()
    assert b"host" not in outcomes
    assert (victim / "file").read_text() == "host" and os.listdir(victim) == ["file"]


def test_changes(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task({"a.txt": "a", "b/c.txt": "c", "same": "x"}, directories=("kept",)))
        none = await sandbox.changes()
        await sandbox.run(
            "echo more >> a.txt; rm -r b; mkdir -p new/deep; touch new/deep/f -d @0; ln -s a.txt l; touch same -d @0;"
            " cat same; (sleep 100 >/dev/null 2>&1 &)",
            60,
        )
        first = await sandbox.changes()
        await sandbox.start(make_task({"a.txt": "a"}))
        return none, first, await sandbox.changes()

    none, first, again = in_sandbox(body)
    assert none == again == []
    assert first == [
        Change("/app/a.txt", "modified"),
        Change("/app/b", "removed"),
        Change("/app/b/c.txt", "removed"),
        Change("/app/l", "added"),
        Change("/app/new", "added"),
        Change("/app/new/deep", "added"),
        Change("/app/new/deep/f", "added"),
        Change("/app/same", "modified"),  # its time was set back, its change time can't be
    ]


def test_a_change_right_after_the_snapshot_is_seen(tmp_path):
    for number in range(50):
        path = tmp_path / "f"
        path.write_text("before")
        snapshot = Snapshot(Inside(tmp_path, None))
        assert snapshot.changes() == []
        snapshot.settle()
        path.write_text(f"after {number}")
        assert snapshot.changes() == [Change("/f", "modified")]


def test_reading_a_deep_or_closed_tree_ends(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        script = "import os\nfor _ in range(1500):\n os.mkdir('d'*20)\n os.chdir('d'*20)\nopen('end','w')"
        await sandbox.run(f'python3 -I -c "{script}"; mkdir /tmp/closed; touch /tmp/closed/x; chmod 0 /tmp/closed', 60)
        return await sandbox.changes(), await sandbox.get_files(["/app/" + "d" * 20 + "/x", "/app/" + "d/" * 5000], 10)

    changes, fetched = in_sandbox(body)
    assert 200 < len(changes) < 300
    assert isinstance(fetched, Fetched) and len(fetched.problems) == 2


def test_files_are_reachable_after_the_verifier(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        await sandbox.run("echo result > /app/out", 60)
        await sandbox.run_verifier(make_task(), 60, ())
        return await sandbox.get_files(["/app/out"], 100), await asyncio.wait_for(sandbox.changes(), 30)

    fetched, changes = in_sandbox(body)
    assert fetched.files == {"/app/out": b"result\n"}
    assert Change("/app/out", "added") in changes
