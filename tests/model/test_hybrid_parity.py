"""The hybrid model against transformers' Qwen3_5MoeForCausalLM in fp32, and what replay and bfloat16 make of it.

Why logits agree to 1e-4 only: docs/hybrid.md.
"""

from __future__ import annotations

import pytest
import torch

from tests.hybrid_model import HYBRID, write_hybrid
from tests.tiny_model import tiny_config

LENGTHS = (70, 5, 33)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "hf")


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import Qwen3_5MoeForCausalLM

    return Qwen3_5MoeForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def policy(backend, checkpoint):
    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import load_hf

    chunks = build_model(tiny_config(architecture=HYBRID), backend, "policy", initialize=False)
    load_hf(chunks, checkpoint, "policy")
    return chunks[0]


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, HYBRID.vocab_size, (length,), generator=generator) for length in LENGTHS]


def packed(model, ids):
    """Logits [t, V] of all sequences in one packed stream."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_t1.model.heads import loss_hidden, output_weight

    ends = torch.tensor([0, *map(len, ids)]).cumsum(0).int()
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS)}
    positions = torch.cat([torch.arange(len(one)) for one in ids])
    params = PackedSeqParams(qkv_format="thd", **options)
    hidden = model(torch.cat(ids)[None], positions[None], None, packed_seq_params=params)
    return (loss_hidden(model, hidden) @ output_weight(model).T)[0]


def nll(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")


def test_logits_experts_and_gradients_equal_transformers(policy, reference, checkpoint):
    from megatron_t1.model.convert import load_hf
    from megatron_t1.routing.replay import RoutingReplay

    ids = sequences()
    outputs = [reference(input_ids=one[None], use_cache=False, output_router_logits=True) for one in ids]
    expected = torch.cat([output.logits[0] for output in outputs])
    experts = torch.stack(
        [
            torch.cat([output.router_logits[layer] for output in outputs]).topk(HYBRID.num_experts_per_tok).indices
            for layer in range(HYBRID.num_hidden_layers)
        ],
        dim=1,
    )
    replay = RoutingReplay(policy)
    assert replay.layers == [1, 2, 3, 4]
    with torch.no_grad():
        _, routes = replay.record(policy, lambda: packed(policy, ids))
    replay.close()
    logits = packed(policy, ids)
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() <= 1e-4
    assert torch.equal(routes.long().sort(-1).values, experts.sort(-1).values)

    policy.zero_grad()
    reference.zero_grad()
    (sum(map(nll, logits.split(LENGTHS), ids)) / sum(LENGTHS)).backward()
    (sum(map(nll, expected.split(LENGTHS), ids)) / sum(LENGTHS)).backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    # A checkpoint of transformers' gradients, converted as weights are: only norms inside delta nets are shifted by 1.
    save_gradients(reference, checkpoint.parent / "gradients", checkpoint)
    load_hf([policy], checkpoint.parent / "gradients", "policy")
    for name, parameter in policy.named_parameters():
        wanted = parameter.detach() + (1.0 if name.endswith("out_norm.weight") else 0.0)
        assert (found[name] - wanted).abs().max() <= 1e-5, name
    load_hf([policy], checkpoint, "policy")
    assert max(gradient.abs().max() for gradient in found.values()) > 0.1


def save_gradients(model, directory, template):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(template, directory)
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    stored = load_file(directory / "model.safetensors")
    assert own.keys() == stored.keys()
    save_file({name: own[name].contiguous() for name in stored}, directory / "model.safetensors")


def test_right_padding_changes_nothing(policy):
    ids = sequences()[0]
    padded = torch.cat([ids, torch.zeros(20, dtype=torch.long)])[None]
    with torch.no_grad():
        alone = policy(ids[None], torch.arange(len(ids))[None], None)
        longer = policy(padded, torch.arange(padded.shape[1])[None], None)
    assert (longer[:, : len(ids)] - alone).abs().max() <= 2e-6


def test_recorded_experts_of_every_layer_are_taken(policy):
    """Foreign routes change the output, each layer's for itself; a model's own change nothing."""
    from megatron_t1.routing.replay import MicroBatchRoutes, RoutingReplay

    ids = sequences()
    replay = RoutingReplay(policy)
    try:
        with torch.no_grad():
            natural, routes = replay.record(policy, lambda: packed(policy, ids))
            everywhere = torch.ones(len(routes), dtype=torch.bool)

            def replayed(rows):
                slot = MicroBatchRoutes(rows, everywhere, everywhere)
                return replay.run(policy, slot, lambda: packed(policy, ids))

            assert torch.equal(replayed(routes), natural)
            for layer in range(HYBRID.num_hidden_layers):
                foreign = routes.clone()
                foreign[:, layer] = (routes[:, layer] + 1) % HYBRID.num_experts
                changed = replayed(foreign)
                assert (changed - natural).abs().max() > 1e-3
                again, taken = replay.record(policy, lambda: packed(policy, ids))
                assert torch.equal(again, natural) and torch.equal(taken, routes)
    finally:
        replay.close()


def test_what_is_stored_in_float32_stays_so_in_a_bfloat16_model(backend, checkpoint):
    from megatron.core.transformer.module import Float16Module
    from safetensors.torch import load_file

    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import load_hf

    chunks = build_model(tiny_config(dtype="bfloat16", architecture=HYBRID), backend, "policy")
    wrapped = Float16Module(chunks[0].config, chunks[0])
    load_hf([wrapped], checkpoint, "policy")
    wide = {name for name, parameter in chunks[0].named_parameters() if parameter.dtype != torch.bfloat16}
    kept = ("A_log", "out_norm.weight")
    assert wide == {f"decoder.layers.{layer}.self_attention.{name}" for layer in range(3) for name in kept}
    stored = load_file(checkpoint / "model.safetensors")["model.layers.1.linear_attn.A_log"]
    assert torch.equal(chunks[0].decoder.layers[1].self_attention.A_log, stored)
    packed(chunks[0], sequences()).float().logsumexp(-1).sum().backward()
    assert chunks[0].decoder.layers[0].self_attention.A_log.grad.abs().max() > 0
