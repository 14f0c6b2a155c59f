"""Options under which replay would be bypassed are refused by name, in the spelling of every core from 0.13 to 0.19."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest

from megatron_t1.errors import ConfigError
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.routing.safety import refuse_unsafe, unsafe_options
from tests.routing.helpers import build

Part = Enum("Part", ["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full_iteration"])


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("moe_router_fusion", True, "moe_router_fusion"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"], "quantile_balancing"),
        ("overlap_moe_expert_parallel_comm", True, "overlap_moe_expert_parallel_comm"),
        ("moe_router_force_load_balancing", True, "moe_router_force_load_balancing"),
        ("moe_router_force_biased", 0.0, "moe_router_force_biased"),
        ("moe_expert_capacity_factor", 1.0, "moe_expert_capacity_factor"),
        ("moe_expert_rank_capacity_factor", 1.0, "moe_expert_rank_capacity_factor"),
        ("moe_enable_routing_replay", True, "moe_enable_routing_replay"),
        ("use_inference_optimized_layers", True, "use_inference_optimized_layers"),
        ("transformer_impl", "inference_optimized", "transformer_impl=inference_optimized"),
        ("enable_cuda_graph", True, "enable_cuda_graph"),
    ],
)
def test_unsafe_options_are_refused_by_name(backend, option, value, named):
    model = build(backend)
    setattr(model.config, option, value)
    with pytest.raises(ConfigError, match=named) as caught:
        RoutingReplay(model)
    assert caught.value.where == "TransformerConfig"
    assert model.decoder.layers[0].mlp.router.router_replay is None  # nothing was bound


def test_all_unsafe_options_are_listed_at_once():
    config = SimpleNamespace(moe_router_fusion=True, moe_router_load_balancing_type="sinkhorn", cuda_graph_impl="local")
    with pytest.raises(ConfigError) as caught:
        refuse_unsafe(config)
    text = str(caught.value)
    assert all(name in text for name in ("moe_router_fusion", "sinkhorn", "cuda_graph_impl=local"))


GRAPHS = {
    "0.13 whole layers": {"enable_cuda_graph": True, "cuda_graph_scope": "full"},
    "0.13 external": {"external_cuda_graph": True, "cuda_graph_scope": "full"},
    "0.15 local": {"enable_cuda_graph": True, "cuda_graph_impl": "local", "cuda_graph_scope": "full"},
    "0.15 iteration": {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
    "0.15 several": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"},
    "0.16 whole layers": {"cuda_graph_impl": "local", "cuda_graph_scope": []},
    "0.16 moe": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [Part.attn, Part.moe]},
    "0.16 router": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": [Part.moe_router, Part.moe_preprocess],
    },
    "0.17 iteration": {"cuda_graph_impl": "local", "cuda_graph_scope": [Part.full_iteration]},
    "0.18 whole layers": {"cuda_graph_impl": "local", "cuda_graph_modules": [], "cuda_graph_scope": None},
    "0.18 moe": {"cuda_graph_impl": "local", "cuda_graph_modules": [Part.moe], "cuda_graph_scope": None},
    "0.19 iteration": {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": [], "cuda_graph_scope": None},
}
NO_ROUTER = {
    "none": {"cuda_graph_impl": "none", "cuda_graph_scope": []},
    "0.13 none": {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_scope": "full"},
    "0.13 attention": {"external_cuda_graph": True, "cuda_graph_scope": "attn"},
    "0.15 attention": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"},
    "0.16 dense": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [Part.attn, Part.mlp]},
    "0.18 attention": {"cuda_graph_impl": "local", "cuda_graph_modules": [Part.attn], "cuda_graph_scope": None},
    "0.19 mamba": {"cuda_graph_impl": "local", "cuda_graph_modules": [Part.mamba, Part.attn], "cuda_graph_scope": None},
}


@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS)
def test_cuda_graphs_over_a_router_are_refused(options):
    (sentence,) = unsafe_options(SimpleNamespace(**options))
    assert "CUDA graphs over the router" in sentence and "cuda_graph" in sentence.split(":")[0]


@pytest.mark.parametrize("options", NO_ROUTER.values(), ids=NO_ROUTER)
def test_cuda_graphs_without_a_router_are_allowed(options):
    assert unsafe_options(SimpleNamespace(**options)) == []


def test_the_router_for_inference_is_refused(backend):
    router = pytest.importorskip("megatron.core.transformer.moe.router")
    if not hasattr(router, "InferenceTopKRouter"):
        pytest.skip("this core has no router for inference")
    model = build(backend)
    model.decoder.layers[0].mlp.router.__class__ = router.InferenceTopKRouter
    with pytest.raises(ConfigError, match="InferenceTopKRouter"):
        RoutingReplay(model)


def test_a_core_without_the_seam_is_named(backend):
    model = build(backend)
    del model.decoder.layers[0].mlp.router.router_replay
    with pytest.raises(ConfigError, match="doesn't ask anybody for routes") as caught:
        RoutingReplay(model)
    assert "t1 patch" in caught.value.remedy and "layers.0.mlp.router" in caught.value.where
