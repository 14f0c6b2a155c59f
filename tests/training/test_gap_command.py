"""`t1 gap` from the command line: two processes, the experts spread over them, a rollout with a planted cause."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_t1.cli import main
from megatron_t1.config.compose import load_run_config
from megatron_t1.config.schema import LayoutConfig, ModelConfig
from megatron_t1.model.initial import create_initial_model
from megatron_t1.paths import RunPaths
from megatron_t1.rollout.formats.tokenizer import PlainTokenizer
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.store import RolloutStore
from tests.rollout.conftest import CORPUS
from tests.tiny_model import ARCHITECTURE
from tests.training.planted import played, records
from tests.training.synthetic import run_config, save_config
from tests.training.weights import tree_digest

pytestmark = pytest.mark.slow


@pytest.fixture
def run(backend, tmp_path):
    """A run of two processes whose records say temperature 0.7, and were sampled at 1."""
    architecture = replace(ARCHITECTURE, vocab_size=0)
    model = create_initial_model(tmp_path / "model", ModelConfig(architecture=architecture), 1, CORPUS)
    config = run_config(tmp_path / "run", model)
    config.model.architecture = architecture
    config.rollout.temperature = 0.7
    config.layout = LayoutConfig(processes=2, expert=2)
    save_config(config)
    lone = load_run_config(tmp_path / "run")
    lone.layout = LayoutConfig(processes=1, expert=1)
    from megatron_t1.model.build import resolve_architecture

    lone.model.architecture = resolve_architecture(lone.model)
    spelt = [with_prompt(record, letters(model)) for record in records(12, model, temperature=0.7)]
    taken = played(lone, backend, model, spelt, temperature=1.0)
    RolloutStore(RunPaths.of(config.run.dir).rollouts(0)).add_many(taken)
    return RunPaths.of(config.run.dir)


def letters(model: Path) -> np.ndarray:
    """Ids of `txt` one by one, which no tokenizer writes that knows the word."""
    encode = PlainTokenizer(model).encode
    ids = np.concatenate([encode(letter) for letter in "txt"])
    assert len(encode("txt")) < len(ids) == 3
    return ids


def with_prompt(record: Trajectory, start: np.ndarray) -> Trajectory:
    return replace(record, ids=np.concatenate([start, record.ids[len(start) :]]))


def test_the_command_names_the_planted_cause(run, capsys, tmp_path):
    before = tree_digest(run.root)
    out = tmp_path / "report" / "gap.json"
    assert main(["gap", str(run.root), "--sample", "8", "--worst", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "sampled with policy 0; 8 of 12 trajectories" in said and "temperature 1: raw log-probs" in said
    report = json.loads(out.read_text())
    assert report["attribution"]["shares"]["temperature"]["in_turn"] > 0.95
    assert report["attribution"]["steps"][0]["setting"] == "temperature_1"
    assert report["retokenised"]["changed"] == 8
    by_name = {setting["name"]: setting for setting in report["settings"]}
    assert by_name["as_trained"]["tokens"] >= by_name["rerendered"]["tokens"] > 0
    assert by_name["rerendered"]["change"] != 0
    assert (
        by_name["own_routes"]["routes"]["route_difference"] == 0
    )  # each rank sees half of the experts, both all layers
    worst = by_name["as_trained"]["worst"]
    assert len(worst) == 10 and worst[0]["explained_by"] == "temperature_1" and worst[0]["text"]
    assert report["not_measured"].keys() == {"router", "weights"}
    assert tree_digest(run.root) == before and [path.name for path in out.parent.iterdir()] == ["gap.json"]
