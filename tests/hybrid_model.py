"""A tiny Qwen3.5-MoE: its numbers and a Hugging Face directory, as a text or as a vision-language checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import ArchitectureConfig

HYBRID = ArchitectureConfig(
    family="qwen3_5_moe",
    vocab_size=67,  # odd, so that two tensor-parallel ranks need padding
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=0,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    shared_expert_intermediate_size=24,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    max_position_embeddings=256,
    initializer_range=0.02,
    full_attention_interval=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
CARRIED = {
    "model.visual.patch_embed.proj.weight": (12, 3, 2, 2, 2),
    "model.visual.blocks.0.attn.qkv.bias": (36,),
    "mtp.fc.weight": (32, 64),
    "mtp.layers.0.mlp.experts.0.gate_proj.weight": (16, 32),
}


def hybrid_hf_config(architecture: ArchitectureConfig, dtype: str = "float32") -> dict[str, Any]:
    """config.json of a text model."""
    a = architecture
    rope = {"rope_type": "default", "rope_theta": a.rope_theta, "partial_rotary_factor": a.partial_rotary_factor}
    same = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        moe_intermediate_size num_experts num_experts_per_tok shared_expert_intermediate_size rms_norm_eps
        max_position_embeddings tie_word_embeddings full_attention_interval linear_num_key_heads linear_num_value_heads
        linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim""".split()
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        **{name: getattr(a, name) for name in same},
    }


def write_hybrid(
    directory: Path,
    architecture: ArchitectureConfig = HYBRID,
    dtype: str = "float32",
    *,
    vision: bool = False,
    fused: bool = True,
    seed: int = 1,
) -> Path:
    """A checkpoint of random weights, those of the delta net's decay and norm in fp32 as in the published ones.

    Args:
        vision: names and configuration of the vision-language model, with a few tensors of tower and prediction layer.
        fused: experts in one tensor for each projection.
    """
    import torch
    from safetensors.torch import save_file

    from megatron_t1.model.mapping import WeightMapping
    from megatron_t1.model.names import CheckpointNames

    mapping = WeightMapping(architecture, CheckpointNames("model.language_model." if vision else "model.", fused))
    generator, torch_dtype = torch.Generator().manual_seed(seed), getattr(torch, dtype)
    tensors = {}
    for name, shape in mapping.tensors():
        if name == "lm_head.weight" and architecture.tie_word_embeddings:
            continue
        noise = torch.randn(shape, generator=generator)
        if name.endswith(".linear_attn.norm.weight"):
            tensors[name] = (1 + 0.3 * noise).clamp(0.5)
        elif name.endswith("A_log"):
            tensors[name] = 0.5 * noise
        else:
            scale = 0.3 if "norm" in name or "dt_bias" in name or "conv1d" in name else 0.08
            tensors[name] = (scale * noise).to(torch_dtype)
    config = hybrid_hf_config(architecture, dtype)
    if vision:
        for name, shape in CARRIED.items():
            tensors[name] = torch.randn(shape, generator=generator).to(torch_dtype)
        config = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {**config, "mtp_num_hidden_layers": 1},
            "vision_config": {"model_type": "qwen3_5_moe", "depth": 1},
            "tie_word_embeddings": architecture.tie_word_embeddings,
        }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json", "preprocessor_config.json"):
        (directory / name).write_text("{}")
    return directory
