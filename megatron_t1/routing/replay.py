"""R3, rollout routing replay: a token takes the experts the sampler recorded, the probabilities stay the router's own.

A `RoutingReplay` belongs to one model. It puts an object of its own on every router's `router_replay` (the seam of
megatron-core 0.16 and later, which asks `get_replay_topk`), keyed by the global layer number. There is no process-wide
state and no queue: a router call finds its routes by the forward it belongs to, the one that is running or the one that
is being recomputed (`forwards`), so any order of forward and backward steps is right.

Shapes: T tokens of this rank in the router's order (sequence-major, flattened), L MoE layers of the whole model in
global order, K experts per token, E experts.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_t1.errors import T1Error
from megatron_t1.routing.balancing import ReplayedBalancing
from megatron_t1.routing.binding import decoder_routers, innermost, layers_without_router, moe_layers
from megatron_t1.routing.forwards import Forwards
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.safety import refuse_unsafe
from megatron_t1.routing.seam import RouterSeam
from megatron_t1.routing.slot import NATIVE, MicroBatchRoutes, Recording, Slot, route_dtype

MODES = ("off", "replay")
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
        layers: as given or found; column i of the routes belongs to `layers[i]`. Empty: there is nothing to replay.
        local_layers: those of this rank.

    Raises:
        ConfigError: this core has no seam, or an option of the model would bypass replay.
        T1Error: the routers aren't those of such a model, or belong to another RoutingReplay; nothing is bound then.
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
        _require_chunks(chunks)
        config = innermost(chunks[0]).config
        self.num_experts = num_experts if num_experts is not None else config.num_moe_experts or 0
        self.top_k = top_k if top_k is not None else config.moe_router_topk
        self.layers = sorted(layers) if layers is not None else moe_layers(config)
        if len(set(self.layers)) != len(self.layers):
            raise T1Error(f"layers {self.layers} name a layer twice", where="RoutingReplay")
        self.options = ReplayOptions() if options is None else options
        if not isinstance(self.options, ReplayOptions):
            raise T1Error(f"options are a {type(options).__name__}, expected ReplayOptions", where="RoutingReplay")
        self._mode = "replay"
        self._warned = False
        self._forwards = Forwards()
        self._chunks = [weakref.ref(innermost(chunk)) for chunk in chunks]
        routers = [decoder_routers(chunk) for chunk in chunks]
        for chunk, found in zip(chunks, routers, strict=True):
            refuse_unsafe(innermost(chunk).config)
            self._require_layers(chunk, found)
        pairs = [pair for found in routers for pair in found.items()]
        self._layers_of = [sorted(found) for found in routers]
        self.local_layers = sorted(number for number, _ in pairs)
        if len(set(self.local_layers)) != len(self.local_layers):
            raise T1Error(f"layers {self.local_layers} of the chunks repeat", where="RoutingReplay")
        for number, router in pairs:
            self._require_router(number, router)
        self._routers = [weakref.ref(router) for _, router in pairs]
        for number, router in pairs:
            self._bind(number, router)

    @property
    def mode(self) -> str:
        """What routers do: in "replay" (the start) a call that finds no routes raises; in "off" all route natively.

        Raises:
            T1Error: when it is set to anything else.
        """
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise T1Error(f"mode is {mode!r}", where="RoutingReplay.mode", remedy=f"it is one of {', '.join(MODES)}")
        self._mode = mode

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
        if isinstance(router.router_replay, RouterSeam):
            router.router_replay.detach(router)  # of an object that was dropped without close()
        router.router_replay = seam = RouterSeam(self, number, self.layers.index(number))
        if ReplayedBalancing.needed(router, self.options):
            seam.balancing = ReplayedBalancing(router, seam, self.options)

    # ------------------------------------------------------------------ what a trainer calls

    def run(self, chunk: nn.Module, slot: MicroBatchRoutes | None, forward: Callable[[], Output]) -> Output:
        """Run one micro-batch's forward of one chunk with its routes, and bind its backward to the same routes.

        Args:
            chunk: the chunk that `forward` calls.
            slot: the micro-batch's routes, rows in this rank's token order; ignored while `mode` is "off" and by
                models without MoE layers (which say so once).
            forward: runs the chunk, once, and returns its output: a tensor, or tuples, lists, dicts and dataclasses of
                them. A backward that starts elsewhere finds no routes for a recomputation, and raises.

        Raises:
            T1Error: `slot` is missing, has another L, K or type, or (with options.check) rows that no router can take;
                or inside the model, when it has another number of rows; a router didn't ask for its routes, or asked
                twice; or this object is closed.
        """
        index = self._require_chunk(chunk)
        if not self.layers:
            self._warn_once(slot)
            return forward()
        if self._mode == "off":
            return self._run(NATIVE, forward)
        self._require_open()
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
        self._require_open()
        recording = Recording()
        output = self._run(recording, forward, layers)
        dtype = route_dtype(self.num_experts)
        if not layers:
            return output, torch.empty(0, 0, self.top_k, dtype=dtype)
        return output, torch.stack([recording.indices[layer].to(dtype) for layer in layers], dim=1)

    @contextlib.contextmanager
    def native(self) -> Iterator[None]:
        """Within it every router routes natively, e.g. to measure what replay changes.

        A forward whose backward comes later goes through `run` here too: recomputed after the block, a bare one is of
        no known forward, and raises.
        """
        before, self._mode = self._mode, "off"
        try:
            yield
        finally:
            self._mode = before

    def layers_of(self, chunk: nn.Module) -> list[int]:
        """Global numbers of the MoE layers of one chunk, sorted."""
        return list(self._layers_of[self._require_chunk(chunk)])

    def take_load(self) -> dict[int, Tensor]:
        """Layer -> float64 [E]: how often each expert was taken by this rank's real tokens in replayed training passes
        since the last call (slime#2308). Needs options.load."""
        loads = {}
        for seam in self._seams():
            if seam.balancing is not None and seam.balancing.load is not None:
                loads[seam.layer], seam.balancing.load = seam.balancing.load, None
        return loads

    def close(self) -> None:
        """Take this object off the routers; they route natively afterwards, as they were built.

        A backward that is still to come would recompute layers natively: it raises instead.
        """
        for reference in self._routers:
            if (router := reference()) is not None and self._owns(router):
                router.router_replay.detach(router)
        self._forwards.closed = True

    def _owns(self, router: nn.Module) -> bool:
        seam = getattr(router, "router_replay", None)
        return isinstance(seam, RouterSeam) and seam.owner is self

    def _seams(self) -> Iterator[RouterSeam]:
        routers = (reference() for reference in self._routers)
        return (router.router_replay for router in routers if router is not None and self._owns(router))

    # ------------------------------------------------------------------ what a router call finds

    def current_slot(self, layer: int, *, asking: bool = False) -> Slot:
        """The routes for the router call that is running now.

        Args:
            asking: the call takes its experts from them, which happens once in a forward.

        Raises:
            T1Error: replay is on and nobody said which micro-batch this is. Schedules that run layers later than the
                forward step end here, instead of with another micro-batch's routes. Or the layer was called twice.
        """
        forward, again = self._forwards.of_call()
        if forward is None:
            return self._without_forward(layer, again)
        if asking and not again:
            if layer in forward.asked and forward.slot is not NATIVE:
                raise T1Error(
                    f"the router of layer {layer} was called twice in one forward",
                    where="RoutingReplay.run",
                    remedy="run the model once in a forward, each time with the routes of that micro-batch",
                )
            forward.asked.add(layer)
        return forward.slot

    def _without_forward(self, layer: int, again: bool) -> Slot:
        if self._mode == "off":
            return NATIVE
        phase = "recomputed in the backward of a forward" if again else "called in a forward"
        raise T1Error(
            f"the router of layer {layer} was {phase} that no routes were given for",
            where="RoutingReplay",
            remedy="run every forward step through RoutingReplay.run, within native() too where layers are recomputed, "
            "and return what its backward starts from; or switch replay off",
        )

    def in_training_forward(self) -> bool:
        """Whether the router call that is running now is the first of its layer in a forward with gradients."""
        forward, again = self._forwards.of_call()
        return forward is not None and forward.trains and not again

    def _run(self, slot: Slot, forward: Callable[[], Output], layers: Sequence[int] = ()) -> Output:
        output, done = self._forwards.run(slot, forward)
        silent = sorted(set(layers) - done.asked)
        if silent:
            raise T1Error(
                f"the forward passed the routers of layers {silent} by, or they didn't ask for routes",
                where="RoutingReplay",
                remedy="a schedule that runs layers later, or a router class or kernel of its own, can't be replayed; "
                "for a model whose layers were replaced after this object was made, make a new one",
            )
        self._forwards.bind(done, output, owner=self)
        return output

    # ------------------------------------------------------------------ checks

    def _require_chunk(self, chunk: nn.Module) -> int:
        inner = innermost(chunk)
        for index, reference in enumerate(self._chunks):
            if reference() is inner:
                return index
        raise T1Error("this chunk isn't one of the model this RoutingReplay was made for", where="RoutingReplay")

    def _require_open(self) -> None:
        if self._forwards.closed:
            raise T1Error("this RoutingReplay is closed", where="RoutingReplay", remedy="make a new one of the model")

    def _require_fitting(self, slot: MicroBatchRoutes | None) -> None:
        if slot is None:
            raise T1Error(
                "replay is on and this micro-batch has no routes",  # miles#407
                where="RoutingReplay.run",
                remedy="pass the recorded routes, or switch replay off for this pass",
            )
        if not isinstance(slot, MicroBatchRoutes):
            raise T1Error(f"routes are a {type(slot).__name__}, expected MicroBatchRoutes", where="RoutingReplay.run")
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


def _require_chunks(chunks: Sequence[nn.Module]) -> None:
    other = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, nn.Module)]
    if not chunks or other:
        raise T1Error(
            f"chunks are {', '.join(other) or 'an empty list'}", where="RoutingReplay", remedy="give the built model"
        )
    if len({id(innermost(chunk)) for chunk in chunks}) != len(chunks):
        raise T1Error("the same chunk is given twice", where="RoutingReplay")
