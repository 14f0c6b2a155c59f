"""Disks that are full, directories that can't be written, files that were damaged, clocks that jump, under the loop.

Each ends in a named error or in the use of the last good file; what was mended is gone on from, and the run ends as an
undisturbed one.
"""

import functools
import os
import random
import shutil
import subprocess
import time

import pytest
from loop_commands import dummy_command

from megatron_t1.errors import T1Error, readable
from megatron_t1.loop.runner import opened
from megatron_t1.loop.steps import all_steps
from megatron_t1.loop.verify import verify_run
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.report.metrics import read_metrics
from tests.audit.conftest import played  # noqa: F401
from tests.rollout.conftest import tiny_model  # noqa: F401

pytestmark = pytest.mark.slow
UNRECORDED = ("engine.0.log", "main.log", "executions.jsonl", "launch.sh")


@pytest.fixture
def config(config):
    """Two launches: rollout, and critic with actor and export."""
    config.loop.warmup_iterations, config.loop.iterations, config.loop.colocate_roles = 0, 1, True
    config.loop.evaluate_first = config.loop.evaluate_last = False
    return config


def run(config, say=lambda line: None, behave=""):
    with opened(config, say=say, command=functools.partial(dummy_command, behave=behave)) as runner:
        return runner.run()


def ends_as_undisturbed(config):
    run(config)
    paths, keys = RunPaths.of(config.run.dir), [key for step in all_steps(config.loop) for key in step.keys]
    assert [step.key for step in Manifest.read_exactly(paths.manifest).finished] == keys
    assert [(line["iteration"], line["phase"]) for line in read_metrics(paths.root)] == keys
    assert verify_run(paths.root).problems == []
    for iteration, phase in keys:
        assert (paths.root / f"outputs/{iteration}-{phase}").read_text() == f"{phase} of {iteration}"


def said_of(error):
    """What a user reads; an error that isn't meant for a user fails the test."""
    said = readable(error)
    assert said is not None, error
    assert said.where, said
    return str(said)


@pytest.fixture
def disk(config):
    """A small file system for the run."""
    os.makedirs(config.run.dir)
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=768k", "t1", config.run.dir]).returncode
    ):
        pytest.skip("only root can mount a small file system")
    yield config.run.dir
    subprocess.run(["umount", config.run.dir], check=True)


def fill(directory):
    ballast = os.path.join(directory, "ballast")
    with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.parametrize(
    "moment", ["before the lock", "[2/2] iteration 0: critic + actor + export", "    rollout finished"]
)
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(config, disk, moment, monkeypatch):
    """A phase says that it is finished after its result is written, and before the loop records it."""
    monkeypatch.setattr("megatron_t1.loop.space.FLOOR_BYTES", 0)
    monkeypatch.setattr("megatron_t1.loop.space.FLOOR_FILES", 0)
    monkeypatch.setattr("megatron_t1.loop.space.expected_bytes", lambda *_: 0)
    filled = []

    def say(line):
        if line == moment and not filled:
            filled.append(fill(disk))

    if moment == "before the lock":
        filled.append(fill(disk))
    with pytest.raises((T1Error, OSError)) as caught:
        run(config, say)
    said = said_of(caught.value)
    assert "disk is full" in said or "No space left" in said
    os.unlink(filled[0])
    ends_as_undisturbed(config)


@pytest.mark.parametrize("place", ["", "phases/iter_0000/critic", "outputs", "tensorboard"])
def test_a_directory_that_cannot_be_written_is_named(config, place):
    paths = RunPaths.of(config.run.dir)
    directory = paths.root / place
    directory.mkdir(parents=True)
    bind = ["mount", "--bind", directory, directory]
    if os.geteuid() != 0 or subprocess.run(bind).returncode:
        pytest.skip("only root can mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", directory], check=True)
        with pytest.raises((T1Error, OSError)) as caught:
            run(config)
        assert "Read-only file system" in said_of(caught.value)
    finally:
        subprocess.run(["umount", directory], check=True)
    ends_as_undisturbed(config)


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_nothing(config, jump_s, monkeypatch):
    real, jumps = time.time, []

    def say(line):
        if line.startswith("["):
            jumps.append(jump_s * (-1) ** len(jumps))

    monkeypatch.setattr("time.time", lambda: real() + sum(jumps))
    config.cluster.phase_timeout_s = 60.0
    run(config, say)
    ends_as_undisturbed(config)
    assert len(jumps) == 2


@pytest.mark.parametrize(
    ("name", "damage"), [("launch.json", "a bit turned"), ("result.json", "truncated"), ("result.json", "a bit turned")]
)
def test_a_damaged_file_of_a_launch_that_was_not_recorded_repeats_the_step(config, name, damage):
    """The loop was killed between a phase's end and its record; what it left can't be trusted any more."""
    run(config)
    paths = RunPaths.of(config.run.dir)
    manifest = Manifest.read(paths.manifest)
    manifest.finished = manifest.finished[:1]
    manifest.write(paths.manifest)
    path = paths.phase(0, "actor") / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if damage == "truncated" else data)
    ends_as_undisturbed(config)
    assert (paths.root / "executions.jsonl").read_text().count('[0, "actor"') == 2


def test_a_damaged_result_of_a_recorded_step_is_named(config):
    run(config)
    config.loop.iterations = 2
    result = RunPaths.of(config.run.dir).phase(0, "export") / "result.json"
    result.write_bytes(result.read_bytes()[:-20])
    with pytest.raises(T1Error, match="no readable phase result") as caught:
        run(config)
    assert str(result) in said_of(caught.value)


def test_damaged_options_are_named_before_they_compute_something_else(config):
    run(config)
    from megatron_t1.config.compose import load_run_config

    path = RunPaths.of(config.run.dir).config
    path.write_text(path.read_text().replace("lr: 0.0003", "lr: 0.0007", 1))
    with pytest.raises(T1Error, match="it isn't what its first line is the digest of"):
        load_run_config(config.run.dir)
    assert [line for line in verify_run(config.run.dir).problems if line.startswith("config.yaml")]
    ends_as_undisturbed(config)  # the loop's own options are the good ones


def test_no_bit_of_a_run_turns_unnoticed(played, tmp_path):  # noqa: F811
    """Records, index, exchange log, results, summary, choice of tasks, options, manifest, of a rollout by the phase."""
    assert verify_run(played).problems == []
    files = sorted(path for path in played.rglob("*") if path.is_file() and path.name not in UNRECORDED)
    assert {"tasks.json", "manifest.json", "config.yaml", "summary.json"} < {path.name for path in files}
    generator, weights = random.Random(0), [path.stat().st_size ** 0.5 for path in files]
    for number, path in enumerate([*files, *generator.choices(files, weights, k=20)]):
        copy = tmp_path / str(number)
        shutil.copytree(played, copy)
        target = copy / path.relative_to(played)
        data = bytearray(target.read_bytes())
        position = generator.randrange(8 * len(data))
        data[position // 8] ^= 1 << position % 8
        target.write_bytes(data)
        try:
            found = [line for line in verify_run(copy).problems if path.name in line]
        except T1Error as error:
            found = [said_of(error)]
        assert found or _means_the_same(path, target), (path, position)
        shutil.rmtree(copy)


def _means_the_same(path, other):
    """JSON has white space in which one may become another."""
    import json

    return path.suffix == ".json" and json.loads(path.read_bytes()) == json.loads(other.read_bytes())
