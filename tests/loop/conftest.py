import os
from pathlib import Path

import pytest

from megatron_t1.config.compose import absolute, compose

HERE = Path(__file__).resolve().parent


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The tiny setting in a temporary run directory; phases can import dummy_phase."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    value = absolute(compose([f"run.dir={tmp_path / 'run'}", "loop.warmup_iterations=1", "loop.iterations=1"]))
    value.cluster.stop_grace_s = 0.5
    return value
