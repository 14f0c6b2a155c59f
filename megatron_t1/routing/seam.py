"""The object on a router. It answers `get_replay_topk`, which megatron-core >= 0.16 asks before it chooses experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_t1.routing.slot import NativeTopK

if TYPE_CHECKING:
    from megatron_t1.routing.replay import RoutingReplay


class RouterSeam:
    """One router's share of a RoutingReplay.

    Values are gathered from the scores the router computed in this call, before anything is masked, so the gradient
    reaches the router as it does natively (Megatron-LM#79).
    """

    def __init__(self, owner: RoutingReplay, layer: int):
        self.owner, self.layer = owner, layer

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
        slot = self.owner.current_slot(self.layer)
        indices = slot.choose(self.layer, self.owner.columns[self.layer], native, scores.shape[0])
        if indices is None:
            return native.values, native.indices
        return scores.gather(1, indices), indices
