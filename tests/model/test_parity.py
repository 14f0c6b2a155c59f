"""The policy against transformers' Qwen3MoeForCausalLM, and all layouts against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed import run_distributed
from tests.model.workers import losses_from_hf
from tests.tiny_model import ARCHITECTURE, tiny_config, tokens, write_hf


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tmp_path, backend, tied):
    from transformers import Qwen3MoeForCausalLM

    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import load_hf
    from megatron_t1.model.heads import loss_hidden, output_weight, vocabulary_rows

    architecture = replace(ARCHITECTURE, tie_word_embeddings=tied)
    directory = write_hf(tmp_path / "hf", architecture)
    reference = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    chunks = build_model(tiny_config(architecture=architecture), backend, "policy")
    load_hf(chunks, directory, "policy")
    ids, positions = tokens(2, 96)
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
        hidden = chunks[0](ids, positions, None)
        assert hidden.shape == (2, 96, architecture.hidden_size)
        logits = loss_hidden(chunks[0], hidden) @ output_weight(chunks[0]).T
    assert vocabulary_rows(chunks[0]) == (0, 67)
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() <= 5e-6


def test_packed_sequences_equal_separate_ones(backend):
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_t1.model.build import build_model

    torch.manual_seed(0)
    (model,) = build_model(tiny_config(), backend, "policy")
    ids, positions = tokens(1, 40)
    boundaries = torch.tensor([0, 24, 40], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=24, max_seqlen_kv=24
    )
    with torch.no_grad():
        together = model(ids, positions, None, packed_seq_params=packed)
        separate = [model(ids[:, a:b], positions[:, : b - a], None) for a, b in ((0, 24), (24, 40))]
    assert (together - torch.cat(separate, dim=1)).abs().max() <= 2e-6


LAYOUTS = [
    (2, {"expert": 2}),
    (2, {"expert": 2, "recompute": "full"}),
    (2, {"expert": 2, "dispatcher": "allgather", "recompute": "moe"}),
    (2, {"tensor": 2, "expert": 2}),
    (2, {"tensor": 2, "expert_tensor": 2}),
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layout", "role"),
    [(*layout, "policy") for layout in LAYOUTS]
    + [(2, {"tensor": 2, "expert": 2}, "value"), (2, {"pipeline": 2}, "value")],
    ids=str,
)
def test_three_training_steps_are_the_same_in_every_layout(tmp_path, world_size, layout, role):
    write_hf(tmp_path / "hf")
    expected = losses_from_hf(str(tmp_path), {}, role)
    results = run_distributed(
        "tests.model.workers:losses_from_hf", world_size, directory=str(tmp_path), layout=layout, role=role
    )
    assert expected[0] > expected[1] > expected[2]
    assert results[0] == results[1] == pytest.approx(expected, abs=3e-6)


@pytest.mark.slow
def test_tied_embeddings_over_two_stages_train_like_one_process(tmp_path):
    write_hf(tmp_path / "hf", replace(ARCHITECTURE, tie_word_embeddings=True))
    arguments = {"directory": str(tmp_path), "role": "policy", "tied": True}
    expected = losses_from_hf(layout={}, **arguments)
    results = run_distributed("tests.model.workers:losses_from_hf", 2, layout={"pipeline": 2}, **arguments)
    assert results[0] == pytest.approx(expected, abs=3e-6)
