"""Which layers a hybrid model is built of, on CPU and by core's own spec for a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_t1.errors import ConfigError
from tests.hybrid_model import HYBRID
from tests.tiny_model import tiny_config


def test_every_fourth_layer_attends_and_all_have_a_shared_expert(backend):
    from megatron.core.transformer.attention import SelfAttention

    from megatron_t1.model.build import build_model
    from megatron_t1.model.delta_net import DeltaNet

    (model,) = build_model(tiny_config(architecture=HYBRID), backend, "value")
    kinds = [type(layer.self_attention) for layer in model.decoder.layers]
    assert kinds == [DeltaNet, DeltaNet, DeltaNet, SelfAttention]
    assert all(layer.mlp.shared_experts.gate_weight.shape == (1, 32) for layer in model.decoder.layers)
    heads, head = HYBRID.num_attention_heads, HYBRID.head_dim
    assert model.decoder.layers[3].self_attention.linear_qkv.weight.shape[0] == (2 * heads + 4) * head  # gates too
    assert model.rotary_pos_emb.inv_freq.shape == (int(head * HYBRID.partial_rotary_factor) // 2,)
    assert model.decoder.final_layernorm.weight.abs().max() == 0  # multiplies by 1 + weight


def test_the_spec_for_a_gpu_is_cores_own_with_our_delta_net_and_needs_fla(backend, monkeypatch):
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.ssm import gated_delta_net as core

    from megatron_t1.model import delta_net

    attention = SimpleNamespace(module=core.GatedDeltaNet)
    full = SimpleNamespace(module=object)
    layers = [SimpleNamespace(submodules=SimpleNamespace(self_attention=one)) for one in (attention, attention, full)]
    name = "get_transformer_block_with_experimental_attention_variant_spec"
    monkeypatch.setattr(specs, name, lambda config, **_: SimpleNamespace(layer_specs=layers))
    monkeypatch.setattr(core, "HAVE_FLA", True)
    spec = delta_net.fused_layer_spec(SimpleNamespace(), None)
    assert [layer.submodules.self_attention.module for layer in spec.layer_specs] == [
        delta_net.DeltaNet,
        delta_net.DeltaNet,
        object,
    ]
    monkeypatch.setattr(core, "HAVE_FLA", False)
    with pytest.raises(ConfigError, match="flash-linear-attention"):
        delta_net.fused_layer_spec(SimpleNamespace(), None)
