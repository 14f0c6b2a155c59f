"""Trials that others stored: what each passed, from the most detailed file there is."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_t1.cli import main
from megatron_t1.environment.trials import read_trials, trial_of
from megatron_t1.errors import T1Error
from megatron_t1.report.rewards import analyze
from megatron_t1.trajectory import tensorfile
from megatron_t1.trajectory.record import Header, Trajectory, Verdict
from megatron_t1.trajectory.store import RolloutStore


@pytest.fixture(scope="module")
def real_trials():
    path = os.environ.get("T1_HARBOR_TRIALS", "")
    if not path or not Path(path).is_dir():
        pytest.skip("T1_HARBOR_TRIALS names no directory of stored trials")
    return Path(path), read_trials(path)


def test_every_real_trial_has_what_its_report_says(real_trials):
    path, trials = real_trials
    folders = {folder.name: folder for folder in path.glob("*/*__???????")}
    assert len(trials) == len(folders) > 0
    for trial in trials:
        folder, verdict = folders[trial.name], trial.verdict
        assert trial.name.startswith(f"{trial.task}__")
        if (folder / "ctrf.json").is_file():
            summary = _summary(folder)
            assert (verdict.passed, verdict.total) == (summary["passed"], summary["tests"]) and verdict.trusted
            assert verdict.solved == (float((folder / "reward.txt").read_text()) == 1.0)
        elif (folder / "reward.txt").is_file():  # falls back: one check, passed at 1
            assert (verdict.total, verdict.source, verdict.trusted) == (1, "reward.txt", True)
        else:
            assert not verdict.trusted and "no result file" in verdict.reason
        assert (trial.turns > 0) == (folder / "trajectory.json").is_file()


def test_real_trials_show_what_a_binary_reward_hides(real_trials):
    path, trials = real_trials
    found, summaries = analyze(trials), [_summary(file.parent) for file in path.glob("*/*/ctrf.json")]
    partly = [own for own in summaries if 0 < own["passed"] < own["tests"]]
    assert found.with_progress == len(partly) > 0.3 * found.unsolved
    assert found.solved + found.unsolved == sum(trial.verdict.trusted for trial in trials)
    assert found.reward_with_checks > 0.5  # absolute counts favour tasks with many checks
    assert sum(row.reward_share for row in found.dominating) == pytest.approx(1.0)


def _summary(folder):
    return json.loads((folder / "ctrf.json").read_text())["results"]["summary"]


def trial(folder, **files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_harbor_folders(tmp_path):
    atif = {"steps": [{"source": "user"}, {"source": "agent"}, {"source": "agent", "is_copied_context": True}]}
    trial(
        tmp_path / "job/fix-it__aB3dE6g",
        result_json={"task_name": "org/fix-it", "trial_name": "fix-it__aB3dE6g", "agent_result": {},
                     "exception_info": {"exception_type": "AgentTimeoutError"}},
        verifier__reward_txt="0.5",
        agent__trajectory_json=atif,
    )  # fmt: skip
    trial(tmp_path / "job/other:2__1234567", verifier__reward_json={"a": 1, "b": 0}, verifier__reward_txt="1")
    trial(tmp_path / "job/broken__1234567", verifier__ctrf_json="{", verifier__reward_txt="1")
    (tmp_path / "job/result.json").write_text(json.dumps({"n_total_trials": 3}))
    broken, first, second = read_trials(tmp_path)
    assert (first.task, first.turns, first.end_reason) == ("org/fix-it", 1, "AgentTimeoutError")
    assert (first.verdict.passed, first.verdict.total, first.verdict.score) == (0, 1, 0.5)
    assert (second.task, second.verdict.passed, second.verdict.total) == ("other", 1, 2)
    assert not broken.verdict.trusted and "ctrf.json" in broken.verdict.reason  # never the next best file


def steps_trial(folder, reward, *steps, **result):
    """A trial of several steps, each with its reward or None; returns what is read of it."""
    names = [f"step {number}" for number in range(len(steps))]
    outcomes = {"step_results": [{"step_name": name} for name in names], "verifier_result": {"rewards": reward}}
    trial(folder, result_json={"task_name": "org/steps", "agent_result": None, **outcomes, **result})
    for name, own in zip(names, steps, strict=True):
        files = {} if own is None else {"verifier__reward_json": own}
        trial(folder / "steps" / name, agent__trajectory_json={"steps": [{"source": "agent"}] * 2}, **files)
    (found,) = read_trials(folder.parent)
    return found


def test_harbor_folders_of_several_steps(tmp_path):
    found = steps_trial(tmp_path / "a/t__1234567", {"reward": 0.75}, {"reward": 0.5}, {"reward": 1.0})
    assert (found.task, found.turns, found.verdict.total, found.verdict.passed) == ("org/steps", 4, 2, 1)
    assert found.verdict.checks == {"step 0/reward": False, "step 1/reward": True} and found.verdict.score == 0.75
    last = steps_trial(tmp_path / "b/t__1234567", {"reward": 1.0}, {"reward": 0.5}, {"reward": 1.0})
    assert last.verdict.solved and last.verdict.checks == {"step 1/reward": True}  # "final": the trial's own reward
    keys = steps_trial(tmp_path / "c/t__1234567", {"a": 0.5, "b": 0.5}, {"a": 1.0}, {"b": 1.0})
    assert keys.verdict.rewards == {"a": 0.5, "b": 0.5} and keys.verdict.passed == 2
    broken = steps_trial(tmp_path / "d/t__1234567", {"reward": 1.0}, {"reward": 1.0}, None)
    assert not broken.verdict.trusted and broken.verdict.reason == "step step 1: the trial left no result file"


@pytest.mark.parametrize("listed", [[], "x", [1], [{}], [{"step_name": ".."}], [{"step_name": "a/../../b"}], None])
def test_odd_lists_of_steps_name_no_folder(tmp_path, listed):
    trial(tmp_path / "t__1234567", result_json={"agent_result": {}, "step_results": listed}, verifier__reward_txt="1")
    (found,) = read_trials(tmp_path)
    assert found.verdict.solved and found.verdict.total == 1


def test_a_run_is_read_by_its_rollouts_and_weights_are_no_records(tmp_path):
    tokens = {"ids": np.array([1, 2], np.int32), "origin": np.array([0, 1], np.uint8),
              "turn": np.zeros(2, np.uint16), "logprobs": np.array([np.nan, -0.5], np.float32),
              "routes": None, "routed": np.zeros(2, bool)}  # fmt: skip
    for iteration, passed in enumerate((1, 2)):
        header = Header(
            "a-0", "a", 0, iteration, (iteration,), "submitted", Verdict(passed, 2, 0, True), {"total": 0.5}, None
        )
        store = RolloutStore(tmp_path / f"run/rollouts/iter_000{iteration}")
        store.add(Trajectory(header, **tokens))
        if iteration:
            store.seal()
    tensorfile.write(tmp_path / "run/hf/model.safetensors", {"w": np.zeros(3, np.float32)}, {})
    (tmp_path / "run/hf/broken.safetensors").write_bytes(b"no tensors")
    for path in (tmp_path / "run", tmp_path / "run/rollouts/iter_0001", tmp_path):
        found = read_trials(path)
        assert [trial.verdict.passed for trial in found] == ([2] if path.name == "iter_0001" else [1, 2])


def test_nothing_to_read_is_named(tmp_path):
    with pytest.raises(T1Error, match="no such directory"):
        read_trials(tmp_path / "none")
    with pytest.raises(T1Error, match="no trial was found"):
        read_trials(tmp_path)


def test_a_record_without_a_verdict_is_untrusted():
    header = Header("a-0", "a", 0, 3, (0,), "submitted", None, {}, None, counts={"turns": 2, "tokens": 9})
    found = trial_of(header)
    assert (found.turns, found.tokens, found.iteration) == (2, 9, 3) and not found.verdict.trusted
    paid = trial_of(Header("a-0", "a", 0, 3, (0,), "submitted", Verdict(1, 2, 0, True), {"total": 0.25}, None))
    assert paid.verdict.passed == 1 and paid.reward == {"total": 0.25} and paid.turns == -1


def test_files_that_never_end_or_are_too_large_are_named(tmp_path):
    trial(tmp_path / "a__1234567", reward_txt="1")
    os.mkfifo(tmp_path / "a__1234567/result.json")
    os.mkfifo(tmp_path / "a__1234567/trajectory.json")
    trial(tmp_path / "b__1234567", verifier__reward_txt="1")
    os.mkfifo(tmp_path / "b__1234567/verifier/ctrf.json")
    (tmp_path / "c__1234567").mkdir()
    with open(tmp_path / "c__1234567/ctrf.json", "wb") as sparse:
        sparse.truncate(200 << 30)
    trial(tmp_path / "d__1234567", reward_txt="1")
    (tmp_path / "d__1234567/result.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "x.safetensors")
    fine, fifo, large, zero = read_trials(tmp_path)
    assert fine.verdict.solved and fine.turns == -1 and zero.verdict.solved
    assert not fifo.verdict.trusted and "ctrf.json can't be read: not a regular file" in fifo.verdict.reason
    assert not large.verdict.trusted and "larger than" in large.verdict.reason


def test_names_that_are_no_text_are_spelled_out(tmp_path):
    trial(tmp_path / "a__1234567", result_json='{"task_name": "\\ud800", "agent_result": {}}', reward_txt="1")
    (found,) = read_trials(tmp_path)
    assert found.task.encode() == rb"\ud800"


def test_stored_reports_that_contradict_each_other_are_untrusted(tmp_path):
    report = {"results": {"tests": [{"name": "a", "status": "passed"}]}}
    xml = '<testsuite><testcase name="t::a"/><testcase name="t::b"><failure/></testcase></testsuite>'
    trial(tmp_path / "a__1234567", ctrf_json=report, pytest_xml=xml, reward_txt="0")
    (found,) = read_trials(tmp_path)
    assert not found.verdict.trusted and "contradict" in found.verdict.reason


@pytest.mark.parametrize("scale", ["inf", "nan", "0", "-1"])
def test_a_scale_that_is_no_number_is_refused(tmp_path, capsys, scale):
    trial(tmp_path / "a__1234567", reward_txt="1")
    assert main(["reward", "analyze", str(tmp_path), "--scale", scale]) != 0
    assert "--scale must be a finite number" in capsys.readouterr().err


def test_a_trial_that_is_named_twice_counts_once(tmp_path, capsys):
    trial(tmp_path / "jobs" / "a__1234567", reward_txt="1")
    assert main(["reward", "analyze", str(tmp_path), str(tmp_path / "jobs"), f"{tmp_path}/jobs/../jobs"]) == 0
    assert capsys.readouterr().out.startswith("1 trials of 1 tasks")
