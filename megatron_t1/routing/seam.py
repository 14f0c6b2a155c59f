"""The object on a router. It answers `get_replay_topk`, which megatron-core >= 0.16 asks before it chooses experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_t1.errors import T1Error
from megatron_t1.routing.slot import MicroBatchRoutes, NativeTopK, Slot

if TYPE_CHECKING:
    from megatron_t1.routing.balancing import ReplayedBalancing
    from megatron_t1.routing.replay import RoutingReplay


class RouterSeam:
    """One router's share of a RoutingReplay.

    Values are gathered from the scores the router computed in this call, before anything is masked, so the gradient
    reaches the router as it does natively (Megatron-LM#79).

    Attributes:
        layer, column: global layer number, and which column of the routes belongs to it.
        balancing: of this router, where it has any. It finds `taken` and `native` of a replayed call here, and clears
            them.
    """

    def __init__(self, owner: RoutingReplay, layer: int, column: int):
        self._owner = weakref.ref(owner)
        self.layer, self.column = layer, column
        self.balancing: ReplayedBalancing | None = None
        self.taken: Tensor | None = None
        self.native: NativeTopK | None = None

    @property
    def owner(self) -> RoutingReplay | None:
        return self._owner()

    def detach(self, router: nn.Module) -> None:
        """Leave the router as it was found."""
        if self.balancing is not None:
            self.balancing.detach(router)
        router.router_replay = None

    def slot(self, *, asking: bool = False) -> Slot:
        """What the router call that is running now finds.

        Raises:
            T1Error: the RoutingReplay was dropped, or it has nothing for this call.
        """
        owner = self._owner()
        if owner is None:
            raise T1Error(
                f"the RoutingReplay of the router of layer {self.layer} was dropped without close()",
                where="RoutingReplay",
                remedy="keep it as long as the model is used, or close it first",
            )
        return owner.current_slot(self.layer, asking=asking)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(values [T, K] of `scores` [T, E], indices int64 [T, K]) of the experts to take."""
        native = NativeTopK(lambda: default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk))
        slot = self.slot(asking=True)
        indices = slot.choose(self.layer, self.column, native, scores.shape[0])
        if indices is None:
            return native.values, native.indices
        if self.balancing is not None and isinstance(slot, MicroBatchRoutes):
            self.taken, self.native = indices, native
        return _Pick.apply(scores, indices), indices


class _Pick(torch.autograd.Function):
    """`scores.gather(1, indices)` that remembers only the indices, as a top-k does.

    torch's own gather keeps `scores` [T, E] of every layer until the backward: 8 MiB a layer for 8192 tokens and 256
    experts. The experts of a row are distinct.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = scores.shape
        return scores.gather(1, indices)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter_(1, indices, gradient), None
