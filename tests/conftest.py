from __future__ import annotations

import shutil
import sys

import pytest
from hypothesis import settings

from megatron_t1.config.schema import LayoutConfig
from tests.tiny_model import cpu_backend
from tests.workshop import Workshop

settings.register_profile("shared machine", deadline=None)  # an example's time says nothing where others compute too
settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def aux_loss_scale():
    """Megatron keeps the scale of auxiliary losses on a class: one test's, of another shape, would reach the next."""
    yield
    if module := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        module.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """With tasks, and a start model that has been taught to run commands."""
    place = Workshop(tmp_path_factory.mktemp("workshop"))
    try:
        place.furnish()
        yield place
    finally:
        shutil.rmtree(place.scratch)


@pytest.fixture(scope="module")
def backend():
    """A lone process with Megatron's parallel state."""
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend = cpu_backend()
    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    yield backend
    destroy_parallel()
