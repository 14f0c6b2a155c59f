from __future__ import annotations

import pytest
from hypothesis import settings

from megatron_t1.config.schema import LayoutConfig
from tests.tiny_model import cpu_backend

LIGHT = {"audit", "cli", "config", "conformance", "environment", "harbor", "patching", "ppo", "report", "trajectory"}

settings.register_profile("shared machine", deadline=None)  # an example's time says nothing where others compute too
settings.load_profile("shared machine")


@pytest.hookimpl(tryfirst=True)  # xdist's own reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `-n 2 --dist loadgroup`: slow tests with vLLM, Megatron or Slurm one after another, the rest beside them.

    Two of those at once would share two cores and meet each other's time limits. Fast tests stay together by file.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        folder = item.path.parent.name
        group = str(item.path)
        if item.get_closest_marker("slow"):
            group = "slow, light" if folder in LIGHT else "slow"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="module")
def backend():
    """A lone process with Megatron's parallel state."""
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend = cpu_backend()
    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    yield backend
    destroy_parallel()
