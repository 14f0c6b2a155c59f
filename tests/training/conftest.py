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


@pytest.fixture
def run(backend):
    """Run one phase of one iteration: run("critic", config, 0)."""
    from megatron_t1.training.context import Context
    from megatron_t1.training.main import _phase

    _phase("critic")  # imports all phases' modules, before a test replaces a name that one takes from another
    return lambda role, config, iteration=0: _phase(role)(Context(config, backend, iteration))
