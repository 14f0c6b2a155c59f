"""The routers of a model without the rest of it, and what a pass through them reads from the device and allocates."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result the host waits for, or whose shape depends on values.
HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal", "_to_cpu"}


class RouterStack(nn.Module):
    """`layers` routers after one another, each on the same input; what a RoutingReplay takes for a model.

    Args:
        config: a TransformerConfig with as many layers, all with experts.
    """

    def __init__(self, config: Any):
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.config = config
        self.routers = nn.ModuleList()
        if hasattr(moe_utils, "get_default_pg_collection"):
            groups = {"pg_collection": moe_utils.get_default_pg_collection()}
        else:  # before core 0.15
            groups = {"model_comm_pgs": moe_utils.get_default_model_comm_pgs()}
        for layer in range(config.num_layers):
            router = TopKRouter(config, **groups)
            router.set_layer_number(layer + 1)
            self.routers.append(router)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, H] -> probabilities of all layers, added up [s * b, E]."""
        total = 0.0
        for router in self.routers:
            total = total + router(hidden)[0]
        return total


def router_config(layers: int, num_experts: int, top_k: int, hidden_size: int) -> Any:
    """A TransformerConfig for `RouterStack`, with random weights."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=1,
        num_moe_experts=num_experts,
        moe_ffn_hidden_size=8,
        moe_router_topk=top_k,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=not torch.cuda.is_available(),
    )


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for the device, by name."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexed_by_mask = name == "index" and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        if name in HOST_READS or indexed_by_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages made within it: alive now, and at most at any time."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for part in tree_leaves((args, kwargs)):
            self._add(part, counted=False)  # made before; a view of it isn't a new storage
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            self._add(part, counted=True)
        return result

    def _add(self, part: Any, counted: bool) -> None:
        if not isinstance(part, Tensor) or part.untyped_storage()._cdata in self._known:
            return
        storage = part.untyped_storage()
        size = storage.nbytes() if counted else 0
        self._known.add(storage._cdata)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._remove, storage._cdata, size)

    def _remove(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.alive -= size
