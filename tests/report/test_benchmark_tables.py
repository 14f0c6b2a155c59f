"""The tables of benchmarks that drive whole runs, from made-up runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablate_critic
import driving
import training

from megatron_t1.config.schema import Config
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.manifest import FinishedStep
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.report.metrics import MetricsWriter


def evaluated(run: Path, policy: int, passed: list[int]) -> None:
    """Four tasks with these passed checks of 4."""
    directory = RunPaths.of(run).evaluation(policy)
    directory.mkdir(parents=True)
    tasks = {
        f"task-{number}": {"passed": [value], "total": [4], "solved": [value == 4], "score": [value / 4],
                           "ends": ["submitted"], "errors": [None], "baseline": -1, "category": "", "difficulty": ""}
        for number, value in enumerate(passed)
    }  # fmt: skip
    (directory / "summary.json").write_text(json.dumps({"version": 2, "policy": policy, "tasks": tasks}))


def trained(run: Path, iterations: int, explained: list[float]) -> None:
    """A run whose critic explained this much of each iteration; a minute for each rollout and for its training."""
    config = Config()
    config.run.dir = str(run)
    paths, manifest = RunPaths.of(run), new_manifest(config)
    writer = MetricsWriter(paths)
    for iteration in range(iterations):
        for phase, launch in (("rollout", "a"), ("critic", "b"), ("actor", "b"), ("export", "b")):
            launch = f"{launch}{iteration}"
            manifest.finished.append(FinishedStep(iteration, phase, "0" * 64, launch, {}, 60.0, 1, 0, 0, 0.0))
        writer.append(
            PhaseResult("critic", iteration, {"critic/explained_variance": explained[iteration]}), seconds=1.0
        )
    manifest.finished.append(FinishedStep(iterations, "evaluation", "0" * 64, "last", {}, 600.0, 1, 0, 0, 0.0))
    writer.close()
    manifest.write(paths.manifest)


def test_rows_of_the_ablation(tmp_path):
    seeds = [ablate_critic.Seed(tmp_path, number, 2, []) for number in (0, 1)]
    for seed in seeds:
        evaluated(seed.root / "before", 0, [1, 1, 1, 1])
        evaluated(seed.root / "adaptive", 2, [2, 2, 3, 3])
        trained(seed.root / "adaptive", 2, [0.25, 0.5 + seed.seed])
        evaluated(seed.root / "cold", 2, [1, 1, 2, 2])
        evaluated(seed.root / "cold", 4, [4, 4, 4, 4])
        trained(seed.root / "cold", 4, [0.0, 0.1, 0.2, 0.3])
    rows = ablate_critic.rows_of(seeds, "adaptive")
    assert [row[:2] for row in rows] == [["adaptive", "0"], ["adaptive", "1"], ["**adaptive**", "all"]]
    assert rows[0][2:4] == ["1.00", "2.50"] and rows[0][4].startswith("+1.50 [+")
    assert [row[5:] for row in rows] == [
        ["0.250", "0.500", "4.0"],
        ["0.250", "1.500", "4.0"],
        ["0.250", "1.000", "4.0"],
    ]
    cold = ablate_critic.rows_of(seeds, "cold")
    assert cold[0][0] == "cold" and cold[0][5:] == ["0.000", "0.100", "4.0"]
    assert cold[3][0] == "cold, same episodes" and cold[3][5:] == ["0.000", "0.250", "8.0"]
    differences = {row[0]: row[1:] for row in ablate_critic.against_reference(seeds)}
    assert differences.keys() == {"cold", "cold, same episodes"}
    assert differences["cold"][0] == "1.50" and differences["cold"][1].startswith("-1.00 [-")
    assert differences["cold, same episodes"][1].startswith("+1.50 [+")
    assert ablate_critic.rows_of(seeds, "lambda-1.0") == []  # nothing of it is finished


def test_shares_of_a_phase():
    times = {
        "start": 5.0, "total": 25.0, "verify": 0.5, "load_rollouts": 0.5, "load_model": 1.0, "update": 8.0,
        "engine/passes": 15.0, "engine/optimizer": 0.5, "engine/packing": 0.25, "engine/batches": 0.25, "save": 1.0,
    }  # fmt: skip
    result = PhaseResult("actor", 0, {"batch/tokens": 4000.0}, times)
    rate, own, outside, *parts = training.numbers(result, 2)
    assert (rate, own, outside) == (1000.0, 20.0, 0.25)
    assert dict(zip([*training.PARTS, "rest"], parts, strict=True)) == {
        "reading": 1.0, "model": 1.0, "packing": 0.5, "advantages": 0.0, "optimizer": 0.5, "metrics": 0.0,
        "saving": 1.0, "rest": 1.0,
    }  # fmt: skip
    assert "| actor, replay | 1,000 | 20.00 | 25.0% |" in training.table({"actor, replay": [result]}, {"actor": 2})


def test_a_table_is_written_between_its_marks_only(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("above\n<!-- it: begin -->\nold\n<!-- it: end -->\nbelow\n")
    driving.write_between(path, "it", "new")
    assert path.read_text() == "above\n<!-- it: begin -->\n\nnew\n\n<!-- it: end -->\nbelow\n"
    with pytest.raises(SystemExit, match="has no <!-- other: begin -->"):
        driving.write_between(path, "other", "new")
