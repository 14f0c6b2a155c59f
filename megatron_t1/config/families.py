"""Model families that can be trained: which numbers each needs, and what releases of megatron-core can't do."""

from __future__ import annotations

import re
from importlib import metadata

from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig

FAMILIES = ("qwen3_moe", "qwen3_5_moe")
HYBRID = ("qwen3_5_moe",)  # with gated delta nets
FIRST_CORE_WITH_DELTA_NET, FIRST_CORE_THAT_CUTS_IT = (0, 16), (0, 18)
_LINEAR = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


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


def installed_core_problems(config: Config) -> list[str]:
    """`core_problems` of the megatron-core in this environment, where training phases run in it."""
    train = config.cluster.train
    if train.python or train.container:
        return []
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return []
    return core_problems(config.model.architecture, config.layout, version)
