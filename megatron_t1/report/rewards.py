"""What a reward would see in stored trials: pure numbers from a list of trials; `t1 reward analyze` prints them.

"Reward" is the dense one here, scale x passed checks, whatever the trials were paid.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from megatron_t1.config.schema import MonitorConfig
from megatron_t1.environment.results import REWARD_JSON, REWARD_TEXT
from megatron_t1.environment.trials import Trial
from megatron_t1.report.monitor import Alarm, alarms_of
from megatron_t1.trajectory.record import EndReason

CHECK_BUCKETS = ((1, 1), (2, 4), (5, 8), (9, 16), (17, 10**9))
REWARD_FILES = (REWARD_JSON, REWARD_TEXT)
MIN_TRIALS = 2  # of a task, before "always" and "never" mean something
FEW_TURNS = 0.25  # a solve in less than this share of the usual number of turns is looked at; ours
MANY_TRIALS = 4  # of a task, of which one alone passes anything


@dataclass(frozen=True)
class Bucket:
    """Trusted trials of one kind."""

    label: str
    trials: int
    passed: float  # mean checks
    share: float  # mean share of checks
    solved: float


@dataclass(frozen=True)
class TaskShare:
    """One task's part of everything that is paid."""

    task: str
    trials: int
    checks: int  # most that a trial had
    passed: float  # mean
    reward_share: float


@dataclass(frozen=True)
class Suspicion:
    """Something that should be looked at by hand, with the trials it is about."""

    kind: str
    task: str
    text: str
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """See the module. Correlations are Spearman's over trusted trials; None with fewer than 3 or without variation.

    Attributes:
        unsolved: trusted trials with a failed check; with_progress: of them, with more passed checks than when nothing
            is done (more than 0 where that is unknown): a binary reward calls all of them 0.
        unsolved_one_check: of the unsolved, those with a single check, which can't show progress.
        always, never: (task, check) that passed in all, or none, of a task's trials (at least 2).
    """

    trials: int
    tasks: int
    errors: dict[str, int]
    sources: dict[str, int]
    solved: int
    unsolved: int
    with_progress: int
    unsolved_one_check: int
    reward_mean: float
    reward_with_checks: float | None
    reward_with_turns: float | None
    reward_with_tokens: float | None
    by_checks: tuple[Bucket, ...]
    by_length: tuple[Bucket, ...]
    dominating: tuple[TaskShare, ...]
    top_tenth_share: float
    always: tuple[tuple[str, str], ...]
    never: tuple[tuple[str, str], ...]
    suspicions: tuple[Suspicion, ...]
    alarms: tuple[Alarm, ...]


def analyze(
    trials: Sequence[Trial], *, scale: float = 0.25, one_run: bool = True, options: MonitorConfig | None = None
) -> Analysis:
    """Everything about `trials`, of which there is at least one.

    Args:
        one_run: iterations may be compared with each other.
    """
    trusted = [trial for trial in trials if trial.verdict.trusted]
    unsolved = [trial for trial in trusted if not trial.verdict.solved]
    by_task = _by_task(trusted)
    shares = _shares(by_task)
    tenth = max(1, round(len(shares) / 10))
    passed = [trial.verdict.passed for trial in trusted]
    always, never = _constant_checks(by_task)
    return Analysis(
        trials=len(trials),
        tasks=len({trial.task for trial in trials}),
        errors=dict(Counter(_error(trial) for trial in trials if not trial.verdict.trusted).most_common()),
        sources=dict(Counter(trial.verdict.source or "record" for trial in trusted).most_common()),
        solved=len(trusted) - len(unsolved),
        unsolved=len(unsolved),
        with_progress=sum(trial.verdict.passed > max(0, trial.verdict.baseline) for trial in unsolved),
        unsolved_one_check=sum(trial.verdict.total == 1 for trial in unsolved),
        reward_mean=scale * float(np.mean(passed)) if passed else 0.0,
        reward_with_checks=spearman([trial.verdict.total for trial in trusted], passed),
        reward_with_turns=_length_correlation(trusted, "turns"),
        reward_with_tokens=_length_correlation(trusted, "tokens"),
        by_checks=_check_buckets(trusted),
        by_length=_length_buckets(trusted),
        dominating=tuple(shares),
        top_tenth_share=sum(share.reward_share for share in shares[:tenth]),
        always=always,
        never=never,
        suspicions=tuple(_suspicions(by_task)),
        alarms=tuple(_jumps(trials, scale, options or MonitorConfig())) if one_run else (),
    )


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation with ties at their mean rank; None with fewer than 3 pairs or where one side never varies."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[inverse]


def _by_task(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    found: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        found[trial.task].append(trial)
    return dict(sorted(found.items()))


def _error(trial: Trial) -> str:
    if trial.end_reason in EndReason.LOST:
        return trial.end_reason
    return trial.verdict.reason.partition("\n")[0][:120] or "no reason given"


def _length_correlation(trials: Sequence[Trial], name: str) -> float | None:
    known = [trial for trial in trials if getattr(trial, name) >= 0]
    return spearman([getattr(trial, name) for trial in known], [trial.verdict.passed for trial in known])


def _bucket(label: str, trials: Sequence[Trial]) -> Bucket:
    verdicts = [trial.verdict for trial in trials]
    return Bucket(
        label,
        len(trials),
        passed=float(np.mean([verdict.passed for verdict in verdicts])),
        share=float(np.mean([verdict.passed / max(1, verdict.total) for verdict in verdicts])),
        solved=float(np.mean([verdict.solved for verdict in verdicts])),
    )


def _check_buckets(trials: Sequence[Trial]) -> tuple[Bucket, ...]:
    found = []
    for low, high in CHECK_BUCKETS:
        own = [trial for trial in trials if low <= trial.verdict.total <= high]
        label = str(low) if low == high else f"{low} to {high}" if high < 10**9 else f"{low} and more"
        found += [_bucket(label, own)] if own else []
    return tuple(found)


def _length_buckets(trials: Sequence[Trial]) -> tuple[Bucket, ...]:
    """Quarters by turns; nothing where lengths are unknown or all the same."""
    known = [trial for trial in trials if trial.turns >= 0]
    edges = (
        sorted({int(edge) for edge in np.quantile([trial.turns for trial in known], [0.25, 0.5, 0.75])})
        if known
        else []
    )
    if not edges:
        return ()
    bounds = [-1, *edges, max(max(trial.turns for trial in known), edges[-1])]
    found = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        own = [trial for trial in known if low < trial.turns <= high]
        found += [_bucket(f"{min(t.turns for t in own)} to {max(t.turns for t in own)}", own)] if own else []
    return tuple(found)


def _shares(by_task: dict[str, list[Trial]]) -> list[TaskShare]:
    """Tasks by their share of all passed checks, the largest first."""
    everything = sum(trial.verdict.passed for own in by_task.values() for trial in own) or 1
    rows = []
    for task, own in by_task.items():
        passed = [trial.verdict.passed for trial in own]
        most = max(trial.verdict.total for trial in own)
        rows.append(TaskShare(task, len(own), most, float(np.mean(passed)), sum(passed) / everything))
    return sorted(rows, key=lambda row: (-row.reward_share, row.task))


def _constant_checks(
    by_task: dict[str, list[Trial]],
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    always, never = [], []
    for task, own in by_task.items():
        outcomes: dict[str, list[bool]] = defaultdict(list)
        detailed = [trial for trial in own if trial.verdict.total > 1]  # beside them, a lone reward is no check
        for trial in detailed or own:
            for name, passed in trial.verdict.checks.items():
                outcomes[name].append(passed)
        for name, seen in outcomes.items():
            if len(seen) >= MIN_TRIALS and len(set(seen)) == 1:
                (always if seen[0] else never).append((task, name))
    return tuple(always), tuple(never)


def _suspicions(by_task: dict[str, list[Trial]]) -> Iterable[Suspicion]:
    for task, own in by_task.items():
        totals = Counter(trial.verdict.total for trial in own)
        if len(totals) > 1:
            usual = totals.most_common(1)[0][0]
            others = tuple(trial.name for trial in own if trial.verdict.total != usual)
            text = f"{', '.join(map(str, sorted(totals)))} checks in different trials, usually {usual}"
            if any(trial.verdict.total == 1 and trial.verdict.source in REWARD_FILES for trial in own):
                text += "; of some only a reward is left, and no report"
            yield Suspicion("number of checks", task, text, others)
        solved = [trial for trial in own if trial.verdict.solved]
        lengths = [trial.turns for trial in own if trial.turns >= 0]
        if len(lengths) >= MIN_TRIALS:
            quick = tuple(t.name for t in solved if 0 <= t.turns < FEW_TURNS * median(lengths))
            if quick:
                yield Suspicion(
                    "quick solve", task, f"solved in far fewer turns than usual ({median(lengths):g})", quick
                )
        touched = [trial for trial in own if trial.verdict.passed > max(0, trial.verdict.baseline)]
        if len(own) >= MANY_TRIALS and len(touched) == 1 and touched[0].verdict.solved and touched[0].verdict.total > 1:
            text = f"one of {len(own)} trials passes all checks, no other any"
            yield Suspicion("lone solve", task, text, (touched[0].name,))


def _jumps(trials: Sequence[Trial], scale: float, options: MonitorConfig) -> Iterable[Alarm]:
    """Alarms between the iterations of one run, as the loop gives them."""
    iterations: dict[int, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.iteration >= 0:
            iterations[trial.iteration].append(trial)
    metrics = {number: _monitored(own, scale) for number, own in sorted(iterations.items())}
    for number in metrics:
        earlier = [metrics[other] for other in metrics if other < number][-options.history :]
        yield from alarms_of(number, metrics[number], earlier, options)


def _monitored(trials: Sequence[Trial], scale: float) -> dict[str, float]:
    trusted = [trial for trial in trials if trial.verdict.trusted]
    lost = sum(trial.end_reason in EndReason.LOST for trial in trials)
    found = {
        "verifier_errors": (len(trials) - len(trusted) - lost) / len(trials),
        "infrastructure_errors": lost / len(trials),
    }
    for name in ("turns", "tokens"):
        known = [value for trial in trials if (value := getattr(trial, name)) >= 0]
        if known:
            found |= {name: float(np.mean(known)), f"{name}_p90": float(np.quantile(known, 0.9))}
    if trusted:
        found["checks_per_task"] = float(np.mean([trial.verdict.total for trial in trusted]))
        passed = sum(trial.verdict.passed for trial in trusted)
        if passed:
            paid = sum(trial.reward.get("total", scale * trial.verdict.passed) for trial in trusted)
            found["reward_per_check"] = paid / passed
    return {f"rollout/{name}": value for name, value in found.items()}
