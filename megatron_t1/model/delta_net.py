"""The layers of a hybrid model (Qwen3.5-MoE): gated delta net in most, gated full attention in every n-th.

Core's own GatedDeltaNet does the work. `DeltaNet` adds what a training needs of it: what checkpoints store in float32
stays in it, and cores before 0.18 take packed sequences. Imports Megatron; a backend must be prepared before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net as core
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_t1.errors import ConfigError
from megatron_t1.model import delta_rule

CORE_PACKS = hasattr(core, "get_parameter_local_cp")  # packed sequences and context parallelism came together


class DeltaNet(core.GatedDeltaNet):
    """Gated delta net, [s, b, H] -> [s, b, H], or [t, 1, H] with packed sequences.

    `A_log` and the output norm's weight are float32 whatever the model's type, as checkpoints store them and samplers
    compute with them: the decay is the exponential of `A_log`'s exponential, multiplied over thousands of tokens, and a
    norm that is loaded and exported in bfloat16 would come back with other bits.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for parameter in self._float32_parameters:
            parameter.data = parameter.data.float()

    @property
    def _float32_parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return self.A_log, self.out_norm.weight

    def _apply(self, fn: Any, recurse: bool = True) -> DeltaNet:
        """Moves the float32 parameters like the others, without the rounding of `.bfloat16()`."""
        kept = [parameter.data for parameter in self._float32_parameters]
        super()._apply(fn, recurse)
        for parameter, data in zip(self._float32_parameters, kept, strict=True):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = data.to(parameter.device)
        return self

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, packed_seq_params: Any = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """As core's. Without packing in core, every sequence of a packed stream is a call of its own."""
        forward = super().forward
        if CORE_PACKS or packed_seq_params is None:
            return forward(hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs)
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
        if ends[-1] != len(hidden_states):  # the streams of other tensor-parallel ranks are elsewhere
            raise ValueError(f"cu_seqlens end at {ends[-1]}, and this rank has {len(hidden_states)} tokens")
        outputs = [
            forward(hidden_states[first:last], attention_mask, *args, **kwargs)
            for first, last in zip(ends[:-1], ends[1:], strict=True)
        ]
        return torch.cat([output for output, _ in outputs]), outputs[0][1]


def use_delta_net(spec: Any, config: Any, vp_stage: int | None, norm: type) -> None:
    """Put gated delta nets into a block spec of plain torch parts, in all but every `linear_attention_freq`-th layer.

    FLA's kernels compute them where they are installed, else `delta_rule`.
    """
    delta_rule.bind()
    attention = ModuleSpec(
        module=DeltaNet,
        submodules=core.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear
        ),
    )
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    first = get_transformer_layer_offset(config, **stage)
    for place, layer in enumerate(spec.layer_specs):
        if (first + place + 1) % config.linear_attention_freq:
            spec.layer_specs[place] = layer = copy.deepcopy(layer)  # core gives all layers one spec
            layer.submodules.self_attention = attention


def fused_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Core's own hybrid block spec: Transformer Engine's layers and FLA's kernels, with `DeltaNet` in it.

    Raises:
        ConfigError: FLA isn't installed.
    """
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )

    if not core.HAVE_FLA:
        raise ConfigError(
            "gated delta net layers on a GPU need the kernels of flash-linear-attention, which can't be imported",
            where="model.architecture.family=qwen3_5_moe",
            remedy="install flash-linear-attention, or use the image in docker/",
        )
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    spec = get_transformer_block_with_experimental_attention_variant_spec(config, **stage)
    for layer in spec.layer_specs:
        if layer.submodules.self_attention.module is core.GatedDeltaNet:
            layer.submodules.self_attention.module = DeltaNet
    return spec
