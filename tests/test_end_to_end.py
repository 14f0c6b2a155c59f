"""The whole loop on its real parts at the smallest size: tasks, sandboxes, vLLM, Megatron over two processes, disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_t1.loop.steps import all_steps
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, missing_outputs
from megatron_t1.report.metrics import read_metrics
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.store import RolloutStore
from tests.importing.exporting import export
from tests.workshop import MARK, Workshop, played, records, wait_until

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def finished(workshop) -> RunPaths:
    """A run from start to end, critic, actor and export in one process group."""
    said = workshop.run("run")
    assert "done:" in said
    return RunPaths.of(workshop.directory / "run")


EVERY_STEP = [
    (0, "evaluation"), (0, "rollout"), (0, "critic"),
    (1, "rollout"), (1, "critic"), (1, "actor"), (1, "export"), (2, "evaluation"),
]  # fmt: skip


def require_what_it_says(paths: RunPaths, expected: list[tuple[int, str]]) -> dict[tuple[int, str], dict[str, float]]:
    """Check a finished run against its own manifest, metrics and files; the metrics of each step."""
    manifest = Manifest.read(paths.manifest)
    assert [step.key for step in manifest.finished] == expected
    assert all(step.attempts == 1 for step in manifest.finished)
    lines = read_metrics(paths.root)
    assert [(line["iteration"], line["phase"]) for line in lines] == expected
    metrics = {key: line["metrics"] for key, line in zip(expected, lines, strict=True)}
    for iteration, phase in expected:
        result = PhaseResult.read(paths.phase(iteration, phase))
        assert missing_outputs(result, paths.root, digests=True) == []
    for iteration in (0, 1):
        assert metrics[iteration, "rollout"]["rollout/episodes"] == 12
        assert metrics[iteration, "critic"]["critic/value_loss"] > 0
        trained = RolloutStore(paths.rollouts(iteration))
        assert {record.header.policy_versions[0] for record in trained} == {0}
        assert metrics[iteration, "critic"]["batch/loss_tokens"] == sum(
            (record.origin == Origin.SAMPLED).sum() for record in trained
        )
    actor = metrics[1, "actor"]
    assert actor["actor/optimizer_steps"] == 2 and abs(actor["actor/ratio"] - 1) < 0.1
    # The export is what vLLM sampled the last evaluation with.
    for policy in [iteration for iteration, phase in ((0, 0), (1, 2)) if (phase, "evaluation") in expected]:
        summary = json.loads((paths.evaluation(policy) / "summary.json").read_text())
        assert summary["policy"] == policy
        versions = {v for record in RolloutStore(paths.evaluation(policy)) for v in record.header.policy_versions}
        assert versions == {policy}
    assert metrics[2, "evaluation"]["evaluation/episodes"] == 12
    assert not (paths.root / "loop.lock").exists()
    return metrics


def test_a_run_leaves_what_it_says(workshop, finished):
    metrics = require_what_it_says(finished, EVERY_STEP)
    assert metrics[1, "actor"]["gap/logprob_gap_replay"] < 2e-6  # fp32: both sides agree on every sampled token
    # Taught policies run commands in their shells.
    assert sum(record.header.counts.get("commands", 0) for record in RolloutStore(finished.rollouts(0))) >= 6
    assert "nothing is left to do" in workshop.run("run")


def test_a_hybrid_model_goes_through_the_same_loop(workshop, tmp_path_factory):
    """Gated delta nets in bfloat16, in vLLM and in Megatron over two processes, with routes of every layer."""
    place = Workshop(tmp_path_factory.mktemp("hybrid"), model="tiny_hybrid", tasks=workshop, seeded=False)
    try:
        place.t1("model", "init", *place.options, place.untaught)
        place.teach("train.sft.tokens=5000")
        assert "done:" in place.run("run", "loop.evaluate_first=false")
        paths = RunPaths.of(place.directory / "run")
        actor = require_what_it_says(paths, EVERY_STEP[1:])[1, "actor"]
        # What bfloat16 leaves between two implementations, and what other experts add to it.
        assert actor["gap/logprob_gap_replay"] < min(0.02, actor["gap/logprob_gap_no_replay"])
        assert next(iter(RolloutStore(paths.rollouts(0)))).routes.shape[1:] == (4, 4)
    finally:
        shutil.rmtree(place.scratch)


def test_an_imported_rollout_trains_to_the_same_losses(workshop, finished):
    """The run's rollouts as JSON lines, imported into another run: Megatron computes the same from either."""
    paths = RunPaths.of(workshop.directory / "imported")
    options = ["--options", *workshop.options, f"model.path={workshop.directory}/sft/model"]
    for iteration in (0, 1):
        lines = workshop.directory / f"rollout_{iteration}.jsonl"
        assert export(finished.rollouts(iteration), lines) == 12
        words = ["import", "jsonl", str(lines), "--run", str(paths.root), "--iteration", str(iteration)]
        assert "12 with the requests that made them; PPO can train on 12" in workshop.t1(*words, *options)
        options = []  # the run has begun
    assert "nothing is wrong" in workshop.t1("audit", str(paths.root))
    for iteration, role in ((0, "critic"), (1, "critic"), (1, "actor")):
        workshop.t1("train", role, f"run.dir={paths.root}", f"iteration={iteration}")
        original, again = (PhaseResult.read(run.phase(iteration, role)).metrics for run in (finished, paths))
        assert again == pytest.approx(original, rel=1e-6, nan_ok=True), role


def test_show_and_transcript(workshop, finished):
    said = workshop.t1("show", str(finished.root))
    for what in ("rollouts", "updates", "evaluations on held-out tasks", "warm-up", "where the time went"):
        assert what in said
    listed = workshop.t1("show", str(finished.root), "--trajectories")
    name = RolloutStore(finished.rollouts(1)).ids()[0]
    assert name in listed
    transcript = workshop.t1("show", str(finished.root), "--trajectory", name)
    assert name in transcript and "checks" in transcript
    assert "B - A" in workshop.t1("compare", str(finished.root))


@pytest.fixture
def before_critic(finished, workshop):
    """A copy of the run as it was before the critic phase of iteration 1."""
    copy = RunPaths.of(workshop.directory / "by_hand")
    shutil.copytree(finished.root, copy.root)
    manifest = Manifest.read(copy.manifest)
    manifest.finished = manifest.finished[:4]
    manifest.write(copy.manifest)
    for iteration, phase in ((1, "critic"), (1, "actor"), (1, "export"), (2, "evaluation")):
        shutil.rmtree(copy.phase(iteration, phase))
    for directory in (copy.values(1), copy.checkpoint("critic", 2), copy.root / "checkpoints/actor", copy.root / "hf"):
        shutil.rmtree(directory)
    yield copy
    shutil.rmtree(copy.root)


def test_phases_by_hand_give_what_the_loop_got(workshop, finished, before_critic):
    here = f"run.dir={before_critic.root}"
    tokenizer = workshop.directory / "sft/model/tokenizer.json"
    original = tokenizer.read_text()
    tokenizer.write_text(original + " ")
    try:
        said = workshop.t1("train", "critic", here, "iteration=1", status=1)
    finally:
        tokenizer.write_text(original)
    assert "tokenizer.json has the SHA-256" in said and "remedy:" in said
    for words, phase in ((("train", "critic"), "critic"), (("train", "actor"), "actor"), (("export",), "export")):
        workshop.t1(*words, here, "iteration=1")
        by_loop, by_hand = (PhaseResult.read(paths.phase(1, phase)) for paths in (finished, before_critic))
        assert by_hand.metrics == pytest.approx(by_loop.metrics, rel=1e-12)
        compared = [
            (one.path, one.sha256, other.sha256)
            for one, other in zip(by_loop.outputs, by_hand.outputs, strict=True)
            if one.path.startswith(("values/", "hf/"))
        ]
        assert bool(compared) == (phase != "actor")
        assert all(one == other for _, one, other in compared)
    shard = next(path for path in before_critic.checkpoint("actor", 1).iterdir() if path.suffix == ".distcp")
    os.truncate(shard, shard.stat().st_size - 1)
    said = workshop.t1("export", here, "iteration=1", status=1)
    assert shard.name in said and "bytes, expected" in said


class Killed:
    """A run whose loop is killed in every kind of phase, and whose engine once."""

    def __init__(self, workshop: Workshop, name: str):
        self.workshop, self.name = workshop, name
        self.paths = RunPaths.of(workshop.directory / name)
        self.kept: dict[Path, dict[str, str]] = {}
        # Few episodes at a time: a phase is in their middle for a while.
        self.words = [*workshop.run_words(name), "loop.colocate_roles=false", "rollout.concurrency=3"]

    def until(self, condition: Callable[[], object]) -> subprocess.Popen:
        """Start the loop and wait for a moment of it."""
        loop = self.workshop.start(*self.words)
        output = self.workshop.output
        try:
            wait_until(lambda: condition() or loop.poll() is not None, 300, lambda: output.read_text()[-3000:])
            assert loop.poll() is None, output.read_text()[-3000:]
        except BaseException:
            loop.kill()
            raise
        return loop

    def kill_in(self, iteration: int, phase: str, condition: Callable[[], object]) -> None:
        directory = self.paths.phase(iteration, phase)
        loop = self.until(lambda: (directory / "launch.json").exists() and condition())
        assert not (directory / RESULT_FILE).exists()
        os.kill(loop.pid, signal.SIGKILL)
        loop.wait()
        self.workshop.no_process_is_left()
        assert (iteration, phase) not in Manifest.read(self.paths.manifest).keys
        self.remember()

    def remember(self) -> None:
        for directory in [*self.paths.root.glob("rollouts/*"), *self.paths.root.glob("evaluations/*")]:
            self.kept[directory] = {**self.kept.get(directory, {}), **records(directory)}


def count(directory: Path) -> int:
    return len(list(directory.glob("*.safetensors")))


def test_killed_in_every_phase_it_ends_as_if_undisturbed(workshop, finished):  # slime#1558 vllm#55510 AReaL#622
    killed = Killed(workshop, "killed")
    paths = killed.paths
    killed.kill_in(0, "evaluation", lambda: count(paths.evaluation(0)) >= 3)
    assert 3 <= len(killed.kept[paths.evaluation(0)]) < 12
    killed.kill_in(0, "critic", lambda: list(paths.phase(0, "critic").glob("logs/attempt_1/*/attempt_0/1/*.log")))
    assert len(killed.kept[paths.rollouts(0)]) == 12

    def engine() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                if process.environ().get(MARK) == workshop.mark and "api_server" in words and "supervisor" not in words:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    found: list[psutil.Process] = []  # looking through all processes takes as long as a rollout

    def at_work() -> bool:
        found.extend([] if found else engine())
        return bool(found) and count(paths.rollouts(1)) >= 2

    loop = killed.until(at_work)
    found[0].kill()
    before = set(Manifest.read(paths.manifest).keys)
    assert loop.wait(60) == 1
    said = workshop.output.read_text()
    assert said.count("status 137") == 1 and "Traceback" not in said  # said once
    assert "remedy:" in said and "start the same command again" in said
    workshop.no_process_is_left()
    assert set(Manifest.read(paths.manifest).keys) == before
    killed.remember()
    assert 2 <= len(killed.kept[paths.rollouts(1)]) < 12

    # When the values are written but not the critic, when the actor is being saved, and when an export just begins.
    killed.kill_in(1, "critic", lambda: count(paths.values(1)) == 2)
    killed.kill_in(1, "actor", lambda: any((paths.root / "checkpoints").glob("actor/*")))
    killed.kill_in(1, "export", lambda: True)
    said = workshop.t1(*killed.words)
    assert "done:" in said

    manifest = Manifest.read(paths.manifest)
    assert [step.key for step in manifest.finished] == [key for step in all_steps_of(manifest) for key in step]
    for step in manifest.finished:
        result = PhaseResult.read(paths.phase(*step.key))
        assert missing_outputs(result, paths.root, digests=True) == []
    keys = [(line["iteration"], line["phase"]) for line in read_metrics(paths.root)]
    assert sorted(keys) == sorted(step.key for step in manifest.finished)
    for directory, digests in killed.kept.items():
        found = records(directory)
        assert digests.items() <= found.items() and len(found) == 12
    # Sampling is seeded: an undisturbed run plays the same episodes, and trains the same critic on them.
    for iteration in (0, 1):
        assert played(paths.rollouts(iteration)) == played(finished.rollouts(iteration))
    for phase in ("critic", "actor"):
        one, other = (PhaseResult.read(where.phase(1, phase)).metrics for where in (paths, finished))
        chosen = [f"{phase}/optimizer_steps", f"{phase}/learning_rate", "batch/loss_tokens", "batch/mean_reward"]
        assert [one[name] for name in chosen] == [other[name] for name in chosen]
        assert one[f"{phase}/grad_norm"] == pytest.approx(other[f"{phase}/grad_norm"], rel=1e-3)


def all_steps_of(manifest: Manifest) -> list[list[tuple[int, str]]]:
    from megatron_t1.config.schema import LoopConfig

    options = {key.removeprefix("loop."): value for key, value in manifest.config.items() if key.startswith("loop.")}
    return [step.keys for step in all_steps(LoopConfig(**options))]


def test_a_port_in_use_is_named(workshop):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = workshop.run("port", f"rollout.engine.port={port}", status=1)
    assert said.count(f"port {port} is in use") == 1 and "remedy:" in said


def test_a_task_without_verifier_is_named(workshop):
    broken = workshop.directory / "broken_tasks"
    shutil.copytree(workshop.directory / "tasks/train", broken)
    task = sorted(path for path in broken.iterdir() if path.is_dir())[2]
    shutil.rmtree(task / "tests")
    said = workshop.run("verifier", f"env.tasks={broken}", status=1)
    assert task.name in said and "test" in said and "remedy:" in said
    assert "starting the engine" not in said  # although an evaluation comes first


def test_another_configuration_doesnt_touch_a_finished_run(workshop, finished):
    before = finished.manifest.read_bytes()
    said = workshop.run("run", "train.actor.lr=0.5", "rollout.tempurature=2", status=2)
    assert "tempurature" in said and "near: " in said
    said = workshop.run("run", "train.actor.lr=0.5", status=1)
    assert "train.actor.lr: the run has 0.0003, now 0.5" in said
    assert finished.manifest.read_bytes() == before


@pytest.fixture
def small_disk(workshop):
    """A file system of 64 MiB."""
    place = workshop.directory / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "t1", place]).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_named_before_anything_starts(workshop, small_disk):
    said = workshop.run("disk", status=1)
    assert "disk is too full" in said and "0.06 GiB free" in said and "finished steps are kept" in said
