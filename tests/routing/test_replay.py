"""Forward, backward and recomputation take the routes of their own micro-batch, or say that there are none."""

from __future__ import annotations

import pytest
import torch

from megatron_t1.errors import T1Error
from tests.routing.helpers import (
    E,
    K,
    L,
    assert_equal,
    build,
    foreign_routes,
    forward_of,
    gradients,
    replay_of,
    slot_of,
)


@pytest.mark.parametrize("recompute", ["none", "full", "moe"])
def test_replay_of_own_routes_is_bitwise_native(backend, recompute):
    model = build(backend, recompute)
    native = forward_of(model, 1)()
    native.square().sum().backward()
    native_gradients = gradients(model)

    replay = replay_of(model)
    with torch.no_grad():
        recorded, routes = replay.record(model, forward_of(model, 1))
    assert torch.equal(recorded, native)
    assert routes.dtype == torch.uint8 and routes.shape == (32, L, K)

    model.zero_grad()
    replayed = replay.run(model, slot_of(routes), forward_of(model, 1))
    replayed.square().sum().backward()
    assert torch.equal(replayed, native)
    assert_equal(gradients(model), native_gradients)


def test_foreign_routes_are_taken_in_the_routers_token_order(backend):
    model, seen = build(backend), {}
    for layer in model.decoder.layers:
        layer.mlp.router.register_forward_hook(
            lambda router, _, output: seen.__setitem__(router.layer_number, output[1])
        )
    replay, routes = replay_of(model), foreign_routes(32, 5)
    replay.run(model, slot_of(routes), forward_of(model, 1))
    for column, number in enumerate(replay.layers):
        expected = torch.zeros(32, E, dtype=torch.bool).scatter(1, routes[:, column].long(), True)
        assert torch.equal(seen[number], expected)


def test_rows_without_routes_take_native_experts(backend):  # vllm#39568
    model = build(backend)
    replay = replay_of(model)
    with torch.no_grad():
        native, own = replay.record(model, forward_of(model, 1))
    garbage = torch.full_like(own, 255)
    mask = torch.zeros(32, dtype=torch.bool)
    nothing_replayed = replay.run(model, slot_of(garbage, mask), forward_of(model, 1))
    assert torch.equal(nothing_replayed, native)
    mask[::2] = True
    mixed = torch.where(mask[:, None, None], own, garbage)
    assert torch.equal(replay.run(model, slot_of(mixed, mask), forward_of(model, 1)), native)


@pytest.mark.parametrize("recompute", ["full", "moe"])
def test_micro_batches_in_flight_with_recomputation(backend, recompute):  # slime#951 AReaL#1166 Megatron-LM#2693
    routes = [foreign_routes(32, seed) for seed in (11, 12, 13)]

    def train(model):
        replay = replay_of(model)
        with torch.no_grad():  # a log-prob pass before training leaves nothing behind
            replay.run(model, slot_of(foreign_routes(32, 99)), forward_of(model, 9))
        outputs = [replay.run(model, slot_of(r), forward_of(model, i)) for i, r in enumerate(routes[:2])]
        outputs[0].square().sum().backward()
        outputs.append(replay.run(model, slot_of(routes[2]), forward_of(model, 2)))
        outputs[2].square().sum().backward()
        outputs[1].square().sum().backward()
        return gradients(model)

    assert_equal(train(build(backend, recompute)), train(build(backend, "none")))


def test_router_call_without_routes_raises(backend):  # miles#407
    model = build(backend)
    replay = replay_of(model)
    with pytest.raises(T1Error, match="router of layer 1"):
        forward_of(model, 1)()
    with pytest.raises(T1Error, match="no routes"):
        replay.run(model, None, forward_of(model, 1))
    with replay.native():
        native = forward_of(model, 1)()
    assert replay.mode == "replay"
    replay.close()
    assert torch.equal(forward_of(model, 1)(), native)


def test_recomputation_of_a_forward_that_replay_did_not_see_raises(backend):
    model = build(backend, "full")
    replay = replay_of(model)
    with replay.native():
        output = forward_of(model, 1)()
    replay.run(model, slot_of(foreign_routes(32, 5)), forward_of(model, 1)).sum().backward()
    with pytest.raises(T1Error, match="recomputed in the backward"):
        output.sum().backward()


def test_native_pass_through_run_recomputes_natively_whatever_the_mode(backend):
    model, reference = build(backend, "full"), build(backend, "none")
    replay = replay_of(model)
    with replay.native():
        output = replay.run(model, None, forward_of(model, 1))
    output.square().sum().backward()
    forward_of(reference, 1)().square().sum().backward()
    assert_equal(gradients(model), gradients(reference))


@pytest.mark.parametrize(
    ("shape", "message"), [((31, L, K), "31 rows"), ((32, L - 1, K), r"\[L, K\]"), ((32, L, K + 1), r"\[L, K\]")]
)
def test_routes_of_another_shape_raise(backend, shape, message):
    model = build(backend)
    replay = replay_of(model)
    with pytest.raises(T1Error, match=message):
        replay.run(model, slot_of(torch.arange(shape[-1], dtype=torch.uint8).expand(shape)), forward_of(model, 1))
    with replay.native():  # the failed forward left no slot behind
        replay.run(model, None, forward_of(model, 1))


def test_router_gradient_equals_autograd_reference(backend):  # Megatron-LM#79
    model = build(backend)
    captured = {}
    router = model.decoder.layers[0].mlp.router
    router.register_forward_hook(lambda _, inputs, output: captured.update(hidden=inputs[0], probs=output[0]))
    routes = foreign_routes(32, 5)
    replay_of(model).run(model, slot_of(routes), forward_of(model, 1))
    weights = torch.randn(32, E, generator=torch.Generator().manual_seed(2))
    (ours,) = torch.autograd.grad((captured["probs"] * weights).sum(), router.weight)

    weight = router.weight.detach().clone().requires_grad_()
    logits = captured["hidden"].detach().reshape(32, -1) @ weight.T
    chosen = routes[:, 0].long()
    probabilities = torch.softmax(logits, dim=-1).gather(1, chosen)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    (reference,) = torch.autograd.grad((probabilities * weights.gather(1, chosen)).sum(), weight)
    assert ours.abs().max() > 0
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_near_ties_do_not_flip_between_forward_and_recomputation(backend):  # Automodel#3156
    model = build(backend, "full")
    mlp = model.decoder.layers[1].mlp
    mlp.router.weight.data.zero_()  # all experts tie
    output, routes = replay_of(model).record(model, forward_of(model, 1))
    loser = min(set(range(E)) - set(routes[:, 1].flatten().tolist()))
    mlp.router.weight.data[loser].fill_(1e-3)  # a native recomputation would now choose this one for some tokens
    output.square().sum().backward()
    gradient = mlp.experts.local_experts[loser].linear_fc1.weight.grad
    assert gradient is None or gradient.abs().sum() == 0
