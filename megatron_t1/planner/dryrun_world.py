"""A world of any size in one process: Megatron's process groups without processes, and models without numbers.

`fake_world` makes this process rank `rank` of `layout.processes` for as long as its block runs. Collectives of the fake
backend return at once; tensors lie on the meta device, which knows their shapes and types alone. A process that has
prepared a `MetaBackend` can visit one rank after another, and can't compute anything any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.model.backend import CpuBackend


@dataclass
class MetaBackend(CpuBackend):
    """The CPU's layers on the meta device. Their parameters have the shapes of Transformer Engine's."""

    name: str = "meta"
    communication: str = "fake"

    @property
    def device(self) -> Any:
        import torch

        return torch.device("meta")


@contextlib.contextmanager
def fake_world(
    rank: int, layout: LayoutConfig, backend: MetaBackend, *, architecture: ArchitectureConfig | None = None
) -> Iterator[None]:
    """Be `rank` of the layout's processes, with Megatron's groups built as a training phase builds them.

    Raises:
        ConfigError: the layout can't work; lists every reason.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

    backend.prepare()
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    place = {"RANK": str(rank), "WORLD_SIZE": str(layout.processes), "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    new_group = dist.new_group

    def fake_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Also where Megatron asks for gloo beside nccl."""
        return new_group(*args, **kwargs)

    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(dist, "new_group", fake_group),
        torch.device(backend.device),  # routers and gates are created without a device
    ):
        dist.init_process_group(backend.communication, rank=rank, world_size=layout.processes, store=FakeStore())
        try:
            initialize_parallel(layout, backend, 0, architecture=architecture)
            yield
        finally:
            destroy_parallel()
