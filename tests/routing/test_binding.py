"""Which routers a RoutingReplay belongs to, for how long, and what happens where there are none or others."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_t1.errors import T1Error
from megatron_t1.routing.binding import moe_layers
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.routing.slot import MicroBatchRoutes
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
from tests.tiny_model import tiny_config, tokens


def test_three_models_in_one_process_do_not_meet(backend):  # miles#2226 miles#2570
    actor, critic, reference = build(backend), build(backend), build(backend)
    replays = [replay_of(model) for model in (actor, critic)]
    assert [replay.local_layers for replay in replays] == [[1, 2, 3, 4]] * 2
    with replays[0].native():
        native = replays[0].run(actor, None, forward_of(actor, 1))
    routes = foreign_routes(32, 5)
    assert not torch.equal(replays[0].run(actor, slot_of(routes), forward_of(actor, 1)), native)
    assert torch.equal(forward_of(reference, 1)(), native)
    with pytest.raises(T1Error, match="isn't one of the model"):
        replays[1].run(actor, slot_of(routes), forward_of(actor, 1))


def test_model_can_be_freed_and_rebuilt(backend):  # miles#2570 verl#7340
    first = build(backend)
    replay, reference = replay_of(first), weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    replay.close()
    second, routes = build(backend), foreign_routes(32, 5)
    bound = replay_of(second)
    with bound.native():
        native = bound.run(second, None, forward_of(second, 1))
    assert not torch.equal(bound.run(second, slot_of(routes), forward_of(second, 1)), native)


def test_layers_replaced_after_binding_are_noticed(backend):  # miles#2570
    model, other = build(backend), build(backend)
    replay = replay_of(model)
    model.decoder.layers[2] = other.decoder.layers[2]
    with pytest.raises(T1Error, match=r"routers of layers \[3\]"):
        replay.run(model, slot_of(foreign_routes(32, 5)), forward_of(model, 1))
    with pytest.raises(T1Error, match=r"routers of layers \[3\]"):
        replay.record(model, forward_of(model, 1))
    replay.close()
    bound = replay_of(model)
    bound.run(model, slot_of(foreign_routes(32, 5)), forward_of(model, 1))


def test_one_model_has_one_replay(backend):
    model = build(backend)
    first = RoutingReplay(model)
    with pytest.raises(T1Error, match="belongs to another RoutingReplay"):
        RoutingReplay(model)
    first.close()
    second = RoutingReplay(model)
    del second  # dropped without close(): its routers don't go back to native routing in silence
    gc.collect()
    with pytest.raises(T1Error, match="was dropped without close"):
        forward_of(model, 1)()
    RoutingReplay(model).close()
    forward_of(model, 1)()


@pytest.mark.parametrize(
    "balancing",
    [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
        {"moe_z_loss_coeff": 0.1},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ],
    ids=["aux", "z", "bias"],
)
def test_model_of_a_dropped_replay_can_be_bound_anew(backend, balancing):  # miles#2570
    model = build(backend, **balancing)
    untouched = set(vars(model.decoder.layers[0].mlp.router))
    options = ReplayOptions(aux_loss="taken", z_loss="off", load=True)
    first = RoutingReplay(model, options=options)
    del first
    gc.collect()
    second = RoutingReplay(model)
    second.run(model, slot_of(foreign_routes(32, 5)), forward_of(model, 1)).mean().backward()
    found = gradients(model)
    second.close()
    for layer in model.decoder.layers:  # nothing of either is left
        router = layer.mlp.router
        assert not router._forward_hooks and not router._forward_pre_hooks
        assert set(vars(router)) == untouched
    fresh = build(backend, **balancing)
    RoutingReplay(fresh).run(fresh, slot_of(foreign_routes(32, 5)), forward_of(fresh, 1)).mean().backward()
    assert_equal(found, gradients(fresh))


def test_what_is_no_model_is_named_and_nothing_is_bound(backend):
    model = build(backend, moe_z_loss_coeff=0.1)
    wrong = {
        "chunks are an empty list": lambda: RoutingReplay([]),
        "chunks are str": lambda: RoutingReplay(["model"]),
        "chunk is given twice": lambda: RoutingReplay([model, model]),
        "layers .* name a layer twice": lambda: RoutingReplay(model, layers=[1, 2, 3, 4, 4]),
        "options are a dict": lambda: RoutingReplay(model, options={"aux_loss": "off"}),
    }
    for message, make in wrong.items():
        with pytest.raises(T1Error, match=message):
            make()
        assert model.decoder.layers[0].mlp.router.router_replay is None
    replay = RoutingReplay(model)
    for mode in ("record", "Off", None):
        with pytest.raises(T1Error, match="it is one of off, replay"):
            replay.mode = mode
    assert replay.mode == "replay"
    with pytest.raises(T1Error, match="routes are a Tensor"):
        replay.run(model, foreign_routes(32, 5), forward_of(model, 1))


def test_router_that_never_asks_is_noticed(backend):
    model = build(backend)
    router = model.decoder.layers[1].mlp.router
    replay = replay_of(model)

    class Own(type(router)):
        def routing(self, logits, *_, **__):
            logits = logits.view(-1, self.config.num_moe_experts)
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(self.topk).indices, True)
            return logits.softmax(-1) * chosen, chosen

    router.__class__ = Own
    with pytest.raises(T1Error, match=r"routers of layers \[2\].*didn't ask"):
        replay.run(model, slot_of(foreign_routes(32, 5)), forward_of(model, 1))


def test_dense_first_model_maps_layers_to_moe_columns(backend):  # verl#5452
    model = build(backend, moe_layer_freq=[0, 1, 1, 1])
    replay = replay_of(model)
    assert replay.layers == replay.local_layers == replay.layers_of(model) == [2, 3, 4]
    with torch.no_grad():
        native, routes = replay.record(model, forward_of(model, 1))
    assert routes.shape == (32, 3, K)
    assert torch.equal(replay.run(model, slot_of(routes), forward_of(model, 1)), native)


def test_pattern_that_disagrees_with_the_modules_is_refused(backend):
    model = build(backend, moe_layer_freq=[0, 1, 0, 1])
    for pattern in ([0, 1, 1, 1], [0, 0, 0, 1]):
        model.config.moe_layer_freq = pattern
        with pytest.raises(T1Error, match=r"layers \[2, 4\] of this chunk have routers"):
            RoutingReplay(model)
    replay = RoutingReplay(model, layers=[4, 2])  # a hybrid model's pattern is known to its maker only
    assert replay.layers == [2, 4]
    assert replay.record(model, forward_of(model, 1))[1].shape == (32, 2, K)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"num_moe_experts": None}, []),
        ({"num_moe_experts": 8, "moe_layer_freq": 1}, [1, 2, 3, 4, 5, 6]),
        ({"num_moe_experts": 8, "moe_layer_freq": 2}, [1, 3, 5]),
        ({"num_moe_experts": 8, "moe_layer_freq": [0, 0, 1, 1, 1, 1]}, [3, 4, 5, 6]),
    ],
)
def test_moe_layers(options, layers):
    assert moe_layers(SimpleNamespace(**{"num_layers": 6, "moe_layer_freq": 1, **options})) == layers


def test_model_without_experts_has_nothing_to_replay(backend):  # vllm#42593 verl#7106 verl#7805
    model = build(backend, num_moe_experts=None, moe_ffn_hidden_size=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no MoE layers")
        replay = RoutingReplay(model)
        assert replay.layers == []
        expected = forward_of(model, 1)()
        assert torch.equal(replay.run(model, None, forward_of(model, 1)), expected)
        with replay.native():
            assert torch.equal(replay.run(model, None, forward_of(model, 1)), expected)
        output, routes = replay.record(model, forward_of(model, 1))
        assert torch.equal(output, expected) and routes.numel() == 0
    with warnings.catch_warnings(record=True) as caught:  # whoever passes routes is told, once
        warnings.simplefilter("always")
        for _ in range(3):
            replay.run(model, slot_of(foreign_routes(32, 5)), forward_of(model, 1))
    assert sum("no MoE layers" in str(warning.message) for warning in caught) == 1


def test_recording_survives_several_micro_batches(backend):  # Automodel#3156
    model = build(backend, "full")
    replay = replay_of(model)
    recorded = [replay.record(model, forward_of(model, seed)) for seed in (1, 2, 3)]
    with torch.no_grad():
        alone = [replay.record(model, forward_of(model, seed))[1] for seed in (1, 2, 3)]
    assert all(torch.equal(routes, expected) for (_, routes), expected in zip(recorded, alone, strict=True))
    for output, _ in (recorded[2], recorded[0], recorded[1]):
        output.square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    for seed in (3, 1, 2):
        with replay.native():
            replay.run(model, None, forward_of(model, seed)).square().sum().backward()
    assert_equal(found, gradients(model))


def test_routers_of_multi_token_prediction_stay_native(backend):  # Megatron-LM#7404 NeMo-RL#3903 NeMo-RL#4057
    from megatron.core.transformer.moe.router import TopKRouter

    from tests.matrix.mtp import EVEN_VOCABULARY, build_with_mtp

    (model,) = build_with_mtp(tiny_config(), backend, "policy")
    routers = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    mtp = [router for name, router in routers.items() if name.startswith("mtp")]
    assert len(routers) == L + 1 and len(mtp) == 1
    replay = replay_of(model)
    assert replay.local_layers == [1, 2, 3, 4] and mtp[0].router_replay is None

    maps, ids = {}, tokens(2, 16, 1, EVEN_VOCABULARY)
    for router in routers.values():
        router.register_forward_hook(lambda router, inputs, output: maps.__setitem__(router, (inputs[0], output[1])))
    options = {"labels": ids[0], "loss_mask": torch.ones(2, 16)}
    routes = foreign_routes(32, 5)
    replay.run(model, MicroBatchRoutes(routes), lambda: model(*ids, None, **options)).sum().backward()
    for column, router in enumerate(router for router in routers.values() if router not in mtp):
        expected = torch.zeros(32, E, dtype=torch.bool).scatter(1, routes[:, column].long(), True)
        assert torch.equal(maps[router][1], expected)
    hidden, chosen = maps[mtp[0]]
    own = (hidden.reshape(-1, hidden.shape[-1]) @ mtp[0].weight.T).topk(K).indices
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, own, True))
    assert mtp[0].weight.grad.any()
