import copy
import os
from pathlib import Path

import pytest

from megatron_t1.config.compose import absolute, compose

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def tiny_setting():
    return compose(["loop.warmup_iterations=1", "loop.iterations=1", "run.dir=somewhere"])


@pytest.fixture
def config(tiny_setting, tmp_path, monkeypatch):
    """The tiny setting in a temporary run directory; phases can import dummy_phase."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    value = copy.deepcopy(tiny_setting)
    value.run.dir = str(tmp_path / "run")
    value.cluster.stop_grace_s = 0.5
    return absolute(value)
