from __future__ import annotations

import pytest

from tests.tiny_model import write_hf
from tests.training.synthetic import run_config, write_rollout


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("start") / "hf")


@pytest.fixture
def make_run(tmp_path, model):
    """A run directory with rollouts for its first two iterations, and its configuration."""

    def make(name="run", *, warmup=0, rollouts=2, **layout):
        config = run_config(tmp_path / name, model, warmup=warmup, **layout)
        for iteration in range(rollouts):
            directory = tmp_path / name / "rollouts" / f"iter_{iteration:04d}"
            write_rollout(directory, model, seed=iteration, iteration=iteration)
        return config

    return make
