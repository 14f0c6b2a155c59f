"""How a checkpoint calls its tensors, and which of them training has nothing to do with. Works without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEAD_TENSOR = "lm_head.weight"
# Parts of a Qwen3.5 checkpoint that no Megatron parameter stands for, by their prefix. An export carries them over.
CARRIED_PARTS = {"vision tower": "model.visual.", "multi-token prediction": "mtp."}

_TEXT_PREFIX, _VISION_PREFIX = "model.", "model.language_model."
_FUSED = re.compile(r"layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class CheckpointNames:
    """What differs between checkpoints of one architecture.

    Attributes:
        prefix: of the language model's tensors, except lm_head: "model.", or "model.language_model." of a
            vision-language checkpoint.
        fused_experts: one tensor for a projection of all experts of a layer, [E, 2*I, H] and [E, H, I], instead of
            one for each expert.
    """

    prefix: str = _TEXT_PREFIX
    fused_experts: bool = False


def names_in(tensors: Iterable[str]) -> CheckpointNames:
    """The convention that a checkpoint with these tensors follows."""
    language = {name for name in tensors if not carried_part(name)}
    prefix = _VISION_PREFIX if any(name.startswith(_VISION_PREFIX) for name in language) else _TEXT_PREFIX
    fused = any(name.startswith(prefix) and _FUSED.fullmatch(name.removeprefix(prefix)) for name in language)
    return CheckpointNames(prefix, fused)


def carried_part(tensor: str) -> str:
    """The part of a checkpoint that training doesn't touch and `tensor` belongs to; "" for the language model's."""
    return next((part for part, prefix in CARRIED_PARTS.items() if tensor.startswith(prefix)), "")
