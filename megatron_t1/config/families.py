"""Model families that can be trained: which numbers each needs, and what releases of megatron-core can't do."""

from __future__ import annotations

import re
from importlib import metadata

from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig

FAMILIES = ("qwen3_moe", "qwen3_5_moe")
HYBRID = ("qwen3_5_moe",)  # with gated delta nets
FIRST_CORE_WITH_DELTA_NET, FIRST_CORE_THAT_CUTS_IT = (0, 16), (0, 18)
FULL, LINEAR = "full_attention", "linear_attention"  # kinds of layers; a gated delta net is linear
_LINEAR = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def has_full_attention(architecture: ArchitectureConfig, layer: int) -> bool:
    """Whether a layer (from 0) attends to the whole sequence, and isn't a gated delta net."""
    return (layer + 1) % max(1, architecture.full_attention_interval) == 0


def layer_types(architecture: ArchitectureConfig) -> list[str]:
    """Of each layer, as Hugging Face calls them: FULL or LINEAR."""
    return [
        FULL if has_full_attention(architecture, layer) else LINEAR for layer in range(architecture.num_hidden_layers)
    ]


def family_problems(architecture: ArchitectureConfig) -> list[str]:
    """Numbers that the family must have and lacks, or has and can't have, one line each."""
    a, wrong = architecture, []
    if a.family not in FAMILIES:
        return [f"family {a.family!r} can't be built; known: {', '.join(FAMILIES)}"]
    if a.family not in HYBRID:
        if a.shared_expert_intermediate_size:
            wrong.append(f"{a.family} has no shared expert; shared_expert_intermediate_size must be 0")
        if a.full_attention_interval != 1:
            wrong.append(f"{a.family} has full attention in every layer; full_attention_interval must be 1")
        if a.mtp_num_hidden_layers:
            wrong.append(f"{a.family} has no multi-token prediction layers; mtp_num_hidden_layers must be 0")
        return wrong
    wrong += [f"{name} is {getattr(a, name)}; {a.family} needs it" for name in _LINEAR if getattr(a, name) < 1]
    if a.shared_expert_intermediate_size < 1:
        wrong.append(f"{a.family} has a shared expert; shared_expert_intermediate_size must be at least 1")
    if a.full_attention_interval < 2:
        wrong.append(f"{a.family} has full attention in every n-th layer; full_attention_interval must be at least 2")
    if not wrong and a.linear_num_value_heads % a.linear_num_key_heads:
        wrong.append(
            f"linear_num_value_heads={a.linear_num_value_heads} isn't a multiple of "
            f"linear_num_key_heads={a.linear_num_key_heads}"
        )
    return wrong


def number_problems(architecture: ArchitectureConfig) -> list[str]:
    """Numbers that don't fit each other in a model of any family, one line each. All must be positive."""
    a, wrong = architecture, []
    if a.num_attention_heads % a.num_key_value_heads:
        wrong.append(
            f"num_attention_heads={a.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={a.num_key_value_heads}"
        )
    if a.num_experts_per_tok > a.num_experts:
        wrong.append(f"num_experts_per_tok={a.num_experts_per_tok} exceeds num_experts={a.num_experts}")
    if a.head_dim % 2:
        wrong.append(f"head_dim={a.head_dim} is odd: rotary embeddings need pairs")
    if a.full_attention_interval > a.num_hidden_layers:
        wrong.append(
            f"full_attention_interval={a.full_attention_interval} exceeds num_hidden_layers={a.num_hidden_layers}: no "
            "layer would have full attention"
        )
    return wrong


def core_problems(architecture: ArchitectureConfig, layout: LayoutConfig, core_version: str) -> list[str]:
    """What this release of megatron-core can't do with the model in this layout, one line each."""
    release = tuple(int(number) for number in re.findall(r"\d+", core_version)[:2])
    if architecture.family not in HYBRID or release >= FIRST_CORE_THAT_CUTS_IT:
        return []
    if release < FIRST_CORE_WITH_DELTA_NET:
        return [f"megatron-core {core_version} has no gated delta net; {architecture.family} needs 0.16 or later"]
    return [
        f"layout.{axis}={getattr(layout, axis)}: megatron-core {core_version} can't cut packed sequences of gated "
        f"delta nets; that needs 0.18 or later, or layout.{axis}=1"
        for axis in ("tensor", "context")
        if getattr(layout, axis) > 1
    ]


def installed_core_problems(config: Config, *, here: bool = False) -> list[str]:
    """`core_problems` of the megatron-core in this environment, where training phases run in it.

    Args:
        here: the model is built in this environment, wherever training phases run.
    """
    train = config.cluster.train
    if not here and (train.python or train.container):
        return []
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return []
    return core_problems(config.model.architecture, config.layout, version)
