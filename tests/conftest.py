from __future__ import annotations

import pytest

from megatron_t1.config.schema import LayoutConfig
from tests.tiny_model import cpu_backend


@pytest.fixture(scope="module")
def backend():
    """A lone process with Megatron's parallel state."""
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend = cpu_backend()
    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    yield backend
    destroy_parallel()
