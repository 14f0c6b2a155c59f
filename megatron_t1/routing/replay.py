"""R3, rollout routing replay: a token takes the experts the sampler recorded, the probabilities stay the router's own.

A `RoutingReplay` belongs to one model. It puts an object of its own on every router's `router_replay` (the seam of
megatron-core 0.16 and later, which asks `get_replay_topk`), keyed by the global layer number. There is no process-wide
state and no queue: a router call finds its routes in one of two places, the slot of the forward step that is running,
or the slot of the micro-batch whose backward is running (activation recomputation), which a hook on that micro-batch's
output fills. So any order of forward and backward steps is right (slime#951, AReaL#1166, Megatron-LM#2693).

Multi-token-prediction routers keep their own routing: their layers are numbered from 1 again (Megatron-LM#7404).

Shapes: T tokens of this rank in the router's order (sequence-major, flattened), L MoE layers of the whole model in
global order, K experts per token, E experts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.routing.seam import RouterSeam
from megatron_t1.routing.slot import NATIVE, MicroBatchRoutes, Recording, Slot, route_dtype

Mode = Literal["off", "replay"]
Output = TypeVar("Output")


class RoutingReplay:
    """Replay and recording for one model, given as its pipeline chunks on this rank.

    Args:
        chunks: built model chunks, bare or wrapped (DDP, Float16Module). Only weak references to them are kept.
        num_experts, top_k: of the routes that will come; compared with the routers.

    Attributes:
        mode: "replay" (the start): a router call that finds no routes raises. "off": every router routes natively.
        layers: global numbers, from 1, of all MoE layers of the model; column i of the routes belongs to `layers[i]`.
        local_layers: those of this rank.

    Raises:
        ConfigError: this core has no seam, or an option of the model would bypass replay.
        T1Error: the routers aren't those of such a model.
    """

    def __init__(self, chunks: list[nn.Module], *, num_experts: int, top_k: int):
        from megatron_t1.routing.safety import refuse_unsafe

        self.num_experts, self.top_k = num_experts, top_k
        self.mode: Mode = "replay"
        self._forward: Slot | None = None
        self._backward: Slot | None = None
        self._chunks = [weakref.ref(_innermost(chunk)) for chunk in chunks]
        self._seams: list[dict[int, RouterSeam]] = []
        self.layers: list[int] = []
        for chunk in chunks:
            config = _innermost(chunk).config
            refuse_unsafe(config)
            self.layers = moe_layers(config)
            self._seams.append(self._bind(chunk))
        self.columns = {layer: column for column, layer in enumerate(self.layers)}
        self.local_layers = sorted(layer for seams in self._seams for layer in seams)
        unknown = sorted(set(self.local_layers) - set(self.layers))
        if unknown:
            raise T1Error(
                f"layers {unknown} have routers, and by the model's configuration only {self.layers} have experts",
                where="moe_layer_freq",
                remedy="give every MoE layer a place in moe_layer_freq, so that routes find their layer",
            )

    def _bind(self, chunk: nn.Module) -> dict[int, RouterSeam]:
        from megatron.core.transformer.moe.router import TopKRouter

        seams: dict[int, RouterSeam] = {}
        for name, module in chunk.named_modules():
            if not isinstance(module, TopKRouter) or _is_mtp(name):
                continue
            if not hasattr(module, "router_replay"):
                raise ConfigError(
                    "this megatron-core's router doesn't ask anybody for routes",
                    where=name,
                    remedy="use megatron-core 0.16 or later, whose router has `router_replay`",
                )
            number = module.layer_number
            if number is None or number in seams:
                raise T1Error(f"two routers (or one without) have layer number {number}", where=name)
            if (module.config.num_moe_experts, module.topk) != (self.num_experts, self.top_k):
                raise T1Error(
                    f"the router chooses {module.topk} of {module.config.num_moe_experts} experts, the routes hold "
                    f"{self.top_k} of {self.num_experts}",
                    where=name,
                    remedy="replay rollouts of the same architecture",
                )
            seams[number] = module.router_replay = RouterSeam(self, number)
        return seams

    # ------------------------------------------------------------------ what a trainer calls

    def run(self, chunk: nn.Module, slot: MicroBatchRoutes | None, forward: Callable[[], Output]) -> Output:
        """Run one micro-batch's forward of one chunk with its routes, and bind its backward to the same routes.

        Args:
            chunk: the chunk that `forward` calls.
            slot: the micro-batch's routes, rows in this rank's token order; ignored while `mode` is "off".
            forward: runs the chunk and returns its output tensor.

        Raises:
            T1Error: `slot` is missing or has other layers or K; or inside the model, when its rows don't fit.
        """
        if self.mode == "off":
            return self._run(NATIVE, forward)
        device = next(self._chunks[self._require_chunk(chunk)]().parameters()).device
        if slot is None:
            raise T1Error(
                "replay is on and this micro-batch has no routes",  # miles#407
                where="RoutingReplay.run",
                remedy="pass the recorded routes, or switch replay off for this pass",
            )
        if slot.routes.shape[1:] != (len(self.layers), self.top_k):
            raise T1Error(
                f"routes have [L, K] = {list(slot.routes.shape[1:])}, the model [{len(self.layers)}, {self.top_k}]",
                where="RoutingReplay.run",
                remedy="replay rollouts of the same architecture; columns are all MoE layers of the model",
            )
        return self._run(slot.to(device), forward)

    def record(self, chunk: nn.Module, forward: Callable[[], Output]) -> tuple[Output, Tensor]:
        """Run natively and return (output, routes [T, layers of this chunk, K] uint8 or uint16, in layer order).

        A recomputation in this micro-batch's backward reads the recorded routes, so near ties can't flip between the
        two passes (Automodel#3156).
        """
        layers = self.layers_of(chunk)
        recording = Recording(self.columns)
        output = self._run(recording, forward)
        missing = [layer for layer in layers if layer not in recording.indices]
        if missing:
            raise T1Error(f"the forward didn't pass the routers of layers {missing}", where="RoutingReplay.record")
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
        return sorted(self._seams[self._require_chunk(chunk)])

    def close(self) -> None:
        """Take this object off the routers; they route natively afterwards."""
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
        # Inside a backward pass a forward is a recomputation; true on the engine's own threads too.
        recomputing = torch._C._current_graph_task_id() != -1
        slot = self._backward if recomputing else self._forward
        if slot is not None:
            return slot
        if self.mode == "off":
            return NATIVE
        phase = "recomputed in a backward" if recomputing else "called in a forward"
        raise T1Error(
            f"the router of layer {layer} was {phase} that no routes were given for",
            where="RoutingReplay",
            remedy="run every forward step through RoutingReplay.run, or switch replay off for this pass",
        )

    def _run(self, slot: Slot, forward: Callable[[], Output]) -> Output:
        if self._forward is not None:
            raise T1Error("a forward step of this model is running already", where="RoutingReplay.run")
        self._forward = slot
        try:
            output = forward()
        finally:
            self._forward = None
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter_backward(slot))
        return output

    def _enter_backward(self, slot: Slot) -> None:
        self._backward = slot
        # At the end of this backward pass the slot is emptied, so that a stray recomputation can't read it.
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        self._backward = None

    def _require_chunk(self, chunk: nn.Module) -> int:
        inner = _innermost(chunk)
        for index, reference in enumerate(self._chunks):
            if reference() is inner:
                return index
        raise T1Error("this chunk isn't one of the model this RoutingReplay was made for", where="RoutingReplay")


def moe_layers(config: Any) -> list[int]:
    """Global numbers, from 1, of the decoder layers with experts, from Megatron's configuration (verl#5452)."""
    if not config.num_moe_experts:
        return []
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(config.num_layers)]
    return [number + 1 for number, has_experts in enumerate(pattern) if has_experts]


def _is_mtp(name: str) -> bool:
    return "mtp" in name.split(".")


def _innermost(chunk: nn.Module) -> nn.Module:
    """The model inside DDP or Float16Module."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk
