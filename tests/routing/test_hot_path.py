"""What replay costs inside a router call: no wait for the device, and one layer's indices."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from megatron_t1.errors import T1Error
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.padding import padding_routes
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.routing.slot import MicroBatchRoutes, route_dtype
from tests.routing.stack import HostReads, PeakBytes, RouterStack, router_config

T, H = 256, 16


def stack_of(layers: int, num_experts: int = 64, top_k: int = 8) -> RouterStack:
    torch.manual_seed(0)
    return RouterStack(router_config(layers, num_experts, top_k, H))


def routes_of(stack: RouterStack, tokens: int = T) -> torch.Tensor:
    config = stack.config
    rows = padding_routes(tokens, config.num_layers, config.num_moe_experts, config.moe_router_topk)
    return torch.from_numpy(rows)


def hidden() -> torch.Tensor:
    return torch.randn(T, 1, H, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("load", [False, True])
def test_no_layer_waits_for_the_device(backend, masked, load):
    reads = {}
    for layers in (2, 6):
        stack = stack_of(layers)
        replay = RoutingReplay(stack, options=ReplayOptions(load=load))
        mask = torch.arange(T) % 3 > 0 if masked else None
        with HostReads() as counted:
            slot = MicroBatchRoutes(routes_of(stack), mask, valid=torch.arange(T) < 200)
            output = replay.run(stack, slot, lambda stack=stack: stack(hidden()))
            output.sum().backward()
            first = sum(counted.counts.values())
            replay.run(stack, slot, lambda stack=stack: stack(hidden())).sum().backward()
        reads[layers] = (first, sum(counted.counts.values()) - first)
    # Once for the mask where there is one, once for the check; nothing for each layer, nothing the second time.
    assert reads[2] == reads[6] == (1 + masked, 0)


def test_the_counter_sees_what_waits():
    with HostReads() as counted:
        x = torch.ones(3)
        bool(x.any()), x[x > 0], x.nonzero(), x.sum().item()
    assert counted.counts.total() >= 4


@pytest.mark.parametrize("masked", [False, True])
def test_memory_above_native_is_one_layers_indices(backend, masked):  # SkyRL#1910
    layers, top_k = 8, 8
    stack = stack_of(layers, top_k=top_k)
    replay = RoutingReplay(stack, options=ReplayOptions(check=False))
    slot = MicroBatchRoutes(routes_of(stack), torch.arange(T) % 3 > 0 if masked else None)
    peaks = {}
    for name, mode in {"native": "off", "replay": "replay"}.items():
        replay.mode = mode
        with PeakBytes() as memory:
            replay.run(stack, slot, lambda: stack(hidden())).sum().backward()
            stack.zero_grad()
        peaks[name] = memory.peak
    native_choice = T * top_k * (4 + 8) if masked else 0  # values and indices of the router's own top-k, one layer's
    assert peaks["replay"] - peaks["native"] <= T * top_k * 8 + native_choice + T
    assert peaks["native"] > 8 * T * 64 * 4  # the meter measures


def test_the_meter_forgets_what_is_freed():
    base = torch.zeros(1000)
    with PeakBytes() as memory:
        view = base[:10]
        for _ in range(5):
            view + 1.0
        kept = base + 1.0
    assert memory.peak == memory.alive == kept.numel() * 4
    assert len(view) == 10


@pytest.mark.parametrize("num_experts", [128, 256, 257, 512])
def test_every_expert_can_be_replayed(backend, num_experts):
    stack = stack_of(1, num_experts, 8)
    replay, routes = RoutingReplay(stack), routes_of(stack)
    assert routes.dtype == route_dtype(num_experts)
    assert int(routes.to(torch.int64).max()) == num_experts - 1
    probabilities = replay.run(stack, MicroBatchRoutes(routes), lambda: stack(hidden()))
    chosen = torch.zeros(T, num_experts, dtype=torch.bool).scatter(1, routes[:, 0].long(), True)
    assert torch.equal(probabilities > 0, chosen)
    again = replay.record(stack, lambda: stack(hidden()))[1]
    assert again.dtype == routes.dtype


@pytest.mark.parametrize("num_experts", [128, 256, 257, 512])
def test_rows_no_router_can_take_are_refused_where_they_enter(backend, num_experts):  # verl#4986
    stack = stack_of(3, num_experts, 8)
    replay = RoutingReplay(stack)

    def run(change, mask=None):
        routes = routes_of(stack).to(torch.int32)
        change(routes)
        slot = MicroBatchRoutes(routes.to(route_dtype(num_experts)), mask)
        return replay.run(stack, slot, lambda: stack(hidden()))

    for first in range(8):  # any two of a row
        for second in range(first):

            def repeat(routes, first=first, second=second):
                routes[71, 1, first] = routes[71, 1, second]

            with pytest.raises(T1Error, match="8 distinct ones") as caught:
                run(repeat)
            assert "row 71, layer 2" in caught.value.where
    if num_experts not in (256,):
        with pytest.raises(T1Error, match=f"of {num_experts} are needed"):
            run(lambda routes: routes[3, 2].__setitem__(0, num_experts))
    run(lambda routes: routes[71, 1].zero_(), mask=torch.arange(T) != 71)  # what isn't replayed may hold anything
    wrong = torch.int32 if num_experts <= 256 else torch.uint8
    with pytest.raises(T1Error, match="the model takes"):
        replay.run(stack, MicroBatchRoutes(routes_of(stack).to(wrong)), lambda: stack(hidden()))


def test_unchecked_rows_are_the_callers_affair(backend):
    stack = stack_of(2)
    replay = RoutingReplay(stack, options=ReplayOptions(check=False))
    routes = routes_of(stack)
    routes[5, 0] = 0
    replay.run(stack, MicroBatchRoutes(routes), lambda: stack(hidden()))


def test_slot_keeps_its_type_and_checks_once(backend):  # SkyRL#1910
    stack = stack_of(2)
    slot = MicroBatchRoutes(routes_of(stack))
    slot.check(64, [1, 2])
    slot.routes[0] = 0  # seen no more: the rows were checked
    slot.check(64, [1, 2])
    moved = slot.to(torch.device("meta"))
    assert moved.routes.dtype == torch.uint8 and moved.mask.device.type == "meta"
    moved.check(64, [1, 2])  # nor there, where it would have to wait for the device
    with pytest.raises(T1Error, match="of 32 are needed"):
        slot.check(32, [1, 2])  # they were checked for another number of experts
    with pytest.raises(FrozenInstanceError):
        slot.mask = torch.zeros(T, dtype=torch.bool)  # a mask is read once, when the slot is made
    with pytest.raises(T1Error, match="don't belong together"):
        MicroBatchRoutes(routes_of(stack), torch.ones(T))
