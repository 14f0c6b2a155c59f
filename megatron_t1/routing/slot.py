"""What a router call may find: a micro-batch's routes, a recording in progress, or nothing to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_t1.errors import T1Error


def route_dtype(num_experts: int) -> torch.dtype:
    """The compact type of routes: uint8 up to 256 experts, uint16 above."""
    return torch.uint8 if num_experts <= 256 else torch.uint16


class NativeTopK:
    """The router's own choice, computed at most once and only when somebody wants it."""

    def __init__(self, compute: Callable[[], tuple[Tensor, Tensor]]):
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


class Slot:
    """Base of what stands in a slot. `choose` returns the expert indices of one layer's call, int64 [T, K]."""

    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> Tensor | None:
        """None: take the router's own choice."""
        raise NotImplementedError


class _Native(Slot):
    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> None:
        return None


NATIVE = _Native()


@dataclass(eq=False, frozen=True)
class MicroBatchRoutes(Slot):
    """Recorded routes of one micro-batch on this rank. The tensors aren't to be changed between forward and backward.

    Attributes:
        routes: uint8 or uint16 (`route_dtype`) [T, L, K], L all MoE layers of the model in global order, rows in the
            router's token order on this rank (sequence-major, after the context- and sequence-parallel cut). It stays
            in this type; a layer widens only its own column (SkyRL#1910).
        mask: bool [T], False where the router's own choice is taken; what the row holds then doesn't matter. Left out:
            all rows are replayed.
        valid: bool [T], False where the token is padding: it is routed, and left out of losses and statistics of the
            load. None: all tokens are real.

    Raises:
        T1Error: shapes or types that don't belong together.
    """

    routes: Tensor
    mask: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        given = {"routes": self.routes, "mask": self.mask, "valid": self.valid}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) and (tensor is not None or name == "routes"):
                raise T1Error(
                    f"{name} are a {type(tensor).__name__}, expected a tensor",
                    where="MicroBatchRoutes",
                    remedy="torch.from_numpy makes one of an array, without a copy",
                )
        marks = [mark for mark in (self.mask, self.valid) if mark is not None]
        if self.routes.dim() != 3 or any(
            mark.shape != self.routes.shape[:1] or mark.dtype != torch.bool for mark in marks
        ):
            found = ", ".join(f"{mark.dtype} {list(mark.shape)}" for mark in marks)
            raise T1Error(
                f"routes {list(self.routes.shape)} and marks {found or 'left out'} don't belong together: expected "
                "[T, L, K] and bool [T]",
                where="MicroBatchRoutes",
            )
        # Read once here, so that no layer waits for the device.
        all_routed = self.mask is None or bool(self.mask.all())
        if self.mask is None:
            object.__setattr__(self, "mask", torch.ones(len(self.routes), dtype=torch.bool, device=self.routes.device))
        vars(self).update(_all_routed=all_routed, _checked_for=set())

    def require_rows(self, tokens: int, layer: int) -> None:
        """Raise T1Error unless there is a row for each of the tokens that the router of `layer` is given."""
        if self.routes.shape[0] != tokens:
            raise T1Error(
                f"the router of layer {layer} has {tokens} tokens, the routes {self.routes.shape[0]} rows",
                where="MicroBatchRoutes",
                remedy="cut routes with the layout that cuts the ids, context and sequence parallelism included",
            )

    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> Tensor:
        self.require_rows(tokens, layer)
        indices = self.routes[:, column].to(torch.int64)
        return indices if self._all_routed else torch.where(self.mask[:, None], indices, native.indices)

    def check(self, num_experts: int, layers: Sequence[int]) -> None:
        """Raise unless every replayed row holds distinct experts of `num_experts`. Waits for the device, once for each
        number of experts.

        Megatron takes a repeated expert as one expert fewer, in silence.

        Args:
            layers: global layer number of each column, for the message.
        """
        if num_experts in self._checked_for:
            return
        # Comparisons of uint16 are missing in torch; the same bits as int16 serve, experts from 32768 on excepted.
        rows = self.routes if self.routes.dtype == torch.uint8 else self.routes.view(torch.int16)
        top_k = rows.shape[2]
        wrong = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
        if num_experts < 256 or rows.dtype != torch.uint8:
            wrong |= ((rows < 0) | (rows >= num_experts)).any(dim=2)
        for shift in range(1, top_k // 2 + 1):  # every pair of a row meets in one of these rotations
            wrong |= (rows == rows.roll(shift, dims=2)).any(dim=2)
        wrong &= self.mask[:, None]
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            experts = self.routes[row, column].tolist()
            raise T1Error(
                f"experts {experts} can't be taken: {top_k} distinct ones of {num_experts} are needed",
                where=f"MicroBatchRoutes, row {row}, layer {layers[column]} (MoE layer {column + 1} of {len(layers)})",
                remedy="give padding the rows of padding_routes, and mark rows without recorded experts in `mask`",
            )
        self._checked_for.add(num_experts)

    def to(self, device: torch.device) -> MicroBatchRoutes:
        """The same routes on a device, still in their compact type."""
        if self.routes.device == device:
            return self
        moved = object.__new__(MicroBatchRoutes)  # nothing to check again: on a device that would wait for it
        vars(moved).update(vars(self))
        for name in ("routes", "mask", "valid"):
            if (tensor := getattr(self, name)) is not None:
                vars(moved)[name] = tensor.to(device, non_blocking=True)
        return moved


@dataclass(eq=False)
class Recording(Slot):
    """Keeps each layer's native choice, int64 [T, K] by layer; read again by a recomputation."""

    indices: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, column: int, native: NativeTopK, tokens: int) -> Tensor | None:
        if layer in self.indices:
            return self.indices[layer]
        # From 0.18 on the core leaves the k unsorted where no gradient is needed; sorted by score, as with a gradient,
        # their probabilities are summed in the same order, and replay is bitwise equal.
        order = native.values.detach().argsort(dim=1, descending=True, stable=True)
        self.indices[layer] = native.indices.detach().gather(1, order)
        return None
