import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from loop_commands import dummy_command

from megatron_t1.config.compose import save
from megatron_t1.errors import T1Error
from megatron_t1.loop import launcher as launcher_module
from megatron_t1.loop.launcher import Exit, PhaseCommand, Stopped, last_lines, require_success
from megatron_t1.loop.local import LocalLauncher
from megatron_t1.loop.steps import Step
from megatron_t1.processes import start_ticks

STEP = Step(0, ("rollout",))


def launch(config, tmp_path, behave="", **options):
    os.makedirs(config.run.dir, exist_ok=True)
    lines = []
    command = dummy_command(config, STEP, behave)
    launcher = LocalLauncher(config, **options)
    return launcher.launch(command, tmp_path / "logs", echo=lines.append), command, lines


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_success_and_what_it_said(config, tmp_path):
    result, command, lines = launch(config, tmp_path)
    require_success(result, command)
    assert lines == ["rollout finished"]
    assert result.seconds < 5


def test_failure_is_one_readable_error(config, tmp_path):
    result, command, _ = launch(config, tmp_path, "fail")
    with pytest.raises(T1Error) as caught:
        require_success(result, command)
    text = str(caught.value)
    assert "exit status 3" in text and "the frobnicator is missing" in text and "install it" in text
    assert "loading" not in text
    assert str(tmp_path / "logs" / "main.log") in text


def test_death_by_signal_is_named(config, tmp_path):
    result, command, _ = launch(config, tmp_path, "crash")
    with pytest.raises(T1Error, match="died of SIGKILL"):
        require_success(result, command)


def test_a_killed_rollout_leaves_no_mounted_disks(config, tmp_path):
    """They lie in memory; nobody may start another sandbox on this machine for days."""
    from megatron_t1.environment.sandbox.process import host_identity
    from megatron_t1.environment.sandbox.scratch import ScratchDirectory, shared_base

    sandboxes = config.env.sandbox
    left = ScratchDirectory(shared_base(sandboxes.scratch_dir, host_identity(sandboxes)), 1, 100)
    os.close(left._lock)  # what the kernel does when its driver is killed
    result, _, _ = launch(config, tmp_path, "crash")
    assert result.code != 0
    assert not left.path.exists() and str(left.path) not in Path("/proc/mounts").read_text()


def test_interpreter_that_does_not_exist(config, tmp_path):
    config.cluster.rollout.python = "/no/such/python"
    result, command, _ = launch(config, tmp_path)
    with pytest.raises(T1Error, match="/no/such/python"):
        require_success(result, command)
    assert LocalLauncher(config).preflight() == ["cluster.rollout.python=/no/such/python: no such interpreter"]


def test_setup_lines_and_environment_reach_the_phase(config, tmp_path):
    config.cluster.rollout.setup = ["export FROM_SETUP='a b'; echo $FROM_ENV"]
    config.cluster.rollout.env = {"FROM_ENV": "$(touch never)"}
    _, _, lines = launch(config, tmp_path)
    assert lines == ["$(touch never)", "rollout finished"]  # data is never run by a shell


def test_arguments_are_never_read_by_a_shell(config, tmp_path):
    command = PhaseCommand("echo", "rollout", "timeit", ("-n1", "-r1", "print('$HOME; touch x')"))
    lines = []
    LocalLauncher(config).launch(command, tmp_path / "logs", echo=lines.append)
    assert lines[0] == "$HOME; touch x"


@pytest.mark.parametrize("how", ["stop", "timeout"])
def test_the_whole_tree_ends_with_the_phase(config, tmp_path, monkeypatch, how):  # vllm#55510
    pids = tmp_path / "pids"
    monkeypatch.setenv("PID_FILE", str(pids))
    if how == "timeout":
        config.cluster.phase_timeout_s = 2.0
        result, command, _ = launch(config, tmp_path, "tree")
        with pytest.raises(T1Error, match="phase_timeout_s=2"):
            require_success(result, command)
    else:
        requested = lambda: signal.SIGTERM if pids.exists() else 0  # noqa: E731
        with pytest.raises(Stopped):
            launch(config, tmp_path, "tree", stop_requested=requested)
    assert all(start_ticks(int(pid)) is None for pid in pids.read_text().split())


LOOP = textwrap.dedent("""
    import sys
    from pathlib import Path
    from loop_commands import dummy_command
    from megatron_t1.config.compose import load_run_config
    from megatron_t1.loop.local import LocalLauncher
    from megatron_t1.loop.steps import Step
    config = load_run_config(sys.argv[1])
    LocalLauncher(config).launch(dummy_command(config, Step(0, ("rollout",)), "tree"), Path(sys.argv[2]))
""")


@pytest.mark.parametrize("victim", ["loop", "supervisor"])
def test_kill_9_leaves_no_orphan(config, tmp_path, monkeypatch, victim):  # vllm#55846
    pids = tmp_path / "pids"
    monkeypatch.setenv("PID_FILE", str(pids))
    save(config, f"{config.run.dir}/config.yaml")
    loop = subprocess.Popen([sys.executable, "-c", LOOP, config.run.dir, str(tmp_path / "logs")])
    try:
        assert wait_for(pids.exists)
        if victim == "loop":
            loop.kill()
        else:
            children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(loop.pid)], capture_output=True, text=True)
            os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
        loop.wait(10)
        left = lambda: [pid for pid in pids.read_text().split() if start_ticks(int(pid)) is not None]  # noqa: E731
        assert wait_for(lambda: not left()), left()
    finally:
        loop.kill()


def test_a_failure_on_a_full_disk_says_so(tmp_path, monkeypatch):
    ended = Exit(code=1, log=tmp_path / "main.log", rank=None, tail="", seconds=1.0)
    command = PhaseCommand("critic", "train", "module", ())
    with pytest.raises(T1Error, match=r"^the critic phase failed"):
        require_success(ended, command)
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(launcher_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(T1Error, match=r"^the disk is full \(0.0 MiB are free\); the critic phase failed") as caught:
        require_success(ended, command)
    assert caught.value.remedy.startswith("free some space")


def test_last_lines_prefer_the_error_itself(tmp_path):
    log = tmp_path / "log"
    log.write_text("noise\n" * 50 + "error on rank 1: bad\n  where:  here\n")
    assert last_lines(log) == "error on rank 1: bad\n  where:  here"
    log.write_text("".join(f"{number}\n" for number in range(100)))
    assert last_lines(log).splitlines()[0] == "85"


@pytest.mark.slow
def test_torchrun_names_the_first_failing_rank(config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILING_RANK", "1")
    os.makedirs(config.run.dir)
    base = dummy_command(config, Step(0, ("critic",)), "fail")
    command = PhaseCommand("critic", "train", base.module, base.arguments, 2, distributed=True)
    lines = []
    result = LocalLauncher(config).launch(command, tmp_path / "logs", echo=lines.append)
    assert result.rank == 1
    with pytest.raises(T1Error, match="first failing rank: 1.*\n.*the frobnicator is missing"):
        require_success(result, command)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(("place", "passed_on"), [("checkout", True), ("lib/python3.11/site-packages", False)])
def test_an_installation_is_not_put_on_the_path_of_other_environments(tmp_path, monkeypatch, place, passed_on):
    root = tmp_path / place
    monkeypatch.setattr(launcher_module, "__file__", str(root / "megatron_t1" / "loop" / "launcher.py"))
    path = launcher_module._with_package_path({"PYTHONPATH": "/mine"})["PYTHONPATH"].split(":")
    assert path == ([str(root), "/mine"] if passed_on else ["/mine"])


def test_a_script_that_a_full_disk_does_not_take_is_named(config, tmp_path, monkeypatch):
    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError) as caught:
        launch(config, tmp_path)
    assert caught.value.filename == str(tmp_path / "logs" / "launch.sh")
