import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from loop_commands import dummy_command

from megatron_t1 import atomic, sealed
from megatron_t1.config.compose import load_run_config, save
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.loop.lock import RunLock
from megatron_t1.loop.runner import opened
from megatron_t1.loop.steps import Step, all_steps
from megatron_t1.loop.verify import verify_run
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.report.metrics import read_metrics


def run(config, behave=""):
    with opened(config, say=lambda line: None, command=functools.partial(dummy_command, behave=behave)) as runner:
        return runner.run()


def executions(config):
    path = RunPaths.of(config.run.dir).root / "executions.jsonl"
    return [tuple(json.loads(line)[:2]) for line in path.read_text().splitlines()] if path.exists() else []


def expected(config):
    return [key for step in all_steps(config.loop) for key in step.keys]


def test_a_whole_run_then_nothing_is_left(config):
    assert run(config) == 7
    assert executions(config) == expected(config)
    assert run(config) == 0
    assert executions(config) == expected(config)
    lines = read_metrics(config.run.dir)
    assert [(line["iteration"], line["phase"]) for line in lines] == expected(config)
    paths = RunPaths.of(config.run.dir)
    assert not (paths.root / "loop.lock").exists()
    assert list(paths.tensorboard.glob("events*"))
    assert load_run_config(config.run.dir) == config


def test_a_longer_training_goes_on(config):
    run(config)
    config.loop.iterations = 2
    run(config)
    assert sorted(executions(config)) == sorted({*expected(config), (2, "evaluation")})


def cut_manifest(config, *keys):
    """What a kill between a result and the manifest leaves."""
    path = RunPaths.of(config.run.dir).manifest
    manifest = Manifest.read(path)
    manifest.finished = [step for step in manifest.finished if step.key not in keys]
    manifest.write(path)


def test_killed_between_result_and_manifest_is_not_repeated(config):
    run(config)
    before = Manifest.read(RunPaths.of(config.run.dir).manifest)
    cut_manifest(config, (1, "export"), (2, "evaluation"))
    run(config)
    after = Manifest.read(RunPaths.of(config.run.dir).manifest)
    assert executions(config) == expected(config)
    assert [step.result_sha256 for step in after.finished] == [step.result_sha256 for step in before.finished]
    assert len(read_metrics(config.run.dir)) == len(expected(config))


def test_colocated_launch_killed_before_the_manifest_is_adopted_whole(config):
    config.loop.colocate_roles = True
    run(config)
    cut_manifest(config, (1, "critic"), (1, "actor"), (1, "export"), (2, "evaluation"))
    run(config)
    assert executions(config) == expected(config)


def test_result_with_damaged_outputs_is_repeated(config):
    run(config)
    cut_manifest(config, (2, "evaluation"))
    (RunPaths.of(config.run.dir).root / "outputs" / "2-evaluation").write_text("cut")
    run(config)
    assert executions(config) == [*expected(config), (2, "evaluation")]


def test_result_of_other_inputs_is_repeated(config):
    run(config)
    cut_manifest(config, (1, "export"), (2, "evaluation"))
    launch = RunPaths.of(config.run.dir).phase(1, "export") / "launch.json"
    raw = json.loads(launch.read_text())
    raw["inputs"]["1/actor"] = "0" * 64
    atomic.write_json(launch, raw)
    run(config)
    assert executions(config).count((1, "export")) == 2


@pytest.mark.parametrize("what", ["outputs/1-actor", "phases/iter_0001/actor/result.json"])
def test_recorded_inputs_that_vanished_are_an_error(config, what):
    run(config)
    cut_manifest(config, (1, "export"), (2, "evaluation"))
    root = RunPaths.of(config.run.dir).root
    (root / "phases/iter_0001/export/result.json").unlink()
    (root / what).write_text("{}")
    with pytest.raises(IncompleteError, match="actor|result"):
        run(config)


def test_a_recorded_input_of_another_content_is_an_error(config):
    run(config)
    cut_manifest(config, (1, "export"), (2, "evaluation"))
    root = RunPaths.of(config.run.dir).root
    (root / "phases/iter_0001/export/result.json").unlink()
    output = root / "outputs/1-actor"
    output.write_text(output.read_text().upper())  # as long as before
    with pytest.raises(IncompleteError, match="outputs/1-actor: its SHA-256 is"):
        run(config)


def test_a_step_repeated_by_hand_is_the_one_that_counts(config, monkeypatch):
    run(config)
    with opened(config, say=lambda line: None, command=dummy_command) as runner:
        runner.forget((2, "evaluation"))
        monkeypatch.setenv("DUMMY_VALUE", "0.75")
        runner.execute(Step(2, ("evaluation",)))
    found = {(line["iteration"], line["phase"]): line["metrics"] for line in read_metrics(config.run.dir)}
    assert found[2, "evaluation"] == {"evaluation/value": 0.75} and found[0, "evaluation"] == {"evaluation/value": 0.5}


def test_phase_without_a_result_has_failed(config):
    with pytest.raises(IncompleteError, match="no readable phase result"):
        run(config, "silent")


def test_failed_phase_then_again(config):
    with pytest.raises(T1Error, match="frobnicator"):
        run(config, "fail")
    run(config)
    assert len(executions(config)) == len(expected(config)) + 1
    attempts = [step.attempts for step in Manifest.read(RunPaths.of(config.run.dir).manifest).finished]
    assert attempts[0] == 2
    assert (RunPaths.of(config.run.dir).phase(0, "evaluation") / "logs" / "attempt_1" / "main.log").exists()


def test_full_disk_is_named_before_anything_starts(config, monkeypatch):
    import collections

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(T1Error, match="disk is too full"):
        run(config)
    assert executions(config) == []


def test_two_loops_on_one_run(config):
    os.makedirs(config.run.dir)
    with RunLock(config.run.dir), pytest.raises(T1Error, match="another loop"):
        run(config)


def test_step_by_hand_needs_its_inputs(config):
    with opened(config, say=lambda line: None, command=dummy_command) as runner:
        with pytest.raises(T1Error, match="needs rollout of iteration 0 first"):
            runner.execute(Step(0, ("critic",)))
        runner.execute(Step(0, ("rollout",)))
        runner.execute(Step(0, ("critic",)))
        with pytest.raises(T1Error, match="was read by critic of iteration 0"):
            runner.forget((0, "rollout"))
        runner.forget((0, "critic"))
        runner.execute(Step(0, ("critic",)))
    assert executions(config) == [(0, "rollout"), (0, "critic"), (0, "critic")]


LOOP = textwrap.dedent("""
    import functools, sys
    from loop_commands import dummy_command
    from megatron_t1.config.compose import load_run_config
    from megatron_t1.loop.launcher import Stopped
    from megatron_t1.loop.runner import opened
    config = load_run_config(sys.argv[1])
    try:
        command = functools.partial(dummy_command, behave=sys.argv[2])
        with opened(config, say=lambda line: None, command=command) as runner:
            runner.run()
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)
""")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_phase_and_keeps_the_manifest(config, tmp_path, monkeypatch, number):
    pids = tmp_path / "pids"
    monkeypatch.setenv("PID_FILE", str(pids))
    save(config, f"{config.run.dir}/config.yaml")
    loop = subprocess.Popen([sys.executable, "-c", LOOP, config.run.dir, "tree"])
    try:
        while not pids.exists():
            assert loop.poll() is None
            time.sleep(0.05)
        loop.send_signal(number)
        assert loop.wait(120) == 128 + number
    finally:
        loop.kill()
    assert Manifest.read(RunPaths.of(config.run.dir).manifest).keys == set()
    assert not (RunPaths.of(config.run.dir).root / "loop.lock").exists()


def test_nohup_is_respected(config, tmp_path):
    """A loop that was told to outlive its terminal does; SIGTERM still ends it."""
    save(config, f"{config.run.dir}/config.yaml")
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    loop = subprocess.Popen([sys.executable, "-c", ignoring + LOOP, config.run.dir, "linger:evaluation"])
    try:
        while not executions(config):
            assert loop.poll() is None
            time.sleep(0.05)
        loop.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert loop.poll() is None
        loop.terminate()
        assert loop.wait(60) == 128 + signal.SIGTERM
    finally:
        loop.kill()


@pytest.mark.slow
def test_killed_at_random_moments_the_run_ends_as_undisturbed(config):  # slime#1558
    import random

    def launches():
        files = RunPaths.of(config.run.dir).root.glob("phases/**/launch.json")
        return {(path, path.read_text()) for path in files}

    random.seed(0)
    save(config, f"{config.run.dir}/config.yaml")
    killed_in_a_phase = 0
    for _ in range(12):
        before = launches()
        loop = subprocess.Popen([sys.executable, "-c", LOOP, config.run.dir, ""])
        while launches() <= before and loop.poll() is None:  # until a phase begins
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.3))
        killed_in_a_phase += loop.poll() is None
        loop.kill()
        loop.wait()
    assert killed_in_a_phase >= 3
    run(config)
    assert Manifest.read(RunPaths.of(config.run.dir).manifest).keys == set(expected(config))
    keys = [(line["iteration"], line["phase"]) for line in read_metrics(config.run.dir)]
    assert keys == expected(config)


def test_a_jump_between_iterations_is_said_at_the_end_of_the_rollout(config):  # strands-env#183
    said = []
    with opened(config, say=said.append, command=dummy_command) as runner:
        for iteration, errors in enumerate((0.0, 0.01, 0.3)):
            result = PhaseResult("rollout", iteration, {"rollout/verifier_errors": errors})
            result.write(runner.paths.phase(iteration, "rollout"))
            runner._record(result, "launch", 1.0, 1)
    assert said == ["    alarm, iteration 2: episodes whose verifier failed: 0.3, 0.005 before"]


def test_logs_of_an_attempt_are_never_continued_by_another(config):
    """Whatever is known of the earlier one: its launch.json is damaged."""
    with pytest.raises(T1Error, match="frobnicator"):
        run(config, behave="fail")
    directory = RunPaths.of(config.run.dir).phase(0, "evaluation")
    (directory / "launch.json").write_text("{")
    run(config)
    assert sorted(path.name for path in (directory / "logs").iterdir()) == ["attempt_1", "attempt_2"]
    assert "frobnicator" not in (directory / "logs/attempt_2/main.log").read_text()


@pytest.mark.parametrize("damage", ["changed", "lost"])
def test_rollouts_are_played_from_the_tasks_of_the_first(config, damage):
    tasks = RunPaths.of(config.run.dir).tasks
    tasks.parent.mkdir()
    sealed.write(tasks, {"tasks": ["a"]})
    with opened(config, say=lambda line: None, command=dummy_command) as runner:
        runner.execute(Step(0, ("rollout",)))
    assert verify_run(config.run.dir).problems == []
    good = tasks.read_bytes()
    tasks.write_text("{}") if damage == "changed" else tasks.unlink()
    assert [line for line in verify_run(config.run.dir).problems if line.startswith("tasks.json")]
    with pytest.raises(IncompleteError, match="choice of tasks"):
        run(config)  # the phase of this test chooses none
    cut_manifest(config, (1, "rollout"))
    tasks.write_bytes(good)
    assert run(config) and verify_run(config.run.dir).problems == []


def test_a_run_whose_manifest_was_lost_is_still_one(config, capsys):
    from megatron_t1.cli import main
    from megatron_t1.config.inputs import is_run
    from megatron_t1.loop.outside import run_outside

    run(config)
    paths = RunPaths.of(config.run.dir)
    paths.manifest.unlink()
    assert is_run(paths.root)
    main(["slurm", "status", str(paths.root)])
    said = capsys.readouterr()
    assert "next: iteration 2: evaluation" in said.out and "going on from manifest.previous.json" in said.err
    with pytest.raises(T1Error, match="this directory holds a training"):
        run_outside(config, "sft", say=print)
    run(config)
    assert executions(config) == expected(config)  # the last step is taken from its own result
