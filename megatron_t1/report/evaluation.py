"""One evaluation as a benchmark reports it, from its summary.json: resolved rate, checks, pass@k, intervals, errors.

An attempt whose sandbox, engine or verifier failed is an error: counted apart, in no rate. A task all of whose attempts
are errors is in no rate either. Rates are means over tasks of the mean over attempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from megatron_t1 import atomic
from megatron_t1.report.show import make_console, make_table
from megatron_t1.report.statistics import bootstrap_mean, pass_at_k, wilson_interval
from megatron_t1.report.summary_file import read_summary

REPORT_FILE = "report.json"
GROUPINGS = ("category", "difficulty")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Rates:
    """Of a set of tasks. Intervals are of 95 %.

    Attributes:
        attempts: made; errors: of them, without a trusted verdict; tasks: with at least one trusted attempt.
        resolved: share of attempts that pass all checks; wilson treats attempts as independent, bootstrap resamples
            tasks and, within them, attempts: with several attempts of a task it is the honest one.
        graded: share of attempts with a score of at least `solved_at`.
        checks: mean number of passed checks; share: of all checks; above_baseline: over doing nothing, None unknown.
        score: mean score: the task's own reward where it gave one, else the share of checks.
        pass_at: k -> pass@k over the tasks that have k trusted attempts.
    """

    tasks: int
    attempts: int
    errors: int
    resolved: float
    wilson: Interval
    bootstrap: Interval
    graded: float
    solved_at: float
    checks: float
    checks_bootstrap: Interval
    share: float
    above_baseline: float | None
    score: float
    pass_at: dict[int, float]


@dataclass(frozen=True)
class Evaluation:
    """Everything that is reported of one evaluation; `rates` is None when every attempt is an error."""

    policy: int
    rates: Rates | None
    groups: dict[str, dict[str, Rates]]  # category, difficulty -> value -> rates
    error_kinds: dict[str, int]
    error_reasons: dict[str, int]  # the most frequent first
    ends: dict[str, int]
    lost_tasks: tuple[str, ...]  # tasks without any trusted attempt


def evaluate_summary(directory: str | Path, *, solved_at: float = 0.95, samples: int = 10_000) -> Evaluation:
    """Read DIR/summary.json and compute its statistics.

    Raises:
        IncompleteError: absent, unreadable, or it contradicts itself.
    """
    summary = read_summary(directory)
    tasks = summary.tasks
    errors = [error for entry in tasks.values() for error in entry["errors"] if error is not None]
    groups = {}
    for grouping in GROUPINGS:
        values = sorted({entry[grouping] for entry in tasks.values()} - {""})
        groups[grouping] = {
            value: found
            for value in values
            if (found := rates([e for e in tasks.values() if e[grouping] == value], solved_at, samples)) is not None
        }
    return Evaluation(
        policy=summary.policy,
        rates=rates(list(tasks.values()), solved_at, samples),
        groups=groups,
        error_kinds=dict(Counter(error["kind"] for error in errors).most_common()),
        error_reasons=dict(Counter(error["reason"] for error in errors).most_common(20)),
        ends=dict(Counter(end for entry in tasks.values() for end in entry["ends"]).most_common()),
        lost_tasks=tuple(name for name, entry in tasks.items() if not _trusted(entry, "passed")),
    )


def rates(entries: Sequence[Mapping[str, Any]], solved_at: float = 0.95, samples: int = 10_000) -> Rates | None:
    """Statistics of some tasks' entries of a summary; None when none has a trusted attempt."""
    usable = [entry for entry in entries if _trusted(entry, "passed")]
    if not usable:
        return None
    solved, passed, score, total = (
        [np.array(_trusted(entry, name), np.float64) for entry in usable]
        for name in ("solved", "passed", "score", "total")
    )
    shares = [own / np.maximum(all_, 1.0) for own, all_ in zip(passed, total, strict=True)]
    gains = [
        own.mean() - entry["baseline"] for own, entry in zip(passed, usable, strict=True) if entry["baseline"] >= 0
    ]
    attempts = sum(len(entry["passed"]) for entry in entries)
    trusted = sum(map(len, solved))
    return Rates(
        tasks=len(usable),
        attempts=attempts,
        errors=attempts - trusted,
        resolved=_mean_of_means(solved),
        wilson=wilson_interval(float(sum(own.sum() for own in solved)), trusted),
        bootstrap=bootstrap_mean(solved, samples=samples),
        graded=_mean_of_means([own >= solved_at for own in score]),
        solved_at=solved_at,
        checks=_mean_of_means(passed),
        checks_bootstrap=bootstrap_mean(passed, samples=samples),
        share=_mean_of_means(shares),
        above_baseline=float(np.mean(gains)) if gains else None,
        score=_mean_of_means(score),
        pass_at=_pass_at(solved),
    )


def _pass_at(solved: list[np.ndarray]) -> dict[int, float]:
    """For 1, 2, 4, ... and the largest number of attempts."""
    most = max(map(len, solved))
    wanted = sorted({*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most})
    return {
        k: float(np.mean([pass_at_k(len(own), int(own.sum()), k) for own in solved if len(own) >= k])) for k in wanted
    }


def write_report(directory: str | Path, evaluation: Evaluation) -> Path:
    """The same as JSON, beside the summary."""
    path = Path(directory) / REPORT_FILE
    atomic.write_json(path, asdict(evaluation))
    return path


def print_evaluation(evaluation: Evaluation, console: Console | None = None) -> None:
    console = console or make_console()
    overall = evaluation.rates
    if overall is None:
        console.print(f"policy {evaluation.policy}: no attempt has a trusted verdict", highlight=False)
    else:
        _print_rates(evaluation.policy, overall, console)
        for grouping, groups in evaluation.groups.items():
            if len(groups) > 1:
                _print_groups(grouping, groups, console)
    ends = ", ".join(f"{name} {count}" for name, count in evaluation.ends.items())
    console.print(f"episodes ended by: {ends}", highlight=False)
    if evaluation.error_kinds:
        kinds = ", ".join(f"{kind} {count}" for kind, count in evaluation.error_kinds.items())
        console.print(f"[bold]errors, in no rate above:[/bold] {kinds}", highlight=False)
        for reason, count in list(evaluation.error_reasons.items())[:5]:
            console.print(f"  {count} x {escape(reason)}", highlight=False, soft_wrap=True)
        if evaluation.lost_tasks:
            console.print(f"  {len(evaluation.lost_tasks)} tasks have no other attempt", highlight=False)


def _print_rates(policy: int, found: Rates, console: Console) -> None:
    table = make_table(
        f"policy {policy}: {found.tasks} tasks, {found.attempts - found.errors} attempts, {found.errors} errors apart"
    )
    for title in ("", "mean", "95%, bootstrap over tasks", "95%, Wilson over attempts"):
        table.add_column(title, justify="right" if title else "left")
    table.add_row("resolved (all checks pass)", f"{found.resolved:.1%}", _range(found.bootstrap), _range(found.wilson))
    table.add_row(f"score of at least {found.solved_at:g}", f"{found.graded:.1%}", "", "")
    low, high = found.checks_bootstrap
    table.add_row("checks passed", f"{found.checks:.3f}", f"{low:.3f} to {high:.3f}", "")
    if found.above_baseline is not None:
        table.add_row("checks above doing nothing", f"{found.above_baseline:+.3f}", "", "")
    table.add_row("share of checks", f"{found.share:.1%}", "", "")
    table.add_row("score", f"{found.score:.3f}", "", "")
    for k, value in found.pass_at.items():
        table.add_row(f"pass@{k}", f"{value:.1%}", "", "")
    console.print(table)


def _print_groups(grouping: str, groups: Mapping[str, Rates], console: Console) -> None:
    table = make_table(f"by {grouping}")
    for title in (grouping, "tasks", "resolved", "95%, bootstrap", "checks", "share", "score", "errors"):
        table.add_column(title, justify="left" if title == grouping else "right")
    for name, found in groups.items():
        table.add_row(
            escape(name), str(found.tasks), f"{found.resolved:.1%}", _range(found.bootstrap), f"{found.checks:.2f}",
            f"{found.share:.1%}", f"{found.score:.3f}", str(found.errors),
        )  # fmt: skip
    console.print(table)


def _range(interval: Interval) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


def _mean_of_means(values: Sequence[np.ndarray]) -> float:
    return float(np.mean([own.mean() for own in values]))


def _trusted(entry: Mapping[str, Any], name: str) -> list[float]:
    return [float(value) for value, passed in zip(entry[name], entry["passed"], strict=True) if passed is not None]
