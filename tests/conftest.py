from __future__ import annotations

import pytest
from hypothesis import settings

from megatron_t1.config.schema import LayoutConfig
from tests.tiny_model import cpu_backend

settings.register_profile("shared machine", deadline=None)  # an example's time says nothing where others compute too
settings.load_profile("shared machine")


@pytest.fixture(scope="module")
def backend():
    """A lone process with Megatron's parallel state."""
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend = cpu_backend()
    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    yield backend
    destroy_parallel()
