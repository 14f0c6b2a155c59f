"""A tiny Qwen3-MoE: its numbers, a Hugging Face directory of random weights, and configurations around it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig, ModelConfig

WANTED_MEGATRON = "T1_TEST_MEGATRON"  # VERSION@DIRECTORY: tests that import any other megatron-core fail

ARCHITECTURE = ArchitectureConfig(
    vocab_size=67,  # odd, so that two tensor-parallel ranks need padding
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    rope_theta=1e6,
    max_position_embeddings=256,
)


def hf_config(architecture: ArchitectureConfig, dtype: str = "float32") -> dict[str, Any]:
    a = architecture
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": dtype,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "max_position_embeddings": a.max_position_embeddings,
        "mlp_only_layers": [],
        "moe_intermediate_size": a.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": a.num_attention_heads,
        "num_experts": a.num_experts,
        "num_experts_per_tok": a.num_experts_per_tok,
        "num_hidden_layers": a.num_hidden_layers,
        "num_key_value_heads": a.num_key_value_heads,
        "rms_norm_eps": a.rms_norm_eps,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tie_word_embeddings,
        "vocab_size": a.vocab_size,
    }


def write_hf(
    directory: Path, architecture: ArchitectureConfig = ARCHITECTURE, dtype: str = "float32", *, seed: int = 1
) -> Path:
    """A Hugging Face directory with random weights and something like a tokenizer."""
    import torch
    from safetensors.torch import save_file

    from megatron_t1.model.mapping import WeightMapping

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in WeightMapping(architecture).tensors():
        if name == "lm_head.weight" and architecture.tie_word_embeddings:
            continue
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.3 * noise if "norm" in name else 0.1 * noise).to(getattr(torch, dtype))
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config(architecture, dtype)))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text("{}")
    return directory


def tiny_config(
    layout: LayoutConfig | None = None,
    dtype: str = "float32",
    architecture: ArchitectureConfig = ARCHITECTURE,
    **layout_fields: Any,
) -> Config:
    layout = layout or LayoutConfig(**{"processes": 1, "expert": 1, **layout_fields})
    return Config(model=ModelConfig(dtype=dtype, architecture=replace(architecture)), layout=layout)


def cpu_backend():
    from megatron_t1.model.backend import select_backend

    backend = select_backend("cpu")
    backend.prepare()
    if wanted := os.environ.get(WANTED_MEGATRON):
        version, directory = megatron_version()
        assert f"{version}@{directory}" == wanted, (
            f"megatron-core {version} from {directory} was imported, not {wanted}"
        )
    return backend


def megatron_version() -> tuple[str, str]:
    """Version of the megatron-core in this process, and the directory it was imported from."""
    import megatron.core

    return megatron.core.__version__, str(Path(megatron.core.__file__).resolve().parents[2])


def tokens(sequences: int, length: int, seed: int = 0, vocab_size: int = ARCHITECTURE.vocab_size):
    """(ids [b, s], positions [b, s])."""
    import torch

    ids = torch.randint(0, vocab_size, (sequences, length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(length)[None].expand(sequences, -1)
