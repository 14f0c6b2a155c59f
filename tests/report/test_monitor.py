"""Alarms between iterations, and the analysis of stored trials."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_t1.cli import main
from megatron_t1.config.schema import MonitorConfig
from megatron_t1.environment.trials import Trial
from megatron_t1.report.monitor import alarms
from megatron_t1.report.reward_view import print_analysis
from megatron_t1.report.rewards import analyze, spearman
from megatron_t1.rollout.summary import rollout_metrics
from megatron_t1.trajectory.record import EndReason, Header, Verdict

USUAL = {"turns": 10.0, "tokens": 900.0, "checks_per_task": 6.0, "reward_per_check": 0.25, "verifier_errors": 0.01}


def lines(*changes):
    rows = [{**USUAL, **change} for change in changes]
    return [
        {"iteration": number, "phase": "rollout", "metrics": {f"rollout/{name}": value for name, value in row.items()}}
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        ({"turns": 16.0}, "turns"),
        ({"turns": 6.0}, "turns"),
        ({"tokens": 0.0}, "tokens"),
        ({"checks_per_task": 8.0}, "checks_per_task"),
        ({"reward_per_check": 0.35}, "reward_per_check"),
        ({"reward_per_check": -0.25}, "reward_per_check"),
        ({"verifier_errors": 0.07}, "verifier_errors"),  # strands-env#183
        ({"infrastructure_errors": 0.2}, "infrastructure_errors"),
    ],
)
def test_a_jump_is_an_alarm(change, metric):
    before = [{"infrastructure_errors": 0.0}] * 3
    found = alarms(lines(*before, {"infrastructure_errors": 0.0} | change, {}), MonitorConfig())
    assert [(alarm.iteration, alarm.metric) for alarm in found] == [(3, f"rollout/{metric}")]
    assert "iteration 3" in str(found[0])


def test_what_is_usual_is_none():
    small = [{"turns": 10.0 * 1.05**number, "verifier_errors": 0.01 * number} for number in range(12)]
    assert alarms(lines(*small), MonitorConfig(errors=0.05, history=5)) == []
    assert alarms(lines({}, {"turns": 100.0}), MonitorConfig()) == []  # nothing to compare with yet
    assert alarms(lines({}, {}, {"verifier_errors": None}), MonitorConfig()) == []
    assert alarms([{"iteration": 3, "phase": "critic", "metrics": {}}], MonitorConfig()) == []


def test_one_odd_iteration_does_not_move_what_is_usual():
    found = alarms(lines({}, {}, {"turns": 100.0}, {}, {"turns": 11.0}), MonitorConfig())
    assert [alarm.iteration for alarm in found] == [2]


def header(number, passed, total, *, end="submitted", trusted=True, turns=4):
    verdict = Verdict(passed, total, 0, trusted=trusted, reason="" if trusted else "broken")
    reward = {"total": 0.25 * passed, "passed": float(passed), "gained": 1.0} if trusted else {}
    counts = {"turns": turns, "tokens": 10 * turns}
    return Header(f"a-{number}", "a", number, 0, (0,), end, verdict, reward, None, counts=counts)


def test_every_rollout_measures_the_monitors():
    headers = [header(0, 2, 4), header(1, 0, 6, turns=14), header(2, 0, 0, trusted=False),
               header(3, 0, 0, trusted=False, end=EndReason.SANDBOX_LOST)]  # fmt: skip
    metrics = rollout_metrics(headers, "rollout")
    assert metrics["rollout/checks_per_task"] == 5.0 and metrics["rollout/reward_per_check"] == 0.25
    assert metrics["rollout/verifier_errors"] == metrics["rollout/infrastructure_errors"] == 0.25
    assert metrics["rollout/turns_p90"] == pytest.approx(np.quantile([4, 14, 4, 4], 0.9))
    assert metrics["rollout/reward_gained"] == 1.0 and metrics["rollout/end_sandbox_lost"] == 0.25
    assert {f"rollout/end_{reason}" for reason in EndReason.ALL} <= set(metrics)
    assert "rollout/reward_per_check" not in rollout_metrics([header(0, 0, 4)], "rollout")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=30))
def test_rank_correlation(pairs):
    x, y = zip(*pairs, strict=True)
    found = spearman(x, y)

    def ranks(values):
        return [
            sum(other < own for other in values) + (sum(other == own for other in values) + 1) / 2 for own in values
        ]

    if found is None:
        assert len(set(x)) < 2 or len(set(y)) < 2
    else:
        assert found == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-9)


def trial(task, number, checks, *, turns=20, iteration=-1, trusted=True, baseline=-1):
    named = {f"c{index}": passed for index, passed in enumerate(checks)}
    verdict = Verdict(sum(checks), len(checks), baseline, trusted, "" if trusted else "no result file", named)
    return Trial(task, f"{task}-{number}", verdict, turns=turns, tokens=100 * turns, iteration=iteration)


def test_analysis_of_known_trials():
    trials = [
        *(trial("easy", number, (True, True)) for number in range(3)),
        *(trial("hard", number, (False, True, False)) for number in range(3)),
        trial("hard", 9, (True, True, True), turns=2),
        trial("hard", 10, (True, True), turns=18),
        trial("idle", 0, (True, False), baseline=1),
        trial("broken", 0, (), trusted=False),
    ]
    found = analyze(trials, scale=0.5)
    assert (found.trials, found.tasks, found.solved, found.unsolved) == (10, 4, 5, 4)
    assert found.with_progress == 3  # what passes when nothing is done is none
    assert found.errors == {"no result file": 1}
    assert ("easy", "c0") in found.always and ("hard", "c1") in found.always and found.never == ()
    assert found.dominating[0].task == "hard" and found.dominating[0].reward_share == pytest.approx(8 / 15)
    kinds = {(item.kind, item.task): item.trials for item in found.suspicions}
    assert kinds == {("number of checks", "hard"): ("hard-10",), ("quick solve", "hard"): ("hard-9",)}
    assert found.reward_mean == pytest.approx(0.5 * 15 / 9)
    assert sum(bucket.trials for bucket in found.by_checks) == sum(bucket.trials for bucket in found.by_length) == 9


def test_a_lone_solve_and_a_jump_are_looked_at():
    trials = [trial("odd", number, (number == 2,) * 3, iteration=number) for number in range(4)]
    trials += [
        trial("more", number, (True, False), iteration=number, turns=20 if number < 3 else 90) for number in range(4)
    ]
    found = analyze(trials)
    assert [(item.kind, item.trials) for item in found.suspicions] == [("lone solve", ("odd-2",))]
    assert {(alarm.iteration, alarm.metric) for alarm in found.alarms} >= {(3, "rollout/turns"), (3, "rollout/tokens")}
    out = io.StringIO()
    print_analysis(found, console=Console(file=out, width=120))
    assert "lone solve: odd" in out.getvalue() and "jump: iteration 3: turns" in out.getvalue()


def test_the_command(tmp_path, capsys):
    for number, status in enumerate(("passed", "failed")):
        folder = tmp_path / f"jobs/fix__{number}234567"
        folder.mkdir(parents=True)
        tests = [{"name": "x", "status": "passed"}, {"name": "y", "status": status}]
        (folder / "ctrf.json").write_text(json.dumps({"results": {"tests": tests}}))
    assert main(["reward", "analyze", str(tmp_path / "jobs"), "--out", str(tmp_path / "a.json")]) == 0
    assert "2 trials of 1 tasks" in capsys.readouterr().out
    raw = json.loads((tmp_path / "a.json").read_text())
    assert (raw["solved"], raw["with_progress"], raw["always"]) == (1, 1, [["fix", "x"]])
    assert main(["reward", "analyze", str(tmp_path / "none")]) == 1
    assert "no such directory" in capsys.readouterr().err
    assert main(["reward", "analyze", str(tmp_path), "--scale", "0"]) == 2
