"""An evaluation's statistics against slow, obvious ones, and errors apart from failures."""

import io
import itertools
import json
import math
import os
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_t1.environment.task import Task
from megatron_t1.errors import IncompleteError
from megatron_t1.report.evaluation import evaluate_summary, print_evaluation, rates, write_report
from megatron_t1.report.statistics import bootstrap_mean, pass_at_k, read_evaluation, wilson_interval
from megatron_t1.rollout.summary import evaluation_summary
from megatron_t1.trajectory.record import Header, Verdict


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_solve(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased():
    """1 - (1 - share)^k, the usual shortcut, is not."""
    random, share, n, k = np.random.default_rng(0), 0.3, 5, 3
    solved = random.binomial(n, share, 20_000)
    estimate = np.mean([pass_at_k(n, int(c), k) for c in solved])
    assert estimate == pytest.approx(1 - (1 - share) ** k, abs=0.01)
    assert abs(np.mean(1 - (1 - solved / n) ** k) - (1 - (1 - share) ** k)) > 0.03


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (0, 0, 1), (3, -1, 1)])
def test_impossible_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (3, 10), (10, 10), (1, 1), (37, 148)])
def test_wilson_solves_its_equation(successes, count):
    """The ends are the proportions p with |share - p| = z sqrt(p (1 - p) / n)."""
    z, share = NormalDist().inv_cdf(0.975), successes / count
    for end in wilson_interval(successes, count):
        assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / count), abs=1e-7)
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1 and high - low > 0


@pytest.mark.parametrize("count", [1, 3, 7, 48, 1000])
def test_wilson_ends_exactly_at_nothing_and_at_everything(count):
    assert wilson_interval(0, count)[0] == 0.0 and wilson_interval(count, count)[1] == 1.0


@pytest.mark.parametrize(("successes", "count"), [(0, 0), (2, 1), (-1, 3)])
def test_no_proportion_has_no_interval(successes, count):
    with pytest.raises(ValueError):
        wilson_interval(successes, count)


def test_bootstrap_covers_the_mean_over_tasks():
    random, hits = np.random.default_rng(2), 0
    for trial in range(100):
        tasks = [random.binomial(1, p, 4).astype(float) for p in random.beta(1, 2, 50)]
        low, high = bootstrap_mean(tasks, samples=300, seed=trial)
        hits += low <= 1 / 3 <= high
    assert 88 <= hits <= 100
    with pytest.raises(ValueError):
        bootstrap_mean([])
    with pytest.raises(ValueError):
        bootstrap_mean([np.zeros(0)])


def header(task, attempt, passed, total, *, end="submitted", reason="", rewards=None):
    verdict = Verdict(passed, total, 1, trusted=not reason, reason=reason, rewards=rewards or {})
    return Header(f"{task}-{attempt}", task, attempt, 0, (0,), end, verdict, {}, None, counts={"turns": 3})


@pytest.fixture
def directory(tmp_path):
    headers = [
        header("a", 0, 4, 4),
        header("a", 1, 2, 4),
        header("b", 0, 0, 0, reason="the verifier ran out of time (30 s): last words\nmore"),
        header("b", 1, 1, 2, end="turn_limit"),
        header("c", 0, 0, 1, rewards={"reward": 0.96}),
        header("c", 1, 0, 0, end="sandbox_lost", reason="sandbox_lost: gone"),
        header("d", 0, 0, 0, end="engine_lost", reason="engine_lost: gone"),
        header("d", 1, 0, 0, end="engine_lost", reason="engine_lost: gone"),
    ]
    tasks = {name: Task(name, ".", metadata={"category": kind, "difficulty": "hard"})
             for name, kind in (("a", "files"), ("b", "net"), ("c", "net"))}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(evaluation_summary(headers, 3, tasks)))
    return tmp_path


def test_errors_are_in_no_rate(directory):  # verifiers#1665
    found = evaluate_summary(directory, solved_at=0.95, samples=500)
    overall = found.rates
    assert (overall.tasks, overall.attempts, overall.errors) == (3, 8, 4)
    assert overall.resolved == pytest.approx((0.5 + 0 + 0) / 3)
    assert overall.wilson == wilson_interval(1, 4)
    assert overall.bootstrap[0] <= overall.resolved <= overall.bootstrap[1]
    assert overall.checks == pytest.approx((3 + 1 + 0) / 3) and overall.share == pytest.approx((0.75 + 0.5 + 0) / 3)
    assert overall.above_baseline == pytest.approx((2 + 0 - 1) / 3)
    assert overall.graded == pytest.approx((0.5 + 0 + 1) / 3)  # a graded score of 0.96 counts from 0.95 on
    assert overall.pass_at == {1: pytest.approx(1 / 6), 2: 1.0}  # pass@2: of the one task with two trusted attempts
    assert found.error_kinds == {"engine_lost": 2, "verifier": 1, "sandbox_lost": 1}
    assert found.error_reasons["the verifier ran out of time (30 s): last words"] == 1
    assert found.lost_tasks == ("d",) and found.ends["turn_limit"] == 1
    assert set(found.groups["category"]) == {"files", "net"} and found.groups["category"]["net"].tasks == 2
    assert evaluate_summary(directory, solved_at=0.97, samples=100).rates.graded == pytest.approx(0.5 / 3)


def test_the_report_says_the_same_as_json_and_table(directory):
    found = evaluate_summary(directory, samples=200)
    raw = json.loads(write_report(directory, found).read_text())
    assert raw["rates"]["resolved"] == found.rates.resolved and raw["rates"]["pass_at"]["2"] == 1.0
    out = io.StringIO()
    print_evaluation(found, Console(file=out, width=110))
    text = out.getvalue()
    for words in (
        "3 tasks, 4 attempts, 4 errors apart",
        "pass@2",
        "by category",
        "verifier 1",
        "1 tasks have no other attempt",
    ):
        assert words in text, text
    assert "by difficulty" not in text  # one value says nothing


def test_nothing_but_errors(tmp_path):
    headers = [header("a", 0, 0, 0, reason="broken")]
    (tmp_path / "summary.json").write_text(json.dumps(evaluation_summary(headers, 0, {})))
    found = evaluate_summary(tmp_path)
    assert found.rates is None and found.lost_tasks == ("a",)
    out = io.StringIO()
    print_evaluation(found, Console(file=out, width=110))
    assert "no attempt has a trusted verdict" in out.getvalue()
    assert rates([]) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"policy": 0, "tasks": {"a": {}}}', '{"policy": 0, "tasks": {"a": {"passed": 1}}}']
)
def test_other_summaries_are_refused(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(IncompleteError, match="no readable evaluation summary"):
        evaluate_summary(tmp_path)


ENTRY = {"passed": [1, None, 2], "total": [2, None, 2], "solved": [False, None, True], "score": [0.5, None, 1.0],
         "ends": ["submitted", "sandbox_lost", "submitted"], "errors": [None, {"kind": "x", "reason": "y"}, None],
         "baseline": 0, "category": "a", "difficulty": ""}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"solved": [1, None, True]}, {"solved": [False, None, "x"]}, {"solved": [True, None, True]},
        {"errors": [None, None, None]}, {"errors": [None, "x", None]}, {"errors": [None, {"kind": 1}, None]},
        {"errors": [{"kind": "x", "reason": "y"}] * 3}, {"errors": [None, {"kind": "x"}, None]},
        {"passed": [5, None, 2]}, {"passed": [-1, None, 2]}, {"passed": [True, None, 2]}, {"passed": [1.0, None, 2]},
        {"passed": [math.nan, None, 2]}, {"passed": [1, 1, 2]}, {"passed": []}, {"passed": None},
        {"total": [2, None, 10**400]}, {"total": ["2", None, 2]}, {"score": [math.nan, None, 1.0]},
        {"score": [1.5, None, 1.0]}, {"score": [10**400, None, 1.0]}, {"score": [0.5, None]}, {"ends": [None, "", ""]},
        {"baseline": None}, {"baseline": -2}, {"baseline": 0.5}, {"baseline": True}, {"category": None},
        {"difficulty": []},
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [evaluate_summary, read_evaluation])
def test_a_summary_that_contradicts_itself_is_refused(tmp_path, wrong, read):
    for entry, fine in ((ENTRY, True), ({**ENTRY, **wrong}, False)):
        (tmp_path / "summary.json").write_text(json.dumps({"version": 2, "policy": 0, "tasks": {"t": entry}}))
        if fine:
            assert read(tmp_path)
            continue
        with pytest.raises(IncompleteError, match="task t"):
            read(tmp_path)


@pytest.mark.parametrize("wrong", [{"version": 9}, {"version": None}, {"policy": "0"}, {"policy": -1}, {"tasks": []}])
def test_a_summary_of_another_kind_is_refused(tmp_path, wrong):
    (tmp_path / "summary.json").write_text(json.dumps({"version": 2, "policy": 0, "tasks": {}, **wrong}))
    with pytest.raises(IncompleteError, match="no readable evaluation summary"):
        evaluate_summary(tmp_path)


def test_a_summary_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    with pytest.raises(IncompleteError, match="not a regular file"):
        evaluate_summary(tmp_path)
