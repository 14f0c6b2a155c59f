"""Load balancing and its statistics under replay: whose load counts, and only that of real tokens."""

from __future__ import annotations

import inspect

import pytest
import torch

from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.routing.slot import MicroBatchRoutes
from megatron_t1.training.batch import ReplayShape, build_micro_batch
from tests.routing.helpers import E, K, build, foreign_routes, forward_of, needs

T = 32
ONE_LAYER = {"moe_layer_freq": [1, 0, 0, 0]}  # later routers would send auxiliary gradients into the first one
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, **ONE_LAYER}
Z = {"moe_z_loss_coeff": 0.1, **ONE_LAYER}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", **ONE_LAYER}
VALID = torch.arange(T) % 4 != 3


pytestmark = pytest.mark.usefixtures("backend")


def router_of(model):
    return model.decoder.layers[0].mlp.router


def slot(valid: torch.Tensor | None = None, seed: int = 5) -> MicroBatchRoutes:
    return MicroBatchRoutes(foreign_routes(T, seed, layers=1), valid=valid)


def auxiliary_gradient(model, run) -> torch.Tensor:
    """The router's gradient from auxiliary losses alone: the main loss is multiplied by zero."""
    model.zero_grad()
    (run(forward_of(model, 1)).sum() * 0.0).backward()
    gradient = router_of(model).weight.grad
    return torch.zeros_like(router_of(model).weight) if gradient is None else gradient.clone()


def hidden_of(model) -> torch.Tensor:
    captured = []
    handle = router_of(model).register_forward_hook(lambda _, inputs, __: captured.append(inputs[0].detach()))
    with torch.no_grad():
        forward_of(model, 1)()
    handle.remove()
    return captured[0].reshape(T, -1)


def switch_loss(logits: torch.Tensor, chosen: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Switch Transformer, equation 4, times the tokens: coefficient * E * sum_i f_i P_i, f and P over real tokens."""
    tokens = valid.sum()
    load = torch.zeros_like(logits).scatter(1, chosen, 1.0)[valid].sum(0) / (tokens * K)
    return 0.1 * E * (load * logits.softmax(-1)[valid].mean(0)).sum() * tokens


def reference_gradient(model, loss) -> torch.Tensor:
    weight = router_of(model).weight.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(hidden_of(model) @ weight.T), weight)[0]


def needs_padding_mask(model) -> None:
    if "padding_mask" not in inspect.signature(type(router_of(model)).forward).parameters:
        pytest.skip("this core's router takes no padding mask; its auxiliary losses count padding")


@pytest.mark.parametrize("kind", ["native", "taken", "off"])
def test_load_balancing_loss_counts_what_the_option_says(backend, kind):
    model = build(backend, **AUX)
    native = auxiliary_gradient(model, lambda forward: forward())
    replay = RoutingReplay(model, options=ReplayOptions(aux_loss=kind))
    found = auxiliary_gradient(model, lambda forward: replay.run(model, slot(), forward))
    replay.close()
    assert native.abs().max() > 1e-4
    if kind == "native":
        assert torch.equal(found, native)
    elif kind == "off":
        assert not found.any()
    else:
        chosen = slot().routes[:, 0].long()
        expected = reference_gradient(model, lambda x: switch_loss(x, chosen, torch.ones(T, dtype=torch.bool)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(found, native, rtol=1e-2)
    assert torch.equal(auxiliary_gradient(model, lambda forward: forward()), native)  # close() left it as it was


@pytest.mark.parametrize("balancing", ["seq_aux_loss", "global_aux_loss"])
def test_other_load_balancing_losses_follow_the_option_too(backend, balancing):
    if balancing == "global_aux_loss":
        needs((0, 15), "global auxiliary loss")
    model = build(backend, **{**AUX, "moe_router_load_balancing_type": balancing})
    gradients = {}
    for kind in ("native", "taken", "off"):
        replay = RoutingReplay(model, options=ReplayOptions(aux_loss=kind))
        gradients[kind] = auxiliary_gradient(model, lambda forward, r=replay: r.run(model, slot(), forward))
        replay.close()
        if balancing == "global_aux_loss":
            router_of(model).reset_global_aux_loss_tracker()
    assert not gradients["off"].any() and gradients["native"].any()
    assert not torch.allclose(gradients["taken"], gradients["native"], rtol=1e-2)


@pytest.mark.parametrize("kind", ["native", "off"])
def test_z_loss_stays_unless_it_is_switched_off(backend, kind):
    model = build(backend, **Z)
    native = auxiliary_gradient(model, lambda forward: forward())
    replay = RoutingReplay(model, options=ReplayOptions(z_loss=kind))
    found = auxiliary_gradient(model, lambda forward: replay.run(model, slot(), forward))
    assert native.any() and (torch.equal(found, native) if kind == "native" else not found.any())


@pytest.mark.parametrize("kind", ["native", "taken"])
def test_auxiliary_loss_leaves_padding_out(backend, kind):  # Megatron-LM#5542
    model = build(backend, **AUX)
    needs_padding_mask(model)
    replay = RoutingReplay(model, options=ReplayOptions(aux_loss=kind))
    found = auxiliary_gradient(model, lambda forward: replay.run(model, slot(VALID), forward))
    replay.close()

    def loss(logits):
        chosen = slot().routes[:, 0].long() if kind == "taken" else logits.topk(K).indices
        return switch_loss(logits, chosen, VALID)

    # The router sees [s, b] flattened; the marks of `VALID` are rows of that.
    torch.testing.assert_close(found, reference_gradient(model, loss), rtol=1e-4, atol=1e-6)


def test_z_loss_leaves_padding_out(backend):  # Megatron-LM#5542
    model = build(backend, **Z)
    needs_padding_mask(model)
    replay = RoutingReplay(model)
    found = auxiliary_gradient(model, lambda forward: replay.run(model, slot(VALID), forward))
    replay.close()
    expected = reference_gradient(model, lambda logits: 0.1 * logits[VALID].logsumexp(-1).square().sum())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kind", ["native", "taken"])
@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_micro_batch_without_real_tokens_has_no_auxiliary_loss(backend, balancing, kind, per_token):
    model = build(backend, **{**AUX, "moe_router_load_balancing_type": balancing})
    needs_padding_mask(model)
    model.config.calculate_per_token_loss = router_of(model).calculate_per_token_loss = per_token
    attached = []
    attach = type(router_of(model)).attach_and_log_load_balancing_loss

    class Spied(type(router_of(model))):
        def attach_and_log_load_balancing_loss(self, activation, coefficient, loss, *args, **kwargs):
            attached.append(float(loss))
            return attach(self, activation, coefficient, loss, *args, **kwargs)

    router_of(model).__class__ = Spied
    replay = RoutingReplay(model, options=ReplayOptions(aux_loss=kind))
    nobody = torch.zeros(T, dtype=torch.bool)
    (replay.run(model, slot(nobody), forward_of(model, 1)).sum() * 0.0).backward()
    assert attached == [0.0]  # what is logged
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    one = nobody.clone()
    one[3] = True
    assert auxiliary_gradient(model, lambda forward: replay.run(model, slot(one), forward)).any()


def test_zero_weight_micro_batch_of_the_data_path_trains_nothing(backend):
    model = build(backend, "full", **AUX, moe_z_loss_coeff=0.1)
    needs_padding_mask(model)
    replay = RoutingReplay(model)
    sizes = {"context_size": 1, "context_rank": 0, "tensor_size": 1, "tensor_rank": 0, "sequence_parallel": False}
    shape = ReplayShape(num_moe_layers=1, num_experts=E, top_k=K, expert_parallel=1)
    batch = build_micro_batch([], layout_sizes=sizes, route_shape=shape, device=torch.device("cpu"))
    output = replay.run(model, batch.routes, lambda: model(batch.tokens, batch.position_ids, None))
    (output.sum() * 0.0).backward()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def counted(indices: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return torch.bincount(indices[valid].flatten().long(), minlength=E).float()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["frozen", "native", "taken"])
def test_expert_bias_moves_by_the_load_the_option_names(backend, kind, recompute):  # prime-rl#2953
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    model = build(backend, recompute, **BIAS)
    router, routes = router_of(model), slot().routes[:, 0]
    with torch.no_grad():
        router.expert_bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(4))
        scores = (hidden_of(model) @ router.weight.T).sigmoid() + router.expert_bias
    before = router.expert_bias.clone()
    replay = RoutingReplay(model, options=ReplayOptions(expert_bias=kind))
    replay.run(model, slot(VALID), forward_of(model, 1)).sum().backward()
    native = counted(scores.topk(K).indices, VALID)
    expected = {"frozen": torch.zeros(E), "native": native, "taken": counted(routes, VALID)}[kind]
    assert torch.equal(router.local_tokens_per_expert, expected)
    assert not torch.equal(native, counted(routes, VALID))
    moved = get_updated_expert_bias(router.local_tokens_per_expert[None], router.expert_bias[None], 1e-3)[0]
    assert torch.equal(moved, before) == (kind == "frozen")

    with replay.native():  # passes that aren't replayed are Megatron's own
        router.local_tokens_per_expert.zero_()
        replay.run(model, None, forward_of(model, 1)).sum().backward()
    assert torch.equal(router.local_tokens_per_expert, counted(scores.topk(K).indices, torch.ones(T, dtype=torch.bool)))


@pytest.mark.parametrize("recompute", ["none", "full", "moe"])
def test_load_counts_real_tokens_of_training_passes_once(backend, recompute):  # slime#2308 Megatron-LM#5542
    model = build(backend, recompute)
    replay = RoutingReplay(model, options=ReplayOptions(load=True))
    routes = [foreign_routes(T, seed) for seed in (1, 2)]
    model.eval()
    with torch.no_grad():
        replay.run(model, MicroBatchRoutes(routes[0], valid=VALID), forward_of(model, 1))
    model.train()
    for part in routes:
        replay.run(model, MicroBatchRoutes(part, valid=VALID), forward_of(model, 1)).sum().backward()
    with torch.no_grad():  # a score in train mode
        replay.run(model, MicroBatchRoutes(routes[0], valid=VALID), forward_of(model, 1))
    load = replay.take_load()
    assert list(load) == replay.layers
    for column, layer in enumerate(replay.layers):
        assert torch.equal(load[layer].float(), sum(counted(part[:, column], VALID) for part in routes))
    assert replay.take_load() == {}


@pytest.mark.parametrize("marked", [False, True])
def test_a_call_that_fails_leaves_the_router_as_it_was(backend, marked):
    model = build(backend, **{**AUX, **BIAS})
    replay = RoutingReplay(model)
    valid = torch.ones(31, dtype=torch.bool) if marked else None
    with pytest.raises(T1Error, match="31 rows"):
        replay.run(model, MicroBatchRoutes(foreign_routes(31, 5, layers=1), valid=valid), forward_of(model, 1))
    router = router_of(model)
    assert router.enable_expert_bias and router.router_replay.taken is None
    replay.close()
    assert router.router_replay is None and not router._forward_hooks and not router._forward_pre_hooks


def test_models_without_balancing_get_no_hooks(backend):
    model = build(backend)
    RoutingReplay(model)
    assert all(not layer.mlp.router._forward_hooks for layer in model.decoder.layers)


def test_unknown_choices_are_listed():
    with pytest.raises(ConfigError) as caught:
        ReplayOptions(aux_loss="none", expert_bias="thawed")
    assert "aux_loss='none'; known: native, taken, off" in str(caught.value)
    assert "expert_bias='thawed'" in str(caught.value)
