"""R3, rollout routing replay: a token takes the experts the sampler recorded, the probabilities stay the router's own.

A `RoutingReplay` belongs to one model. It puts an object of its own on every router's `router_replay` (the seam of
megatron-core 0.16 and later, which asks `get_replay_topk`), keyed by the global layer number. There is no process-wide
state and no queue: a router call finds its routes in one of two places, the slot of the forward step that is running,
or the slot of the micro-batch whose backward is running (activation recomputation), which a hook on that micro-batch's
output fills. So any order of forward and backward steps is right (slime#951, AReaL#1166, Megatron-LM#2693).

Shapes: T tokens of this rank in the router's order (sequence-major, flattened), L MoE layers of the whole model in
global order, K experts per token, E experts.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from megatron_t1.errors import T1Error
from megatron_t1.routing.balancing import ReplayedBalancing, recomputing
from megatron_t1.routing.binding import decoder_routers, innermost, layers_without_router, moe_layers
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.safety import refuse_unsafe
from megatron_t1.routing.seam import RouterSeam
from megatron_t1.routing.slot import NATIVE, MicroBatchRoutes, Recording, Slot, route_dtype

Mode = Literal["off", "replay"]
Output = TypeVar("Output")


class RoutingReplay:
    """Replay and recording for one model, given as its pipeline chunks on this rank.

    Keep it as long as the model is used: routers know it weakly, and it knows the model weakly. It may be made before
    or after the chunks are wrapped (DDP, Float16Module).

    Args:
        chunks: the built model, or its list of virtual pipeline chunks.
        num_experts, top_k: of the routes that will come, compared with the routers; None: whatever the model has.
        layers: global numbers, from 1, of all MoE layers of the model; None: as `moe_layer_freq` says. Hybrid models
            that take their layers from a pattern instead need it.
        options: what else replay changes in a router.

    Attributes:
        mode: "replay" (the start): a router call that finds no routes raises. "off": every router routes natively.
        layers: as given or found; column i of the routes belongs to `layers[i]`. Empty: there is nothing to replay.
        local_layers: those of this rank.

    Raises:
        ConfigError: this core has no seam, or an option of the model would bypass replay.
        T1Error: the routers aren't those of such a model, or belong to another RoutingReplay.
    """

    def __init__(
        self,
        chunks: nn.Module | Sequence[nn.Module],
        *,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
        options: ReplayOptions | None = None,
    ):
        chunks = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
        config = innermost(chunks[0]).config
        self.num_experts = num_experts if num_experts is not None else config.num_moe_experts or 0
        self.top_k = top_k if top_k is not None else config.moe_router_topk
        self.layers = sorted(layers) if layers is not None else moe_layers(config)
        self.options = options or ReplayOptions()
        self.mode: Mode = "replay"
        self._warned = False
        self._forward: Slot | None = None
        self._backward: Slot | None = None
        self._asked: set[int] = set()
        self._chunks = [weakref.ref(innermost(chunk)) for chunk in chunks]
        self._balancing: list[tuple[weakref.ref[nn.Module], ReplayedBalancing]] = []
        routers = [decoder_routers(chunk) for chunk in chunks]
        for chunk, found in zip(chunks, routers, strict=True):
            refuse_unsafe(innermost(chunk).config)
            self._require_layers(chunk, found)
        for number, router in (pair for found in routers for pair in found.items()):
            self._require_router(number, router)
        for number, router in (pair for found in routers for pair in found.items()):
            self._bind(number, router)
        self._layers_of = [sorted(found) for found in routers]
        self.local_layers = sorted(number for found in routers for number in found)

    def _require_layers(self, chunk: nn.Module, found: dict[int, Any]) -> None:
        unknown, without = sorted(set(found) - set(self.layers)), layers_without_router(chunk, self.layers, found)
        if unknown or without:
            raise T1Error(
                f"layers {sorted(found)} of this chunk have routers; by the model's configuration layers {self.layers} "
                "of the whole model have experts",
                where="moe_layer_freq" if not without else f"layers {without} without a router",
                remedy="give exactly the MoE layers a place in moe_layer_freq, or name them in `layers`",
            )

    def _require_router(self, number: int, router: Any) -> None:
        where = f"router of layer {number}"
        if (router.config.num_moe_experts, router.topk) != (self.num_experts, self.top_k):
            raise T1Error(
                f"the router chooses {router.topk} of {router.config.num_moe_experts} experts, the routes hold "
                f"{self.top_k} of {self.num_experts}",
                where=where,
                remedy="replay rollouts of the same architecture",
            )
        if isinstance(router.router_replay, RouterSeam) and router.router_replay.owner is not None:
            raise T1Error(
                "the router belongs to another RoutingReplay", where=where, remedy="close() that one, or use it"
            )

    def _bind(self, number: int, router: Any) -> None:
        router.router_replay = seam = RouterSeam(self, number, self.layers.index(number))
        if ReplayedBalancing.needed(router, self.options):
            self._balancing.append((weakref.ref(router), ReplayedBalancing(router, seam, self.options)))

    # ------------------------------------------------------------------ what a trainer calls

    def run(self, chunk: nn.Module, slot: MicroBatchRoutes | None, forward: Callable[[], Output]) -> Output:
        """Run one micro-batch's forward of one chunk with its routes, and bind its backward to the same routes.

        Args:
            chunk: the chunk that `forward` calls.
            slot: the micro-batch's routes, rows in this rank's token order; ignored while `mode` is "off" and by
                models without MoE layers (which say so once).
            forward: runs the chunk and returns its output: a tensor, or a tuple, list or dict of them.

        Raises:
            T1Error: `slot` is missing, has another L, K or type, or (with options.check) rows that no router can take;
                or inside the model, when it has another number of rows; or a router didn't ask for its routes.
        """
        index = self._require_chunk(chunk)
        if not self.layers:
            self._warn_once(slot)
            return forward()
        if self.mode == "off":
            return self._run(NATIVE, forward)
        self._require_fitting(slot)
        if self.options.check:
            slot.check(self.num_experts, self.layers)
        device = next(self._chunks[index]().parameters()).device
        return self._run(slot.to(device), forward, self._layers_of[index])

    def record(self, chunk: nn.Module, forward: Callable[[], Output]) -> tuple[Output, Tensor]:
        """Run natively and return (output, routes [T, layers of this chunk, K] uint8 or uint16, in layer order).

        Each call's routes are its own, whatever ran before or runs between it and its backward. A recomputation in
        that backward reads them, so near ties can't flip between the two passes (Automodel#3156).
        """
        layers = self._layers_of[self._require_chunk(chunk)]
        recording = Recording()
        output = self._run(recording, forward, layers)
        dtype = route_dtype(self.num_experts)
        if not layers:
            return output, torch.empty(0, 0, self.top_k, dtype=dtype)
        return output, torch.stack([recording.indices[layer].to(dtype) for layer in layers], dim=1)

    @contextlib.contextmanager
    def native(self) -> Iterator[None]:
        """Within it every router routes natively, e.g. to measure what replay changes."""
        before, self.mode = self.mode, "off"
        try:
            yield
        finally:
            self.mode = before

    def layers_of(self, chunk: nn.Module) -> list[int]:
        """Global numbers of the MoE layers of one chunk, sorted."""
        return list(self._layers_of[self._require_chunk(chunk)])

    def take_load(self) -> dict[int, Tensor]:
        """Layer -> float64 [E]: how often each expert was taken by this rank's real tokens in replayed training passes
        since the last call (slime#2308). Needs options.load."""
        loads = {}
        for _, balancing in self._balancing:
            if balancing.load is not None:
                loads[balancing.seam.layer], balancing.load = balancing.load, None
        return loads

    def close(self) -> None:
        """Take this object off the routers; they route natively afterwards, as they were built."""
        for reference, balancing in self._balancing:
            if (router := reference()) is not None:
                balancing.detach(router)
        self._balancing = []
        for reference in self._chunks:
            chunk = reference()
            for module in () if chunk is None else chunk.modules():
                if isinstance(seam := getattr(module, "router_replay", None), RouterSeam) and seam.owner is self:
                    module.router_replay = None

    # ------------------------------------------------------------------ slots

    def current_slot(self, layer: int) -> Slot:
        """The routes for the router call that is running now.

        Raises:
            T1Error: replay is on and nobody said which micro-batch this is. Schedules that run layers later than the
                forward step end here, instead of with another micro-batch's routes.
        """
        again = recomputing()
        slot = self._backward if again else self._forward
        if slot is not None:
            if not again:
                self._asked.add(layer)
            return slot
        if self.mode == "off":
            return NATIVE
        phase = "recomputed in a backward" if again else "called in a forward"
        raise T1Error(
            f"the router of layer {layer} was {phase} that no routes were given for",
            where="RoutingReplay",
            remedy="run every forward step through RoutingReplay.run, or switch replay off for this pass",
        )

    def _run(self, slot: Slot, forward: Callable[[], Output], layers: Sequence[int] = ()) -> Output:
        if self._forward is not None:
            raise T1Error("a forward step of this model is running already", where="RoutingReplay.run")
        self._forward, self._asked = slot, set()
        try:
            output = forward()
        finally:
            self._forward = None
        silent = sorted(set(layers) - self._asked)
        if silent:
            raise T1Error(
                f"the forward passed the routers of layers {silent} by, or they didn't ask for routes",
                where="RoutingReplay",
                remedy="a schedule that runs layers later, or a router class or kernel of its own, can't be replayed; "
                "for a model whose layers were replaced after this object was made, make a new one",
            )
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter_backward(slot))
        return output

    def _enter_backward(self, slot: Slot) -> None:
        self._backward = slot
        # At the end of this backward pass the slot is emptied, so that a stray recomputation can't read it.
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        self._backward = None

    # ------------------------------------------------------------------ checks

    def _require_chunk(self, chunk: nn.Module) -> int:
        inner = innermost(chunk)
        for index, reference in enumerate(self._chunks):
            if reference() is inner:
                return index
        raise T1Error("this chunk isn't one of the model this RoutingReplay was made for", where="RoutingReplay")

    def _require_fitting(self, slot: MicroBatchRoutes | None) -> None:
        if slot is None:
            raise T1Error(
                "replay is on and this micro-batch has no routes",  # miles#407
                where="RoutingReplay.run",
                remedy="pass the recorded routes, or switch replay off for this pass",
            )
        dtype = route_dtype(self.num_experts)
        expected, found = (len(self.layers), self.top_k), tuple(slot.routes.shape[1:])
        if found != expected or slot.routes.dtype != dtype:
            raise T1Error(
                f"routes are {slot.routes.dtype} with [L, K] = {list(found)}, the model takes {dtype} with "
                f"{list(expected)}",
                where="RoutingReplay.run",
                remedy="replay rollouts of the same architecture; columns are all MoE layers of the model",
            )

    def _warn_once(self, slot: MicroBatchRoutes | None) -> None:
        if slot is not None and not self._warned:
            self._warned = True
            warnings.warn("the model has no MoE layers: there is nothing to replay", stacklevel=3)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, dict):
        output = list(output.values())
    return [part for part in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(part, Tensor)]
