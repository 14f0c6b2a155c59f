"""Does replaying the rollout's experts help the critic? Explained variance on unseen rollouts, with and without.

    python benchmarks/critic_replay.py RUN [RUN ...] [--out DIR]

For each finished run a fresh critic is trained on the run's stored rollouts, in their order, once with
train.replay.critic=true and once with false: the same records, seeds and packing. What is reported is the explained
variance of the values before the critic has seen the rollout (`critic/explained_variance`, trajectories weighted
equally). A rollout's tasks are new to the critic until every training task has been drawn once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from driving import copy_rollouts, train
from rich.console import Console
from rich.table import Table


def explained_variances(run: Path, target: Path, *, replay: bool) -> list[float]:
    """Train a critic on every rollout of `run`, in order; the explained variance of each before it was trained on."""
    return [
        train(target, iteration, ["critic"], [f"train.replay.critic={str(replay).lower()}"])["critic"].metrics[
            "critic/explained_variance"
        ]
        for iteration in copy_rollouts(run, target)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="finished runs; their files are only read")
    parser.add_argument("--out", type=Path, default=Path("runs/critic-replay"))
    options = parser.parse_args()
    table: Table | None = None
    differences = []
    for run in options.runs:
        rows = {
            replay: explained_variances(
                run, options.out / f"{run.name}-{'replay' if replay else 'native'}", replay=replay
            )
            for replay in (False, True)
        }
        if table is None:
            iterations = [f"{iteration}" for iteration in range(len(rows[False]))]
            table = Table("run", "critic's experts", *iterations, "mean of the last half")
        half = len(rows[False]) // 2
        for replay, values in rows.items():
            name = "replayed" if replay else "its own"
            table.add_row(run.name, name, *(f"{value:.3f}" for value in values), f"{np.mean(values[half:]):.3f}")
        differences += (np.array(rows[True]) - np.array(rows[False]))[1:].tolist()
    console = Console(width=160)
    console.print(table)
    spread = np.std(differences, ddof=1) / len(differences) ** 0.5
    console.print(
        f"replayed - its own, mean over {len(differences)} rollouts, the first of each run left out: "
        f"{np.mean(differences):+.4f}, standard error {spread:.4f}"
    )


if __name__ == "__main__":
    main()
