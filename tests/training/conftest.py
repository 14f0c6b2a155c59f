from __future__ import annotations

import pytest

from megatron_t1.config.schema import LayoutConfig
from tests.tiny_model import cpu_backend, write_hf
from tests.training.synthetic import run_config, write_rollout


@pytest.fixture(scope="module")
def backend():
    """A lone process with Megatron's parallel state."""
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend = cpu_backend()
    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    yield backend
    destroy_parallel()


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
