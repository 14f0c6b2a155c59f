"""Which forward a router call belongs to: the one that is running, or the one whose backward recomputes a layer.

Autograd numbers its nodes in the order in which a thread makes them. A forward's nodes are therefore one range of
numbers, and the node whose backward recomputes a layer says by its number which forward it is of, whatever else is
summed into the same backward (slime#951, AReaL#1166, Megatron-LM#2693). Nothing has to be put in order, and nothing is
left over by a backward that raised.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_t1.errors import T1Error
from megatron_t1.routing.slot import NATIVE, Slot


@dataclass(eq=False)
class Forward:
    """One forward of one chunk.

    Attributes:
        slot: what its router calls find, again when they are recomputed.
        trains: whether gradients were wanted when it began; a checkpointed layer can't tell by itself.
        first, end: its autograd nodes have numbers first <= n < end.
        asked: layers whose router has been called.
    """

    slot: Slot
    thread: int = field(default_factory=threading.get_ident)
    task: int = field(default_factory=torch._C._current_graph_task_id)
    trains: bool = field(default_factory=torch.is_grad_enabled)
    first: int = field(default_factory=torch._C._autograd._get_sequence_nr)
    end: int = 0
    asked: set[int] = field(default_factory=set)


class _Backward:
    """A backward pass (autograd's graph task) and the forwards whose outputs it has come to.

    Only the engine holds it, as a callback of the pass: it is gone with the pass, however that ended.
    """

    def __init__(self, task: int):
        self.task, self.thread = task, threading.get_ident()
        self.forwards: list[Forward] = []
        self.recomputed: Forward | None = None

    def __call__(self) -> None:
        """The engine calls it at the end of the pass; there is nothing left to do."""

    def forward_of_node(self) -> Forward | None:
        """The forward that made the node whose backward is running."""
        number = torch._C._current_autograd_node()._sequence_nr()
        self.recomputed = next((each for each in self.forwards if each.first <= number < each.end), None)
        return self.recomputed


class Forwards:
    """The forwards of one model, those that wait for their backward included."""

    def __init__(self):
        self.running: Forward | None = None
        self.closed = False
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()

    def run(self, slot: Slot, forward: Callable[[], Any]) -> tuple[Any, Forward]:
        """Run a forward whose router calls find `slot`, there and in its recomputations.

        Raises:
            T1Error: another one is running.
        """
        if self.running is not None:
            raise T1Error("a forward step of this model is running already", where="RoutingReplay.run")
        self.running = this = Forward(slot)
        try:
            output = forward()
        finally:
            self.running = None
        this.end = torch._C._autograd._get_sequence_nr()
        return output, this

    def bind(self, forward: Forward, output: Any, owner: Any) -> None:
        """Tell the backward of `output` (see `tensors_in`) which forward it is of; `owner` is kept until then."""

        def enter(_: Tensor, owner: Any = owner) -> None:
            self._enter_backward(forward)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(enter)

    def of_call(self) -> tuple[Forward | None, bool]:
        """(the forward a router call belongs to, if any is known; whether the call recomputes it).

        Raises:
            T1Error: a forward of this model is running in another thread.
        """
        running, task = self.running, torch._C._current_graph_task_id()
        if running is not None and running.task == task:
            if running.thread != threading.get_ident():
                raise T1Error(
                    "a forward of this model runs in another thread",
                    where="RoutingReplay",
                    remedy="one forward of a model at a time: its routers can't tell whose tokens they are given",
                )
            return running, False
        return (None, False) if task == -1 else (self._recomputed(task), True)

    def _recomputed(self, task: int) -> Forward | None:
        if (backward := self._backwards.get(task)) is not None:
            return backward.forward_of_node()
        # A checkpoint within a checkpoint: the inner one's nodes are new, those of the layer just recomputed.
        here = [each for each in self._backwards.values() if each.thread == threading.get_ident() and each.task < task]
        return max(here, key=lambda each: each.task).recomputed if here else None

    def _enter_backward(self, forward: Forward) -> None:
        if self.closed and forward.slot is not NATIVE:
            raise T1Error(
                "the RoutingReplay was closed between this forward and its backward, which may recompute layers",
                where="RoutingReplay.close",
                remedy="close it after the last backward",
            )
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            self._backwards[task] = backward = _Backward(task)
            torch.autograd.Variable._execution_engine.queue_callback(backward)
        backward.forwards.append(forward)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Tensors of an output: itself, or in tuples, lists, dicts and dataclasses of any depth."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for part in output.values() for tensor in tensors_in(part))
    elif isinstance(output, (tuple, list)):
        yield from (tensor for part in output for tensor in tensors_in(part))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from (tensor for each in dataclasses.fields(output) for tensor in tensors_in(getattr(output, each.name)))
