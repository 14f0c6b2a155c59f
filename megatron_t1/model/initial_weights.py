"""Names, shapes and random values of a start model's tensors, in the order in which they are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_t1 import atomic
from megatron_t1.config.families import has_full_attention
from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.errors import T1Error

if TYPE_CHECKING:
    from torch import Generator, Tensor

SHORTEST_MEMORY, LONGEST_MEMORY = 10.0, 1000.0  # tokens after which a delta net's head with A = 1 has forgotten


def tensor_shapes(a: ArchitectureConfig, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the checkpoint, in a fixed order, one tensor per expert and projection."""
    hidden = a.hidden_size
    yield "model.embed_tokens.weight", (vocab_size, hidden)
    for layer in range(a.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield from (_attention_shapes if has_full_attention(a, layer) else _delta_net_shapes)(a, prefix)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate.weight", (a.num_experts, hidden)
        for expert in range(a.num_experts):
            yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, a.moe_intermediate_size)
        if a.shared_expert_intermediate_size:
            yield from _mlp_shapes(f"{prefix}.mlp.shared_expert", hidden, a.shared_expert_intermediate_size)
            yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)
    yield "model.norm.weight", (hidden,)
    if not a.tie_word_embeddings:
        yield "lm_head.weight", (vocab_size, hidden)


def _attention_shapes(a: ArchitectureConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, query, key = a.hidden_size, a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    gates = 2 if a.family == "qwen3_5_moe" else 1  # beside each head's query its output gate
    yield f"{prefix}.self_attn.q_proj.weight", (gates * query, hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (key, hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (key, hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
    yield f"{prefix}.self_attn.q_norm.weight", (a.head_dim,)
    yield f"{prefix}.self_attn.k_norm.weight", (a.head_dim,)


def _delta_net_shapes(a: ArchitectureConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    keys, heads = a.linear_num_key_heads * a.linear_key_head_dim, a.linear_num_value_heads
    values = heads * a.linear_value_head_dim
    yield f"{prefix}.linear_attn.in_proj_qkv.weight", (2 * keys + values, a.hidden_size)
    yield f"{prefix}.linear_attn.in_proj_z.weight", (values, a.hidden_size)
    yield f"{prefix}.linear_attn.in_proj_b.weight", (heads, a.hidden_size)
    yield f"{prefix}.linear_attn.in_proj_a.weight", (heads, a.hidden_size)
    yield f"{prefix}.linear_attn.conv1d.weight", (2 * keys + values, 1, a.linear_conv_kernel_dim)
    yield f"{prefix}.linear_attn.A_log", (heads,)
    yield f"{prefix}.linear_attn.dt_bias", (heads,)
    yield f"{prefix}.linear_attn.norm.weight", (a.linear_value_head_dim,)
    yield f"{prefix}.linear_attn.out_proj.weight", (a.hidden_size, values)


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def write_weights(path: Path, a: ArchitectureConfig, dtype: str, vocab_size: int, seed: int) -> None:
    """One safetensors file, each tensor in the type it is published in.

    Raises:
        T1Error: the file can't be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from megatron_t1.model.mapping import WeightMapping

    mapping, generator = WeightMapping(a), torch.Generator(device="cpu").manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(a, vocab_size):
        stored = torch.float32 if mapping.keeps_storage_type(name) else getattr(torch, dtype)
        tensors[name] = _initial(name, shape, a, generator).to(stored)
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except SafetensorError as error:  # how the library wraps what the disk says
        raise T1Error(
            f"the weights can't be written: {error}",
            where=str(path),
            remedy="free some space, or name another directory",
        ) from error
    atomic.fsync_path(path)


def _initial(name: str, shape: tuple[int, ...], a: ArchitectureConfig, generator: Generator) -> Tensor:
    """float32. Decay of delta nets as in Mamba-2 and flash-linear-attention: A in (0, 16), and a step dt so that a head
    with A = 1 forgets within `SHORTEST_MEMORY` to `LONGEST_MEMORY` tokens (log-uniform), stored as softplus^-1(dt)."""
    import torch

    if name.endswith(".A_log"):
        return torch.empty(shape).uniform_(0.01, 16.0, generator=generator).log()
    if name.endswith(".dt_bias"):
        ends = -math.log(LONGEST_MEMORY), -math.log(SHORTEST_MEMORY)
        return torch.empty(shape).uniform_(*ends, generator=generator).exp().expm1().log()
    if name.endswith(".conv1d.weight"):
        bound = shape[-1] ** -0.5  # torch's own start of a convolution with one input channel
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:  # norms; all but that inside a delta net multiply by 1 + weight in the hybrid family
        zero_centred = a.family == "qwen3_5_moe" and not name.endswith(".linear_attn.norm.weight")
        return torch.zeros(shape) if zero_centred else torch.ones(shape)
    return torch.empty(shape).normal_(0.0, a.initializer_range, generator=generator)
