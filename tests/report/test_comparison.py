import io
import json

import numpy as np
import pytest
from rich.console import Console

from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.report.comparison import evaluations_of, print_comparison
from megatron_t1.report.statistics import compare_evaluations, paired_bootstrap, read_evaluation


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """Tasks of very different difficulty, two attempts each: pairing must remove the difficulty."""
    random = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        difficulty = random.uniform(0, 6, 60)
        a = [random.normal(mean, 1.0, 2) for mean in difficulty]
        b = [random.normal(mean + 0.4, 1.0, 2) for mean in difficulty]
        found = paired_bootstrap(a, b, samples=400, seed=trial)
        hits += found.low <= 0.4 <= found.high
    assert 88 <= hits <= 100


def test_known_difference_without_noise():
    a = [np.array([1.0, 1.0]), np.array([3.0])]
    found = paired_bootstrap(a, [scores + 1.0 for scores in a], samples=200)
    assert (found.difference, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.separated
    assert (found.mean_a, found.mean_b) == (2.0, 3.0)


def test_seed_decides_the_interval():
    random = np.random.default_rng(0)
    a, b = [[random.normal(size=2) for _ in range(20)] for _ in range(2)]
    assert paired_bootstrap(a, b, samples=500, seed=3) == paired_bootstrap(a, b, samples=500, seed=3)
    assert paired_bootstrap(a, b, samples=500, seed=3) != paired_bootstrap(a, b, samples=500, seed=4)


@pytest.mark.parametrize("sides", [([], []), ([np.ones(1)], []), ([np.ones(0)], [np.ones(1)])])
def test_what_can_not_be_paired_is_refused(sides):
    with pytest.raises(ValueError):
        paired_bootstrap(*sides)


def write(directory, tasks):
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps({"version": 2, "policy": 0, "tasks": tasks}))
    return directory


def task(passed, total=4):
    return {
        "passed": passed,
        "total": [None if p is None else total for p in passed],
        "solved": [None if p is None else p == total for p in passed],
        "score": [None if p is None else p / total for p in passed],
        "ends": ["submitted"] * len(passed),
        "errors": [{"kind": "verifier", "reason": "broken"} if p is None else None for p in passed],
        "baseline": -1,
        "category": "",
        "difficulty": "",
    }


def test_untrusted_attempts_are_left_out_not_zero(tmp_path):
    a = read_evaluation(write(tmp_path / "a", {"t": task([2, None]), "u": task([None])}))
    b = read_evaluation(write(tmp_path / "b", {"t": task([4, 4]), "u": task([4])}))
    found = compare_evaluations(a, b, samples=100)
    assert found["checks passed"].mean_a == 2.0
    assert found["checks passed"].tasks == 1
    assert found["tasks solved"].difference == 1.0


def test_other_tasks_are_refused(tmp_path):
    a = read_evaluation(write(tmp_path / "a", {"t": task([2])}))
    b = read_evaluation(write(tmp_path / "b", {"u": task([2])}))
    with pytest.raises(MismatchError, match="no task in common"):
        compare_evaluations(a, b)
    c = read_evaluation(write(tmp_path / "c", {"t": task([2], total=5)}))
    with pytest.raises(MismatchError, match="4 and 5 checks"):
        compare_evaluations(a, c)


def test_damaged_summary_is_named(tmp_path):
    write(tmp_path / "a", {})
    (tmp_path / "a" / "summary.json").write_text("{")
    with pytest.raises(IncompleteError, match="summary"):
        read_evaluation(tmp_path / "a")


def test_printed_table(tmp_path):
    for policy, passed in ((0, 1), (3, 3)):
        write(tmp_path / "evaluations" / f"iter_{policy:04d}", {f"t{i}": task([passed, passed]) for i in range(5)})
    first, last = evaluations_of(tmp_path)
    console = Console(file=io.StringIO(), width=140)
    print_comparison(first, last, samples=100, console=console)
    text = console.file.getvalue()
    assert "+2.000" in text and "[+2.000, +2.000]" in text and "B is better" in text
