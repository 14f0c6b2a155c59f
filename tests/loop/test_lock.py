import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

from megatron_t1.errors import T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.lock import LOCK_FILE, OtherLoop, RunLock, lock_owner, owner_alive, this_process
from tests.workshop import wait_until


def write_lock(directory, **changes):
    (directory / LOCK_FILE).write_text(json.dumps({**this_process(), "token": "other", **changes}))


def quick(directory):
    """A lock that watches a silent owner for a moment only."""
    return RunLock(directory, heartbeat_s=0.05)


def test_second_loop_is_refused_and_the_owner_named(tmp_path):
    with RunLock(tmp_path):
        with pytest.raises(T1Error) as caught, RunLock(tmp_path):
            pass
        assert str(os.getpid()) in str(caught.value) and socket.gethostname() in str(caught.value)
        assert (tmp_path / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []


def test_dead_owner_is_recognised(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_lock(tmp_path, pid=gone.pid, start_ticks=1)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_reused_process_number_is_not_the_owner(tmp_path):
    write_lock(tmp_path, start_ticks=1)  # this process's number, but started at another time
    with RunLock(tmp_path):
        pass


def beating(lock, stop):
    """Another loop's heartbeat, until `stop` is set."""

    def beat():
        while not stop.wait(0.05):
            os.utime(lock)

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


@pytest.mark.parametrize("beats", [False, True])
def test_a_restarted_machine_leaves_a_stale_lock_and_another_one_of_its_name_does_not(tmp_path, beats):
    """Containers and images give several machines one name; a restarted one's lock is young, but stays silent."""
    write_lock(tmp_path, boot="another")
    assert owner_alive({**this_process(), "boot": "another"}) is None
    stop = threading.Event()
    thread = beating(tmp_path / LOCK_FILE, stop) if beats else None
    try:
        if beats:
            with pytest.raises(OtherLoop), quick(tmp_path):
                pass
        else:
            with quick(tmp_path):
                pass
    finally:
        stop.set()
        if thread:
            thread.join()


def test_a_copied_run_is_not_held_by_the_loop_of_the_original(tmp_path):
    original, copy = tmp_path / "run", tmp_path / "copy"
    with quick(original):
        shutil.copytree(original, copy)
        with quick(copy) as lock:
            lock.require_held()
        with pytest.raises(OtherLoop), quick(original):
            pass


def test_a_lock_that_is_given_back_to_a_faster_loop_may_be_there_already(tmp_path, monkeypatch):
    """Three loops at once: what this one took away by mistake has been taken by the third one meanwhile."""
    write_lock(tmp_path, start_ticks=1)  # stale
    rename = os.rename

    def late(source, target):
        write_lock(tmp_path, token="faster")
        rename(source, target)
        write_lock(tmp_path, token="fastest")

    monkeypatch.setattr("os.rename", late)
    with pytest.raises(OtherLoop), quick(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_other_host_is_judged_by_its_heartbeat(tmp_path):
    write_lock(tmp_path, host="elsewhere")
    with pytest.raises(T1Error, match="elsewhere"), RunLock(tmp_path):
        pass
    old = time.time() - 1000
    os.utime(tmp_path / LOCK_FILE, (old, old))
    with quick(tmp_path):
        pass


def test_damaged_lock_is_judged_by_its_age(tmp_path):
    (tmp_path / LOCK_FILE).write_text("")
    with pytest.raises(T1Error), RunLock(tmp_path):
        pass
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    with quick(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", '{"host": 5, "pid": "x"}', '{"pid": 1}'])
def test_damaged_lock_says_what_to_do(tmp_path, content):
    lock = tmp_path / LOCK_FILE
    lock.write_text(content)
    with pytest.raises(T1Error, match="damaged") as caught, RunLock(tmp_path):
        pass
    assert "None" not in str(caught.value) and "delete the file" in caught.value.remedy
    os.utime(lock, (1, 1))
    with quick(tmp_path):
        pass


def test_lock_of_this_host_without_a_process_is_damaged_not_a_crash(tmp_path):
    write_lock(tmp_path, pid=None)
    with pytest.raises(T1Error, match="damaged"), RunLock(tmp_path):
        pass


def test_what_a_killed_loop_left_beside_the_lock_is_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = {**this_process(), "pid": gone.pid, "start_ticks": 1}
    (tmp_path / f"{LOCK_FILE}.0123abcd").write_text(json.dumps(left))  # killed before the link
    (tmp_path / f"{LOCK_FILE}.4567abcd").touch()  # killed before the write
    os.utime(tmp_path / f"{LOCK_FILE}.4567abcd", (1, 1))
    living = tmp_path / f"{LOCK_FILE}.89ababcd"  # of a loop that is just starting
    living.write_text(json.dumps(this_process()))
    with RunLock(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_FILE, living.name]


def test_a_full_disk_is_an_error_without_leftovers(tmp_path, monkeypatch):
    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(T1Error, match="can't be locked: No space left"), RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_heartbeat_moves(tmp_path):
    with RunLock(tmp_path, heartbeat_s=0.05):
        os.utime(tmp_path / LOCK_FILE, (1, 1))
        time.sleep(0.3)
        assert (tmp_path / LOCK_FILE).stat().st_mtime > 1000


@pytest.mark.parametrize("jump_s", [-86400.0, -300.0, 300.0, 86400.0])
def test_a_jump_of_the_clock_takes_no_lock_from_a_living_owner(tmp_path, jump_s):
    """The owner can't be seen from here, and its last heartbeat carries the time of before the jump."""
    write_lock(tmp_path, host="elsewhere")
    lock, stop = tmp_path / LOCK_FILE, threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(lock)

    then = time.time() - jump_s
    os.utime(lock, (then, then))
    beating = threading.Timer(0.1, beat)
    beating.start()
    try:
        with pytest.raises(T1Error, match="elsewhere"), RunLock(tmp_path, heartbeat_s=0.3):
            pass
    finally:
        stop.set()
        beating.join()


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_jump_of_the_clock_keeps_no_dead_owners_lock(tmp_path, jump_s):
    write_lock(tmp_path, host="elsewhere")
    then = time.time() - jump_s
    os.utime(tmp_path / LOCK_FILE, (then, then))
    with quick(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == socket.gethostname()


def test_who_was_thought_dead_notices_and_leaves_the_lock_to_its_new_owner(tmp_path):
    with pytest.raises(T1Error, match="another loop has taken over this run: process 1 on elsewhere"):
        with quick(tmp_path) as lock:
            write_lock(tmp_path, host="elsewhere", pid=1)
            wait_until(lambda: lock.lost, 5)
            with pytest.raises(T1Error, match="taken over"):
                lock.require_held()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "elsewhere"


def test_a_lock_that_was_deleted_is_taken_again(tmp_path):
    with quick(tmp_path) as lock:
        (tmp_path / LOCK_FILE).unlink()
        wait_until((tmp_path / LOCK_FILE).exists, 5)
        lock.require_held()
        with pytest.raises(T1Error, match=str(os.getpid())), RunLock(tmp_path):
            pass


def test_a_link_whose_answer_was_lost_is_one_s_own(tmp_path, monkeypatch):
    """NFS repeats a request that wasn't answered, and then says that the name is taken."""
    link = os.link

    def repeated(source, target):
        link(source, target)
        raise FileExistsError(17, "File exists")

    with monkeypatch.context() as patch:
        patch.setattr("os.link", repeated)
        with RunLock(tmp_path):
            assert (tmp_path / LOCK_FILE).exists()
    with RunLock(tmp_path), monkeypatch.context() as patch:
        patch.setattr("os.link", repeated)
        with pytest.raises(OtherLoop, match=str(os.getpid())), RunLock(tmp_path):
            pass


def test_outside_of_jobs_too_an_owner_s_job_is_known_to_be_over(tmp_path, monkeypatch):
    """A login node has no SLURM_CLUSTER_NAME, and doesn't see the owner's process."""
    answers = {
        ("scontrol", "show", "config"): "ControlMachine = x\nClusterName             = virtual\nMaxJobId = 5\n",
        ("scontrol", "show", "job", "7", "-o"): "JobId=7 JobState=NODE_FAIL",
    }
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: answers[tuple(command)])
    write_lock(tmp_path, host="n1", slurm_job="7", slurm_cluster="virtual")
    assert lock_owner(tmp_path) == {}
    write_lock(tmp_path, host="n1", slurm_job="7", slurm_cluster="another")
    assert lock_owner(tmp_path)["host"] == "n1"


@pytest.mark.parametrize(("start", "taken"), [("2026-01-01T10:00:00", True), ("2026-01-01T10:00:30", False)])
def test_an_earlier_start_of_the_same_job_is_over(tmp_path, monkeypatch, start, taken):
    """A controller that lost a job's start in a crash starts it again, on other nodes, and counts no restart."""
    shown = "JobId=7 JobState=RUNNING StartTime={} Restarts=0"
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: shown.format("2026-01-01T10:00:30"))
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "virtual"}.items():
        monkeypatch.setenv(name, value)
    write_lock(tmp_path, host="n1", slurm_start=datetime.fromisoformat(start).timestamp())
    if taken:
        with RunLock(tmp_path) as lock:
            assert lock.former["host"] == "n1"
            owner = json.loads((tmp_path / LOCK_FILE).read_text())
            assert owner["slurm_start"] == datetime.fromisoformat("2026-01-01T10:00:30").timestamp()
    else:
        with pytest.raises(OtherLoop, match="on n1, Slurm job 7"), RunLock(tmp_path):
            pass
