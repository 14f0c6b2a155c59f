"""Did PPO learn? Held-out checks before and after, for the runs of `make learn`, dense and binary reward side by side.

    python benchmarks/learning.py [--runs DIR]

Reads DIR/learn-<reward>-<seed>/evaluations. Each row is a paired bootstrap over tasks and attempts (95%); the last row
of a reward pools its seeds (a task's attempts of all seeds together). Only finished runs are shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_t1.report.comparison import evaluations_of
from megatron_t1.report.statistics import PairedDifference, compare_evaluations, read_evaluation

Evaluation = dict[str, dict[str, np.ndarray]]


def pooled(evaluations: list[Evaluation]) -> Evaluation:
    """One evaluation with the attempts of several on the same tasks."""
    return {
        task: {name: np.concatenate([one[task][name] for one in evaluations]) for name in evaluations[0][task]}
        for task in evaluations[0]
    }


def finished_runs(directory: Path, reward: str) -> dict[int, tuple[Evaluation, Evaluation]]:
    """seed -> (first, last) evaluation of each run that reached its last policy."""
    found = {}
    for run in sorted(directory.glob(f"learn-{reward}-*")):
        seed = run.name.rpartition("-")[2]
        evaluations = evaluations_of(run)
        if seed.isdigit() and len(evaluations) >= 2 and _is_complete(run):
            found[int(seed)] = (read_evaluation(evaluations[0]), read_evaluation(evaluations[-1]))
    return found


def _is_complete(run: Path) -> bool:
    manifest = json.loads((run / "manifest.json").read_text())
    last = max(step["iteration"] for step in manifest["finished"])
    return any(step["phase"] == "evaluation" and step["iteration"] == last > 0 for step in manifest["finished"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    table = Table("reward", "seed", "checks: SFT", "PPO", "gain [95%]", "solved: SFT", "PPO", "gain [95%]")
    for reward in ("dense", "binary"):
        runs = finished_runs(options.runs, reward)
        for seed, (first, last) in runs.items():
            table.add_row(reward, str(seed), *gain_cells(compare_evaluations(first, last)))
        if len(runs) > 1:
            both = [pooled([pair[side] for pair in runs.values()]) for side in (0, 1)]
            table.add_row(reward, "all", *gain_cells(compare_evaluations(*both)), end_section=True)
    Console(width=130).print(table)


def gain_cells(comparison: dict[str, PairedDifference]) -> list[str]:
    """Checks before, after and gained, and the same of solved tasks, with 95% intervals."""
    checks, solved = comparison["checks passed"], comparison["tasks solved"]
    return [
        f"{checks.mean_a:.2f}",
        f"{checks.mean_b:.2f}",
        f"{checks.difference:+.2f} [{checks.low:+.2f}, {checks.high:+.2f}]",
        f"{100 * solved.mean_a:.1f}%",
        f"{100 * solved.mean_b:.1f}%",
        f"{100 * solved.difference:+.1f} [{100 * solved.low:+.1f}, {100 * solved.high:+.1f}]",
    ]


if __name__ == "__main__":
    main()
