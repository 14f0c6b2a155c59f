"""What a router call may find: a micro-batch's routes, a recording in progress, or nothing to change."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_t1.errors import T1Error


def route_dtype(num_experts: int) -> torch.dtype:
    """The compact type of routes: uint8 up to 256 experts, uint16 above."""
    return torch.uint8 if num_experts <= 256 else torch.uint16


class Slot:
    """Base of what stands in a slot. `choose` returns the expert indices of one layer's call, int64 [T, K]."""

    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> Tensor | None:
        """None: take the router's own choice."""
        raise NotImplementedError


class NativeTopK:
    """The router's own choice, computed at most once and only when somebody wants it."""

    def __init__(self, compute):
        self._compute, self._result = compute, None

    @property
    def values(self) -> Tensor:
        return self._both()[0]

    @property
    def indices(self) -> Tensor:
        return self._both()[1]

    def _both(self) -> tuple[Tensor, Tensor]:
        if self._result is None:
            self._result = self._compute()
        return self._result


class _Native(Slot):
    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> None:
        return None


NATIVE = _Native()


@dataclass(eq=False)
class MicroBatchRoutes(Slot):
    """Recorded routes of one micro-batch on this rank.

    Attributes:
        routes: uint8 or uint16 [T, L, K], L all MoE layers of the model in global order, rows in the router's token
            order on this rank (sequence-major, after the context- and sequence-parallel cut). It stays in this type; a
            layer widens only its own column (SkyRL#1910).
        mask: bool [T], False where the router's own choice is taken; what the row holds then doesn't matter.
    """

    routes: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        if self.routes.dim() != 3 or self.mask.shape != self.routes.shape[:1] or self.mask.dtype != torch.bool:
            raise T1Error(
                f"routes {list(self.routes.shape)} and mask {self.mask.dtype} {list(self.mask.shape)} don't belong "
                "together: expected [T, L, K] and bool [T]",
                where="MicroBatchRoutes",
            )
        self._all_routed = bool(self.mask.all())  # once here, so that no layer waits for the device

    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> Tensor:
        if self.routes.shape[0] != tokens:
            raise T1Error(
                f"the router of layer {layer} has {tokens} tokens, the routes {self.routes.shape[0]} rows",
                where="MicroBatchRoutes",
                remedy="cut routes with the layout that cuts the ids, context and sequence parallelism included",
            )
        indices = self.routes[:, column].to(torch.int64)
        return indices if self._all_routed else torch.where(self.mask[:, None], indices, native.indices)

    def to(self, device: torch.device) -> MicroBatchRoutes:
        """The same routes on a device, still in their compact type."""
        if self.routes.device == device:
            return self
        return MicroBatchRoutes(self.routes.to(device, non_blocking=True), self.mask.to(device, non_blocking=True))


@dataclass(eq=False)
class Recording(Slot):
    """Keeps each layer's native choice, int64 [T, K] by layer; read again by a recomputation."""

    columns: dict[int, int]
    indices: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> Tensor | None:
        if layer in self.indices:
            return self.indices[layer]
        self.indices[layer] = native.indices.detach()
        return None
