"""The router computes in fp32 whatever the model's type: an engine whose gate works in bf16 then chooses otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_model import tiny_config, tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_router_logits_are_fp32(backend, dtype):  # prime-rl#2952 Automodel#3650
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_t1.model.build import build_model

    chunk = build_model(tiny_config(dtype=dtype), backend, "policy")[0].to(getattr(torch, dtype))
    seen = []
    for layer in chunk.decoder.layers:
        gating = layer.mlp.router.gating
        layer.mlp.router.gating = lambda x, gating=gating: seen.append((x.dtype, (out := gating(x)).dtype)) or out
    ids, positions = tokens(1, 12)
    ends = torch.tensor([0, 12], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=12, max_seqlen_kv=12)
    with torch.no_grad():
        chunk(ids, positions, None, packed_seq_params=packed)
    assert seen == [(getattr(torch, dtype), torch.float32)] * len(chunk.decoder.layers)


def test_the_router_computes_in_the_models_type_where_it_is_asked_to(backend):
    """`train.router_dtype=model`, as vLLM does."""
    from megatron_t1.training.batch import build_micro_batch
    from megatron_t1.training.engine import Engine
    from megatron_t1.training.passes import layout_sizes
    from tests.training.synthetic import samples

    config = tiny_config(dtype="bfloat16")
    config.train.router_dtype = "model"
    engine = Engine(config, backend, "policy", None, replay=False)
    seen = []
    for layer in engine.chunks[0].decoder.layers:
        gating = layer.mlp.router.gating
        layer.mlp.router.gating = lambda x, gating=gating: seen.append((out := gating(x)).dtype) or out
    batch = build_micro_batch(
        samples(2), layout_sizes=layout_sizes(sequence_parallel=False), route_shape=None, device=torch.device("cpu")
    )
    engine.record_routes([batch])
    engine.route_in("float32")
    engine.record_routes([batch])
    layers = len(engine.chunks[0].decoder.layers)
    assert seen == [torch.bfloat16] * layers + [torch.float32] * layers
