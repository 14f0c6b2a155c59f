from __future__ import annotations

import pytest

from tests.tiny_model import write_hf
from tests.training.synthetic import run_config, write_rollout


@pytest.fixture(scope="session")
def stored_run(tmp_path_factory):
    """A run directory with one rollout of the tiny model."""
    root = tmp_path_factory.mktemp("gpu")
    model = write_hf(root / "hf")
    config = run_config(root / "run", model)
    write_rollout(root / "run" / "rollouts" / "iter_0000", model)
    return config.run.dir
