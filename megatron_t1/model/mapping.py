"""Which Hugging Face tensors each Megatron parameter is made of. Families: Qwen3-MoE and Qwen3.5-MoE.

`WeightMapping` is the table of one architecture; `packing` knows how tensors are laid out in a parameter. Parameter
names of the local and of the Transformer Engine layer specs are both in the table. Norms of a Qwen3.5 model are
zero-centred in Megatron (computed as 1 + weight), as Transformer Engine's under `layernorm_zero_centered_gamma`, also
the output norm of the gated delta net, whose stored weight is not.

Shapes: H hidden, I expert intermediate, V vocabulary, A query heads, G key/value heads, D head size; of the gated delta
net K = key heads * size, U = value heads, W = U * size, C the convolution's width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_t1.config.families import FULL, LINEAR, layer_types
from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.model.names import HEAD_TENSOR, CheckpointNames, carried_part
from megatron_t1.model.packing import Columns, GroupedQkv, Packing, Rows, Shape, Stacked, Whole

_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+)\.weight|(\w+)\.weight(\d+))")


@dataclass(frozen=True)
class Source:
    """Where one Megatron parameter comes from.

    Attributes:
        names: Hugging Face tensors, in the packing's order.
        is_expert: cut over the expert-tensor-parallel group, and held by one expert-parallel rank.
        slot: which row of the first dimension, of a tensor that holds `slots` experts; None for tensors of its own.
    """

    names: tuple[str, ...]
    packing: Packing
    is_expert: bool = False
    slot: int | None = None
    slots: int = 1

    @property
    def shapes(self) -> list[Shape]:
        """Of the tensors as they are stored, in the order of `names`."""
        return [shape if self.slot is None else (self.slots, *shape) for shape in self.packing.shapes]


@dataclass(frozen=True)
class _Entry:
    """One line of the table: a parameter's name in the local spec, the other in Transformer Engine's where it differs,
    and the tensors it is made of; "{}" stands for an expert's number."""

    parameter: str
    tensors: tuple[str, ...]
    packing: Packing
    fused_parameter: str = ""


class WeightMapping:
    """The table of one architecture. Layer and expert numbers given to it are global and start at 0.

    Args:
        names: how the checkpoint calls its tensors; by default a text model's, with one tensor for each expert matrix.
    """

    def __init__(self, architecture: ArchitectureConfig, names: CheckpointNames | None = None):
        self.architecture, self.names = architecture, names or CheckpointNames()
        self.layer_types = layer_types(architecture)
        self._model = _model_entries(architecture)
        self._layer = {
            FULL: _attention_entries(architecture) + _moe_entries(architecture),
            LINEAR: _delta_net_entries(architecture) + _moe_entries(architecture),
        }
        self._expert = _expert_entries(architecture, self.names.fused_experts)
        self._by_name = {kind: _by_parameter(entries) for kind, entries in self._layer.items()}
        self._model_by_name = _by_parameter(self._model)
        self._expert_by_name = _by_parameter(self._expert)

    def source(self, name: str, layer: int, first_expert: int) -> Source | None:
        """Where the parameter `name` of a chunk comes from; None when the table doesn't know it.

        Args:
            name: as in `chunk.named_parameters()`, with the chunk's own layer and expert numbers.
            layer: global number of the decoder layer it belongs to (ignored outside the decoder layers).
            first_expert: global number of this rank's first expert.
        """
        if name in self._model_by_name:
            return self._model_source(self._model_by_name[name])
        match = re.fullmatch(r"decoder\.layers\.\d+\.(.+)", name)
        if match is None or not 0 <= layer < len(self.layer_types):
            return None
        if expert := _EXPERT.fullmatch(match[1]):
            number, part = int(expert[1] or expert[4] or 0), expert[2] or expert[3]
            entry = self._expert_by_name.get(part)
            return None if entry is None else self._expert_source(entry, layer, first_expert + number)
        entry = self._by_name[self.layer_types[layer]].get(match[1])
        return None if entry is None else self._layer_source(entry, layer)

    def parameters(self, layers: range, experts: range) -> Iterator[tuple[str, Source]]:
        """Parameters, under the local spec's names, of a model part that holds these layers and experts.

        The embedding belongs to the first layer, final norm and projection (also of a tied model) to the last. Layers
        and experts are numbered from 0 in the names, as a chunk does.
        """
        for entry in self._model:
            first = entry.parameter.startswith("embedding.")
            if (0 if first else self.architecture.num_hidden_layers - 1) in layers:
                yield entry.parameter, self._model_source(entry)
        for number, layer in enumerate(layers):
            prefix = f"decoder.layers.{number}."
            for entry in self._layer[self.layer_types[layer]]:
                yield prefix + entry.parameter, self._layer_source(entry, layer)
            for local, expert in enumerate(experts):
                for entry in self._expert:
                    name = f"{prefix}mlp.experts.local_experts.{local}.{entry.parameter}.weight"
                    yield name, self._expert_source(entry, layer, expert)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Every tensor that a complete checkpoint has for this model, lm_head included, with its shape."""
        for entry in self._model:
            yield from _named_shapes(self._model_source(entry))
        for layer, kind in enumerate(self.layer_types):
            for entry in self._layer[kind]:
                yield from _named_shapes(self._layer_source(entry, layer))
            for expert in range(1 if self.names.fused_experts else self.architecture.num_experts):
                for entry in self._expert:
                    yield from _named_shapes(self._expert_source(entry, layer, expert))

    def keeps_storage_type(self, tensor: str) -> bool:
        """Whether a tensor stays in the type it is published in, fp32, whatever the type of the model."""
        return tensor.endswith((".linear_attn.A_log", ".linear_attn.norm.weight"))

    def is_carried(self, tensor: str) -> bool:
        """Whether a tensor belongs to a part of such checkpoints that training doesn't touch."""
        return self.architecture.family == "qwen3_5_moe" and bool(carried_part(tensor))

    def _model_source(self, entry: _Entry) -> Source:
        (tensor,) = entry.tensors
        return Source((tensor if tensor == HEAD_TENSOR else self.names.prefix + tensor,), entry.packing)

    def _layer_source(self, entry: _Entry, layer: int) -> Source:
        return Source(tuple(f"{self.names.prefix}layers.{layer}.{tensor}" for tensor in entry.tensors), entry.packing)

    def _expert_source(self, entry: _Entry, layer: int, expert: int) -> Source:
        prefix = f"{self.names.prefix}layers.{layer}.mlp.experts."
        names = tuple(prefix + tensor.format(expert) for tensor in entry.tensors)
        if self.names.fused_experts:
            return Source(names, entry.packing, True, expert, self.architecture.num_experts)
        return Source(names, entry.packing, True)


def _named_shapes(source: Source) -> Iterator[tuple[str, Shape]]:
    yield from zip(source.names, source.shapes, strict=True)


def _by_parameter(entries: list[_Entry]) -> dict[str, _Entry]:
    return {name: entry for entry in entries for name in (entry.parameter, entry.fused_parameter) if name}


def _model_entries(a: ArchitectureConfig) -> list[_Entry]:
    vocabulary = Rows((a.vocab_size, a.hidden_size))
    return [
        _Entry("embedding.word_embeddings.weight", ("embed_tokens.weight",), vocabulary),
        _Entry("decoder.final_layernorm.weight", ("norm.weight",), Whole((a.hidden_size,))),
        _Entry("output_layer.weight", (HEAD_TENSOR,), vocabulary),
    ]


def _attention_entries(a: ArchitectureConfig) -> list[_Entry]:
    gated = a.family == "qwen3_5_moe"
    qkv = GroupedQkv(a.num_attention_heads, a.num_key_value_heads, a.head_dim, a.hidden_size, gated)
    norm, head_norm = Whole((a.hidden_size,)), Whole((a.head_dim,))
    output = Columns((a.hidden_size, a.num_attention_heads * a.head_dim))
    return [
        _Entry(
            "input_layernorm.weight", ("input_layernorm.weight",), norm, "self_attention.linear_qkv.layer_norm_weight"
        ),
        _Entry("self_attention.linear_qkv.weight", tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), qkv),
        _Entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), output),
        _Entry("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), head_norm),
        _Entry("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), head_norm),
    ]


def _delta_net_entries(a: ArchitectureConfig) -> list[_Entry]:
    """in_proj of a rank is [its q | its k | its v | its gate z | its beta b | its decay a], its conv1d [q | k | v].

    Sources: core's GatedDeltaNet.forward and transformers' Qwen3_5MoeGatedDeltaNet.forward.
    """
    keys, heads = a.linear_num_key_heads * a.linear_key_head_dim, a.linear_num_value_heads
    values, hidden = heads * a.linear_value_head_dim, (a.hidden_size,)
    qkv, per_head = (keys, keys, values), Stacked(((heads,),), ())
    return [
        _Entry(
            "input_layernorm.weight",
            ("input_layernorm.weight",),
            Whole(hidden),
            "self_attention.in_proj.layer_norm_weight",
        ),
        _Entry(
            "self_attention.in_proj.weight",
            tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            Stacked((qkv, (values,), (heads,), (heads,)), hidden),
        ),
        _Entry(
            "self_attention.conv1d.weight",
            ("linear_attn.conv1d.weight",),
            Stacked((qkv,), (1, a.linear_conv_kernel_dim)),
        ),
        _Entry("self_attention.A_log", ("linear_attn.A_log",), per_head),
        _Entry("self_attention.dt_bias", ("linear_attn.dt_bias",), per_head),
        _Entry(
            "self_attention.out_norm.weight",
            ("linear_attn.norm.weight",),
            Whole((a.linear_value_head_dim,), offset=-1.0),
        ),
        _Entry("self_attention.out_proj.weight", ("linear_attn.out_proj.weight",), Columns((a.hidden_size, values))),
    ]


def _moe_entries(a: ArchitectureConfig) -> list[_Entry]:
    entries = [
        _Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Whole((a.hidden_size,))),
        _Entry("mlp.router.weight", ("mlp.gate.weight",), Whole((a.num_experts, a.hidden_size))),
    ]
    if shared := a.shared_expert_intermediate_size:
        parts = ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
        stacked = Stacked(((shared,), (shared,)), (a.hidden_size,))
        down = ("mlp.shared_expert.down_proj.weight",)
        entries += [
            _Entry("mlp.shared_experts.linear_fc1.weight", parts, stacked),
            _Entry("mlp.shared_experts.linear_fc2.weight", down, Columns((a.hidden_size, shared))),
            _Entry("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), Whole((1, a.hidden_size))),
        ]
    return entries


def _expert_entries(a: ArchitectureConfig, fused: bool) -> list[_Entry]:
    rows, hidden = a.moe_intermediate_size, (a.hidden_size,)
    down = Columns((a.hidden_size, rows))
    if fused:
        return [
            _Entry("linear_fc1", ("gate_up_proj",), Stacked(((rows, rows),), hidden)),
            _Entry("linear_fc2", ("down_proj",), down),
        ]
    return [
        _Entry("linear_fc1", ("{}.gate_proj.weight", "{}.up_proj.weight"), Stacked(((rows,), (rows,)), hidden)),
        _Entry("linear_fc2", ("{}.down_proj.weight",), down),
    ]
