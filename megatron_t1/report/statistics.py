"""Statistics of evaluations: pass@k, intervals, and whether B is better than A. numpy only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from megatron_t1.errors import MismatchError
from megatron_t1.report.summary_file import read_summary


@dataclass(frozen=True)
class PairedDifference:
    """Mean of B minus mean of A over tasks, with a bootstrap interval."""

    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    confidence: float
    tasks: int

    @property
    def separated(self) -> bool:
        return self.low > 0 or self.high < 0


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that at least one of k attempts, drawn without replacement from those made, is solved.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: not 0 <= solved <= attempts and 1 <= k <= attempts.
    """
    if not (0 <= solved <= attempts and 1 <= k <= attempts):
        raise ValueError(f"pass@{k} of {solved} solved among {attempts} attempts")
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def wilson_interval(successes: float, count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a proportion of independent trials (Wilson 1927), in [0, 1]; it is not empty at 0 and 1.

    Raises:
        ValueError: no trial, or more successes than trials.
    """
    if count <= 0 or not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share, square = successes / count, z * z / count
    centre = (share + square / 2.0) / (1.0 + square)
    half = z * math.sqrt(share * (1.0 - share) / count + square / count / 4.0) / (1.0 + square)
    low = max(0.0, centre - half) if successes else 0.0  # exactly, where rounding leaves a trace
    return low, min(1.0, centre + half) if successes < count else 1.0


def bootstrap_mean(
    scores: list[np.ndarray], *, samples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over tasks: each draw resamples tasks, and within a task its attempts.

    Args:
        scores: float [attempts] of each task, at least one.

    Raises:
        ValueError: no task, or one without attempts.
    """
    if not scores or any(len(own) == 0 for own in scores):
        raise ValueError("tasks with attempts are needed")
    random = np.random.default_rng(seed)
    count, means = len(scores), np.empty(samples)
    chunk = max(1, 2_000_000 // count)
    for start in range(0, samples, chunk):
        size = min(chunk, samples - start)
        means[start : start + size] = _resampled(scores, random.integers(0, count, (size, count)), random).mean(1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)


def paired_bootstrap(
    a: list[np.ndarray], b: list[np.ndarray], *, samples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Paired over tasks: each draw resamples the tasks, and within a task the attempts of A and of B.

    Args:
        a, b: for each task (the same order in both) its attempts' scores, float [attempts], at least one.
        samples: bootstrap draws.
        confidence: of the percentile interval.

    Raises:
        ValueError: no tasks, another number of tasks, or a task without attempts.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"paired tasks are needed, got {len(a)} and {len(b)}")
    if any(len(scores) == 0 for scores in (*a, *b)):
        raise ValueError("a task without attempts can't be compared")
    random = np.random.default_rng(seed)
    count = len(a)
    differences = np.empty(samples)
    chunk = max(1, 2_000_000 // count)
    done = 0
    while done < samples:
        size = min(chunk, samples - done)
        chosen = random.integers(0, count, (size, count))
        differences[done : done + size] = (_resampled(b, chosen, random) - _resampled(a, chosen, random)).mean(1)
        done += size
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(differences, [tail, 1.0 - tail])
    mean_a = float(np.mean([scores.mean() for scores in a]))
    mean_b = float(np.mean([scores.mean() for scores in b]))
    return PairedDifference(mean_a, mean_b, mean_b - mean_a, float(low), float(high), confidence, count)


def _resampled(scores: list[np.ndarray], chosen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Mean over resampled attempts of each chosen task, [draws, tasks]. Attempts are padded to one matrix."""
    width = max(len(own) for own in scores)
    counts = np.array([len(own) for own in scores])
    padded = np.zeros((len(scores), width))
    for row, own in enumerate(scores):
        padded[row, : len(own)] = own
    total = np.zeros(chosen.shape)
    for attempt in range(width):
        drawn = random.integers(0, counts[chosen])
        total += np.where(attempt < counts[chosen], padded[chosen, drawn], 0.0)
    return total / counts[chosen]


def read_evaluation(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """task -> {"passed", "total", "solved"}: float [attempts] of one evaluation, NaN without a trusted verdict.

    Raises:
        IncompleteError: absent or unreadable.
    """
    return {
        task: {
            name: np.array([np.nan if value is None else value for value in entry[name]], dtype=np.float64)
            for name in ("passed", "total", "solved")
        }
        for task, entry in read_summary(directory).tasks.items()
    }


def compare_evaluations(
    a: dict[str, dict[str, np.ndarray]], b: dict[str, dict[str, np.ndarray]], *, samples: int = 10_000, seed: int = 0
) -> dict[str, PairedDifference]:
    """Checks passed, share of checks, and share of solved tasks of B minus A, over the tasks both evaluated.

    Raises:
        MismatchError: no common task, or a task with another number of checks.
    """
    common = sorted(set(a) & set(b))
    usable = [task for task in common if _trusted(a[task]).any() and _trusted(b[task]).any()]
    if not usable:
        raise MismatchError(
            f"the evaluations have no task in common ({len(a)} and {len(b)} tasks)",
            remedy="compare runs that were evaluated on the same eval.tasks",
        )
    for task in usable:
        totals = {float(value) for side in (a, b) for value in side[task]["total"][_trusted(side[task])]}
        if len(totals) > 1:
            raise MismatchError(f"task {task} has {' and '.join(f'{total:g}' for total in sorted(totals))} checks")
    scores = {
        "checks passed": lambda entry: entry["passed"],
        "share of checks": lambda entry: entry["passed"] / np.maximum(entry["total"], 1.0),
        "tasks solved": lambda entry: entry["solved"],
    }
    return {
        name: paired_bootstrap(
            [score(a[task])[_trusted(a[task])] for task in usable],
            [score(b[task])[_trusted(b[task])] for task in usable],
            samples=samples,
            seed=seed,
        )
        for name, score in scores.items()
    }


def _trusted(entry: dict[str, np.ndarray]) -> np.ndarray:
    """Attempts with a trusted verdict; others are excluded, not counted as zero."""
    return np.isfinite(entry["passed"])
