"""Load balancing of one router while its routes are replayed: whose load counts, and only that of real tokens.

Megatron takes the load of the router's own top-k in the auxiliary losses and that of the experts taken in the bias
update, padding included in both unless the model is given a padding mask (Megatron-LM#5542). With such a mask it
divides by the number of real tokens, so that a micro-batch that has none gets NaN gradients; here it has no auxiliary
loss. Nothing here touches a router call that isn't replayed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.seam import RouterSeam
from megatron_t1.routing.slot import MicroBatchRoutes

_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")


class ReplayedBalancing:
    """Hooks and methods on one router; made only where `needed`.

    Args:
        router: a TopKRouter of any core version.
        seam: the router's share of the RoutingReplay.

    Attributes:
        load: float64 [E], taken experts of real tokens since it was last reset, in training passes; recomputations
            aren't counted again.
    """

    def __init__(self, router: nn.Module, seam: RouterSeam, options: ReplayOptions):
        self.seam, self.options = seam, options
        self.load: Tensor | None = None
        self._takes_padding_mask = "padding_mask" in inspect.signature(router.forward).parameters
        self._masks_losses = self._takes_padding_mask and (_has_aux_loss(router) or _has_z_loss(router))
        self._counts_bias = _has_bias(router)
        self._overridden: list[str] = []
        self._handles = [
            router.register_forward_pre_hook(self._before, with_kwargs=True),
            router.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        if _has_aux_loss(router):
            self._override_losses(router)
        if options.z_loss == "off" and _has_z_loss(router):
            self._override(router, "apply_z_loss", lambda _: lambda logits, *_, **__: logits)

    @staticmethod
    def needed(router: nn.Module, options: ReplayOptions) -> bool:
        """Whether this router balances or counts anything."""
        return options.load or _has_bias(router) or _has_aux_loss(router) or _has_z_loss(router)

    def detach(self, router: nn.Module) -> None:
        """Leave the router as it was found."""
        for handle in self._handles:
            handle.remove()
        for name in self._overridden:
            delattr(router, name)  # the method of its class shows again

    # ------------------------------------------------------------------ around a call of the router

    def _before(self, router: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        slot = self._replayed()
        if slot is None:
            return None
        slot.require_rows(args[0].shape[:2].numel(), self.seam.layer)
        if self._counts_bias:
            router.enable_expert_bias = False  # stops the counting; the bias itself is still part of the choice
        given = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
        if slot.valid is None or not self._masks_losses or given is not None:
            return None
        padding = ~slot.valid.view(args[0].shape[:2])
        return args[:1], {**kwargs, "padding_mask": padding}

    def _after(self, router: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        taken, native = self.seam.taken, self.seam.native
        self.seam.taken = self.seam.native = None
        if self._counts_bias:
            router.enable_expert_bias = True
        if taken is None or output is None:  # not replayed, or the call raised
            return
        valid = self._replayed().valid
        if self.options.load and router.training and self.seam.owner.in_training_forward():
            if self.load is None:
                self.load = torch.zeros(router.num_experts, dtype=torch.float64, device=taken.device)
            self.load += expert_counts(taken, valid, router.num_experts)
        if self._counts_bias and self.options.expert_bias != "frozen" and torch.is_grad_enabled():
            chosen = taken if self.options.expert_bias == "taken" else native.indices
            with torch.no_grad():
                router.local_tokens_per_expert += expert_counts(chosen, valid, router.num_experts)

    def _replayed(self) -> MicroBatchRoutes | None:
        slot = self.seam.slot()
        return slot if isinstance(slot, MicroBatchRoutes) else None

    # ------------------------------------------------------------------ auxiliary losses

    def _override(self, router: nn.Module, name: str, make: Callable[[Callable], Callable]) -> None:
        """Put `make(method)` in the place of a method while routes are replayed."""
        method = getattr(router, name, None)
        if method is None:
            return
        replacement = make(method)

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return (method if self._replayed() is None else replacement)(*args, **kwargs)

        setattr(router, name, dispatch)
        self._overridden.append(name)

    def _override_losses(self, router: nn.Module) -> None:
        if self.options.aux_loss == "off":
            for name in (*_LOSSES, "apply_load_balancing_loss"):  # the last one in core 0.13
                self._override(router, name, lambda _: _first_argument)
            return
        for name in _LOSSES:
            self._override(router, name, self._of_real_tokens)
        if self._takes_padding_mask:
            self._override(router, "attach_and_log_load_balancing_loss", self._zero_without_tokens)
        if self.options.aux_loss == "taken" and not hasattr(router, _LOSSES[0]):
            # core 0.13: one method gives scores and map to all losses
            self._override(router, "compute_routing_scores_for_aux_loss", self._scores_with_taken)

    def _of_real_tokens(self, loss: Callable) -> Callable:
        """The loss of the load that the options say, with a gradient for real tokens only."""

        def apply(probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.options.aux_loss == "taken":
                routing_map = self._taken_map(routing_map)
            valid = self._replayed().valid
            if valid is not None and self._takes_padding_mask:
                scores = _RealRows.apply(scores, valid)
            return loss(probs, scores, routing_map, *args, **kwargs)

        return apply

    def _zero_without_tokens(self, attach: Callable) -> Callable:
        """Attaching a loss, of which this rank's share is 0 where none of its tokens is real; computed, it is NaN when
        the whole group has none, because it was divided by their number."""

        def apply(activation: Tensor, coefficient: float, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            valid = self._replayed().valid
            if valid is not None:
                loss = torch.where(valid.any(), loss, torch.zeros_like(loss))
            return attach(activation, coefficient, loss, *args, **kwargs)

        return apply

    def _scores_with_taken(self, compute: Callable) -> Callable:
        def apply(logits: Tensor) -> tuple[Tensor, Tensor]:
            scores, routing_map = compute(logits)
            return scores, self._taken_map(routing_map)

        return apply

    def _taken_map(self, like: Tensor) -> Tensor:
        """bool [T, E] of the taken experts; rows of padding are empty where Megatron empties them too."""
        taken = torch.zeros_like(like, dtype=torch.bool).scatter_(1, self.seam.taken, True)
        valid = self._replayed().valid
        return taken if valid is None or not self._takes_padding_mask else taken & valid[:, None]


class _RealRows(torch.autograd.Function):
    """`scores` [T, E]; its gradient is 0 in rows that aren't `valid` [T], whatever came back for them."""

    @staticmethod
    def forward(ctx, scores: Tensor, valid: Tensor) -> Tensor:
        ctx.save_for_backward(valid)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (valid,) = ctx.saved_tensors
        return gradient.masked_fill(~valid[:, None], 0.0), None


def expert_counts(indices: Tensor, valid: Tensor | None, num_experts: int) -> Tensor:
    """float64 [E]: how often each expert stands in `indices` [T, K], in rows that `valid` [T] allows."""
    counts = torch.zeros(num_experts, dtype=torch.float64, device=indices.device)
    weights = torch.ones_like(indices, dtype=torch.float64)
    if valid is not None:
        weights *= valid[:, None]
    return counts.scatter_add_(0, indices.flatten(), weights.flatten())


def _first_argument(activation: Tensor, *_: Any, **__: Any) -> Tensor:
    return activation


def _has_bias(router: nn.Module) -> bool:
    return bool(getattr(router, "enable_expert_bias", False))


def _has_aux_loss(router: nn.Module) -> bool:
    kind, coefficient = router.config.moe_router_load_balancing_type, router.config.moe_aux_loss_coeff
    return kind != "none" and any(coefficient if isinstance(coefficient, (list, tuple)) else [coefficient])


def _has_z_loss(router: nn.Module) -> bool:
    return bool(router.config.moe_z_loss_coeff)
