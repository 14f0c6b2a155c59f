"""A network file system shows late, or once not at all, what another node has written."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from loop_commands import dummy_command

from megatron_t1 import fence, sealed
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.loop.launcher import Exit, LogFollower
from megatron_t1.loop.runner import opened
from megatron_t1.loop.slurm import SlurmLauncher
from megatron_t1.loop.steps import Step
from megatron_t1.phase import RESULT_FILE


def test_a_result_that_is_seen_late_is_waited_for(config, monkeypatch):
    """The loop has looked for it before, and its node remembers for a while that it wasn't there."""
    config.loop.evaluate_first = False
    with opened(config, say=lambda line: None, command=dummy_command) as runner:
        path, launch = runner.paths.phase(0, "rollout") / RESULT_FILE, runner.launcher.launch

        def hiding(*arguments, **more):
            done = launch(*arguments, **more)
            os.rename(path, path.with_name("hidden"))
            threading.Timer(0.5, os.rename, (path.with_name("hidden"), path)).start()
            return done

        monkeypatch.setattr(runner.launcher, "launch", hiding)
        monkeypatch.setattr(runner.launcher, "late_files_s", lambda ended: 10.0)
        assert [result.phase for result in runner.execute(Step(0, ("rollout",)))] == ["rollout"]
        monkeypatch.setattr(runner.launcher, "launch", launch)
        monkeypatch.setattr(runner.launcher, "late_files_s", lambda ended: 0.3)
        runner.command = lambda *it: dummy_command(*it, "silent")
        with pytest.raises(IncompleteError, match="no readable phase result"):
            runner.execute(Step(0, ("critic",)))


@pytest.mark.parametrize(
    ("said", "late"),
    [("", True), ("srun: error: Node failure on n2\nsrun: Job step aborted: Waiting up to 32 seconds", False)],
)
def test_nothing_is_late_of_a_step_that_lost_its_node(config, tmp_path, said, late):
    (tmp_path / "main.log").write_text(said)
    found = SlurmLauncher(config).late_files_s(Exit(0, tmp_path / "main.log", None, "", 1.0))
    assert (found > 60.0) == late  # NFS remembers for so long by default


def test_a_log_that_cannot_be_read_for_a_moment_ends_nothing(tmp_path, monkeypatch):
    path, lines = tmp_path / "main.log", []
    follower = LogFollower(path, lines.append)
    path.write_text("one\n")
    follower.advance()

    def stale(*_, **more):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.exists", stale)
        patch.setattr("builtins.open", stale)
        follower.advance()
    path.write_text("one\ntwo\n")
    follower.advance(final=True)
    assert lines == ["one", "two"]


WATCHING = (
    "import pathlib, sys, time; from megatron_t1 import fence; fence.PATIENCE_S = float(sys.argv[2]); "
    "fence.watch(pathlib.Path(sys.argv[1]), 'second', every_s=0.05); time.sleep(30)"
)


def test_a_launch_is_not_ended_by_the_name_of_the_one_before(tmp_path):
    """Its node may remember the earlier launch.json for a while."""
    sealed.write(tmp_path / fence.LAUNCH_FILE, {"launch": "first"})
    process = subprocess.Popen([sys.executable, "-c", WATCHING, str(tmp_path), "60"], stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    sealed.write(tmp_path / fence.LAUNCH_FILE, {"launch": "second"})
    time.sleep(0.5)
    assert process.poll() is None
    sealed.write(tmp_path / fence.LAUNCH_FILE, {"launch": "third"})
    assert "started again elsewhere" in process.communicate(timeout=20)[1] and process.returncode == -signal.SIGTERM


def test_one_that_never_sees_its_own_name_was_superseded(tmp_path):
    sealed.write(tmp_path / fence.LAUNCH_FILE, {"launch": "third"})
    process = subprocess.Popen([sys.executable, "-c", WATCHING, str(tmp_path), "0.2"], stderr=subprocess.PIPE)
    assert process.wait(20) == -signal.SIGTERM
    process.stderr.close()


def test_training_processes_watch_their_launch_too(tmp_path, monkeypatch):
    from megatron_t1.training import main

    watched = []
    monkeypatch.setattr(fence, "watch", lambda directory, launch: watched.append((directory, launch)))
    monkeypatch.setattr(main, "joined", lambda *_: 1 / 0)
    monkeypatch.setenv(fence.LAUNCH_MARK, "mine")
    with pytest.raises(ZeroDivisionError):
        main.run_roles(tmp_path, 3, ["critic", "actor"], [])
    assert watched == [(tmp_path.resolve() / "phases/iter_0003/critic", "mine")]


def test_a_marker_of_another_worker_that_cannot_be_read_yet_is_waited_for(tmp_path, monkeypatch):
    from megatron_t1.rollout.crew import Crew

    def stale(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("pathlib.Path.read_text", stale)
    import asyncio

    with pytest.raises(T1Error, match="worker 0 of 2 has not finished"):
        asyncio.run(Crew(0, 2, "mine").wait_for_others(tmp_path, 0.3))


@pytest.mark.parametrize("workers", [1, 2])
def test_records_of_another_node_s_worker_are_waited_for(workers, monkeypatch):
    import asyncio
    from types import SimpleNamespace

    from megatron_t1.rollout import phase
    from megatron_t1.rollout.crew import Crew

    seen = iter([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}])
    plan = SimpleNamespace(attempts=[SimpleNamespace(trajectory_id=name) for name in "ab"], directory="there")
    store = SimpleNamespace(headers=lambda: next(seen))
    monkeypatch.setattr(phase, "LOOK_EVERY_S", 0.01)
    found = asyncio.run(phase.all_headers(plan, store, Crew(0, workers, "mine")))
    assert found == ({"a": 1, "b": 2} if workers == 2 else {"a": 1})
