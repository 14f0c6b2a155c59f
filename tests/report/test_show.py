import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from megatron_t1.config.compose import absolute, compose
from megatron_t1.errors import IncompleteError
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.report.metrics import MetricsWriter
from megatron_t1.report.plots import write_plots
from megatron_t1.report.show import print_run, print_summary
from megatron_t1.report.transcript import VISIBLE, print_trajectories, print_transcript
from megatron_t1.trajectory.record import Header, Origin, StepOutcome, Trajectory, Verdict
from megatron_t1.trajectory.store import RolloutStore


@pytest.fixture
def run(tmp_path):
    """Two iterations, one of them warm-up, with two evaluations."""
    config = absolute(compose([f"run.dir={tmp_path}", "loop.warmup_iterations=1", f"model.path={tmp_path / 'model'}"]))
    paths = RunPaths.of(tmp_path)
    results = [
        PhaseResult("evaluation", 0, {"evaluation/checks_passed": 2.0, "evaluation/success_rate": 0.05},
                    {"total": 4.0}),
        PhaseResult("rollout", 0, {"rollout/mean_reward": 0.5, "rollout/checks_passed": 2.0},
                    {"total": 20.0, "episodes": 15.0}),
        PhaseResult("critic", 0, {"critic/explained_variance": -0.25}, {"total": 5.0}),
        PhaseResult("rollout", 1, {"rollout/mean_reward": 0.75, "rollout/checks_passed": 3.0}, {"total": 20.0}),
        PhaseResult("critic", 1, {"critic/explained_variance": 0.125}, {"total": 5.0}),
        PhaseResult("actor", 1, {"actor/approx_kl": 0.002, "actor/clip_fraction": 0.031, "gap/logprob_gap_replay": 1e-6,
                                 "gap/logprob_gap_no_replay": 2e-3}, {"total": 6.0}),
        PhaseResult("export", 1, {}, {"total": 1.0}),
        PhaseResult("evaluation", 2, {"evaluation/checks_passed": 2.5, "evaluation/success_rate": 0.1}, {"total": 4.0}),
    ]  # fmt: skip
    writer, manifest = MetricsWriter(paths), new_manifest(config)
    for result in results:
        writer.append(result, seconds=result.timings_s["total"] + 1)
        key = (result.iteration, result.phase)
        manifest.finished.append(FinishedStep(*key, "0" * 64, "launch", {}, 1.0, 1, 1, 1, 0.0))
    writer.close()
    manifest.write(paths.manifest)
    return tmp_path


def shown(print_it, *arguments):
    console = Console(file=io.StringIO(), width=200)
    print_it(*arguments, console)
    return console.file.getvalue()


def test_tables_of_a_run(run):
    text = shown(print_run, run)
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["1"]]
    assert rows[0] == ["1", "0", "0.750", "3.00", "32", "s"]
    assert rows[1] == ["1", "0", "0.12", "2.0e-03", "3.1%", "1.0e-06", "2.0e-03"]
    assert "warm-up" in text
    assert "2.500" in text and "10.0%" in text  # the second evaluation
    assert "40.0 s" in text and "episodes 15.0 s" in text  # where the time went
    assert "last finished: evaluation of iteration 2" in text


def test_summary_says_where_to_look_next(run):
    text = shown(print_summary, run)
    for words in (f"t1 show {run}", f"t1 compare {run}", "tensorboard --logdir", f"{run}/plots"):
        assert words in text


def test_lost_metrics_are_read_from_the_results(run):
    paths = RunPaths.of(run)
    before = shown(print_run, run)
    for step in Manifest.read(paths.manifest).finished:
        lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
        (line,) = (line for line in lines if (line["iteration"], line["phase"]) == (step.iteration, step.phase))
        result = PhaseResult(step.phase, step.iteration, line["metrics"], line["timings_s"])
        result.write(paths.phase(step.iteration, step.phase))
    paths.metrics.write_bytes(b"\xff\xfe")  # no line at all
    after = shown(print_run, run)
    assert [row for row in before.splitlines() if "0.750" in row and "3.00" in row][0].split()[:4] == [
        row.split()[:4] for row in after.splitlines() if "0.750" in row and "3.00" in row
    ][0]
    assert "0.12" in after and "nothing is finished" not in after


def test_run_that_has_only_begun(tmp_path):
    new_manifest(compose([f"run.dir={tmp_path}"])).write(RunPaths.of(tmp_path).manifest)
    assert "nothing is finished yet" in shown(print_run, tmp_path)
    assert write_plots(tmp_path) == []


def test_plots_of_what_was_measured(run):
    written = write_plots(run)
    assert {path.name for path in written} == {"reward.png", "checks.png", "success.png", "gap.png", "critic.png",
                                               "policy.png", "time.png"}  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.fixture
def with_trajectory(run):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"make": 0, "file": 1, "touch": 2, "ok": 3, "<stop>": 4, "done": 5}
    tokenizer = Tokenizer(WordLevel(words, unk_token="ok"))
    tokenizer.pre_tokenizer = Whitespace()
    (run / "model").mkdir()
    tokenizer.save(str(run / "model" / "tokenizer.json"))
    origin = np.array([Origin.PROMPT, Origin.PROMPT, Origin.SAMPLED, Origin.SAMPLED, Origin.REPAIR, Origin.ENVIRONMENT,
                       Origin.SAMPLED], np.uint8)  # fmt: skip
    sampled = origin == Origin.SAMPLED
    from megatron_t1.trajectory.contract import SamplingContract

    contract = SamplingContract(1.0, 1.0, "raw", (4,), "0" * 64, "chatml_bash", "vllm", "float32", "float32", 0, 0, 0)
    header = Header("task-1-0", "task-1", 0, 0, (0, 0), "submitted",
                    Verdict(1, 2, 0, True, checks={"file exists": True, "file is empty": False}), {"total": 0.25},
                    contract, counts={"turns": 2, "tokens": 7})  # fmt: skip
    trajectory = Trajectory(
        header, np.array([0, 1, 2, 1, 4, 3, 5], np.int32), origin, np.array([0, 0, 0, 0, 0, 0, 1], np.uint16),
        np.where(sampled, -0.5, np.nan).astype(np.float32), None, np.zeros(7, bool),
    )  # fmt: skip
    RolloutStore(RunPaths.of(run).rollouts(0)).add(trajectory)
    return run


def test_transcript_decodes_and_tells_the_verdict(with_trajectory):
    text = shown(print_transcript, with_trajectory, "task-1-0")
    assert "make file" in text and "touch file" in text and "done" in text
    assert "checks passed: 1/2 (when nothing is done: 0); reward: total 0.25" in text
    assert "passed  file exists" in text and "failed  file is empty" in text
    assert "7 tokens, 3 trained on, mean log-prob -0.500" in text


def test_control_characters_of_the_sandbox_do_not_reach_the_terminal():
    assert "a\x1b[2J\tb\nc\x07".translate(VISIBLE) == "a␛[2J\tb\nc␇"


def test_control_characters_of_a_verifier_do_not_reach_the_terminal(with_trajectory):
    store = RolloutStore(RunPaths.of(with_trajectory).rollouts(0))
    before = store.load("task-1-0")
    bad = Verdict(0, 0, -1, False, reason="crashed: \x1b]0;x\x07")
    steps = (StepOutcome("one", 1, "submitted", bad), StepOutcome("two\u202e", 1, "submitted"))
    for attempt, verdict in enumerate((Verdict(0, 1, 0, True, checks={"a\x1b[2J": False}), bad), start=1):
        header = replace(
            before.header, trajectory_id=f"task-1-{attempt}", attempt=attempt, verdict=verdict, steps=steps
        )
        store.add(replace(before, header=header))
        text = shown(print_transcript, with_trajectory, header.trajectory_id)
        assert not {"\x1b", "\x07", "\u202e"} & {*text} and r"\x1b" in text and r"two\u202e" in text


def test_trajectories_are_listed(with_trajectory):
    assert "rollouts/iter_0000/task-1-0" in shown(print_trajectories, with_trajectory)
    text = shown(print_transcript, with_trajectory, "rollouts/iter_0000/task-1-0")
    assert "task task-1" in text


def test_unknown_trajectory_is_named(with_trajectory):
    with pytest.raises(IncompleteError, match="no trajectory absent"):
        shown(print_transcript, with_trajectory, "absent")


@pytest.mark.parametrize("odd", [5, None, {}, {"phase": "actor"}, {"iteration": "x", "phase": "actor", "launch": "l"}])
def test_odd_entries_of_a_manifest_are_named_not_a_crash(run, odd):
    path = RunPaths.of(run).manifest
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "finished": [*raw["finished"], odd]}))
    with pytest.raises(IncompleteError, match="no readable run"):
        shown(print_run, run)


def test_alarms_are_shown(run):
    writer = MetricsWriter(RunPaths.of(run))
    for iteration, turns in enumerate((4.0, 4.2, 3.9, 9.0)):
        metrics = {"rollout/turns": turns, "rollout/verifier_errors": 0.02, "rollout/checks_per_task": 6.0}
        writer.append(PhaseResult("rollout", iteration, metrics, {"total": 1.0}), seconds=1.0)
    writer.close()
    text = shown(print_run, run)
    assert "alarm iteration 3: turns of a trajectory: 9, 4 before" in text and text.count("alarm iteration") == 1
    assert "of checks" in text and "2.0%" in text
