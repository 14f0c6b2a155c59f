"""Layer parts in plain torch for the CPU: RMSNorm under sequence parallelism, attention for packed sequences and
context parallelism, and the all-to-all dispatcher without CUDA streams. Parameter names equal those of the local spec.

Shapes: s tokens of this rank, b sequences, h query heads of this rank, g key/value heads, d head size, t packed tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class TorchRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` whose weight's gradient is summed over sequence-parallel ranks.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32, as Transformer Engine's does.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.zero_centred = config.layernorm_zero_centered_gamma
        if self.zero_centred:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centred:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


def zigzag_positions(length: int, size: int, rank: int) -> Tensor:
    """int64 [length / size]: positions of one sequence that context-parallel rank `rank` of `size` holds.

    A sequence is cut into 2 * size pieces; a rank has pieces `rank` and `2 * size - 1 - rank`.
    """
    if size == 1:
        return torch.arange(length)
    piece = torch.arange(length // (2 * size))
    return torch.cat([piece + rank * len(piece), piece + (2 * size - 1 - rank) * len(piece)])


class TorchCoreAttention(MegatronModule):
    """Scaled dot product attention for [s, b, h, d] and packed [t, h, d] inputs, also under context parallelism.

    Keys and values are gathered over the context-parallel group; the mask follows the zig-zag order.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ):
        super().__init__(config)
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        groups = pg_collection if pg_collection is not None else kwargs.get("model_comm_pgs")  # name before core 0.15
        if getattr(groups, "cp", None) is not None:
            self.context_group = groups.cp
        else:
            from megatron.core import parallel_state

            self.context_group = parallel_state.get_context_parallel_group()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def _gather(self, local: Tensor) -> Tensor:
        """[s, ...] -> [cp * s, ...], rank after rank; the gradient is reduce-scattered back."""
        if self.context_group.size() == 1:
            return local
        return gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=True, group=self.context_group)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale, dropout_p=dropout, enable_gqa=True
        )

    def _context_mask(self, length: int, device: torch.device) -> Tensor:
        """bool [length / cp, length]: what a query of this rank may see of the gathered keys of one sequence."""
        size, rank = self.context_group.size(), self.context_group.rank()
        keys = torch.cat([zigzag_positions(length, size, other) for other in range(size)])
        if not self.causal:
            return torch.ones(length // size, length, dtype=torch.bool, device=device)
        return (keys[None] <= zigzag_positions(length, size, rank)[:, None]).to(device)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[s, b, h, d] -> [s, b, h * d], or packed [t, h, d] -> [t, h * d]."""
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._forward_packed(query, key, value, packed_seq_params)
        length, size = query.size(0), self.context_group.size()
        key, value = self._gather(key), self._gather(value)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if size == 1 and attention_mask is None:
            output = self._attend(query, key, value, None, self.causal)
        else:
            visible = self._context_mask(length * size, query.device)
            if attention_mask is not None:
                visible = visible & ~attention_mask  # Megatron's masks say what is hidden
            output = self._attend(query, key, value, visible, False)
        return output.permute(2, 0, 1, 3).reshape(length, query.size(0), -1)

    def _forward_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        size, tokens = self.context_group.size(), query.size(0)
        boundaries = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
        key, value = self._gather(key), self._gather(value)
        outputs, start = [], 0
        for length in (boundaries[1:] - boundaries[:-1]).tolist():
            end = start + length // size
            queries = query[start:end].transpose(0, 1)[None]
            keys, values = (
                torch.cat([gathered[rank * tokens + start : rank * tokens + end] for rank in range(size)]).transpose(
                    0, 1
                )[None]
                for gathered in (key, value)
            )
            mask = None if size == 1 else self._context_mask(length, query.device)
            attended = self._attend(queries, keys, values, mask, self.causal and mask is None)
            outputs.append(attended[0].transpose(0, 1))
            start = end
        if start < tokens:  # padding behind the last sequence
            outputs.append(query.new_zeros(tokens - start, *query.shape[1:]))
        return torch.cat(outputs).reshape(tokens, -1)


class CpuAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """gloo wants split sizes as numbers; Megatron converts only those that lie on a CUDA device."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert


def layer_spec(config: Any, vp_stage: int | None) -> Any:
    """The local layer spec of this pipeline chunk with the parts above."""
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    hybrid = getattr(config, "experimental_attention_variant", None) is not None
    plain = copy.copy(config)
    if hybrid:  # core's helper knows full attention only
        plain.experimental_attention_variant = None
    spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm", **stage)
    spec.layer_norm = TorchRMSNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = TorchCoreAttention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) not in (None, IdentityOp):
                setattr(attention, name, TorchRMSNorm)
    if hybrid:
        from megatron_t1.model.delta_net import use_delta_net

        use_delta_net(spec, config, vp_stage, norm=TorchRMSNorm)
    return spec


def use_cpu_dispatcher(model: torch.nn.Module) -> None:
    """Swap the dispatcher class of a built model; not in the spec, which in newer cores holds partials."""
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if type(dispatcher) is MoEAlltoAllTokenDispatcher:
            dispatcher.__class__ = CpuAlltoAllDispatcher
