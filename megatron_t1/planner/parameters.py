"""The parameters of every rank by arithmetic: no torch, no Megatron, exact to the byte (`t1 dryrun` holds it to that).

Names and order are those of Megatron's modules, because a parameter's place in its gradient buffer decides which
optimizer shard it falls into. Legend: H hidden size, I width of one expert, E experts, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from megatron_t1.config.dtypes import WIDTHS
from megatron_t1.config.families import has_full_attention
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.planner.bytes import RankBytes, buffer_elements, shard_elements

ROLES = ("policy", "value")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank.

    Attributes:
        shape: this rank's part.
        is_expert: reduced over the ranks that hold the same expert, not over all replicas.
        is_float32: whatever the model's type (`model.delta_net`): in a buffer of its own, without a master copy.
    """

    name: str
    shape: tuple[int, ...]
    is_expert: bool = False
    is_float32: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """A contiguous range of layers that one pipeline rank holds as one module."""

    layers: Sequence[int]
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Place:
    """Where a rank stands: pipeline stage, and its number among those that share a dense buffer or an expert buffer."""

    stage: int
    dense_shard: int
    expert_shard: int


def chunks_of(architecture: ArchitectureConfig, layout: LayoutConfig, stage: int) -> list[Chunk]:
    """The chunks of pipeline rank `stage`, one for each virtual stage. Layers are split evenly."""
    parts = layout.pipeline * layout.virtual_pipeline
    each = architecture.num_hidden_layers // parts
    found = []
    for virtual in range(layout.virtual_pipeline):
        number = virtual * layout.pipeline + stage
        found.append(Chunk(range(number * each, (number + 1) * each), number == 0, number == parts - 1))
    return found


def chunk_parameters(
    architecture: ArchitectureConfig, layout: LayoutConfig, role: str, chunk: Chunk
) -> Iterator[Parameter]:
    """All parameters of a chunk on one rank, in the order of the module.

    Args:
        architecture: with its vocabulary's size.
        role: "policy" (a vocabulary projection) or "value" (one scalar head).
    """
    a, tensor = architecture, layout.tensor
    vocabulary = -(-a.vocab_size // tensor)
    if chunk.is_first:
        yield Parameter("embedding.word_embeddings.weight", (vocabulary, a.hidden_size))
    for layer in chunk.layers:
        prefix = f"decoder.layers.{layer}"
        yield Parameter(f"{prefix}.input_layernorm.weight", (a.hidden_size,))
        mixer = _attention if has_full_attention(a, layer) else _delta_net
        yield from mixer(a, tensor, f"{prefix}.self_attention")
        yield Parameter(f"{prefix}.pre_mlp_layernorm.weight", (a.hidden_size,))
        yield from _experts(a, layout, f"{prefix}.mlp")
    if chunk.is_last:
        yield Parameter("decoder.final_layernorm.weight", (a.hidden_size,))
        if role == "value":
            yield Parameter("output_layer.weight", (1, a.hidden_size))
            yield Parameter("output_layer.bias", (1,))
        elif not (a.tie_word_embeddings and chunk.is_first):
            yield Parameter("output_layer.weight", (vocabulary, a.hidden_size))


def _attention(a: ArchitectureConfig, tensor: int, prefix: str) -> Iterator[Parameter]:
    query, other = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    gates = query if a.family == "qwen3_5_moe" else 0  # each query head has a gate for its output
    yield Parameter(f"{prefix}.linear_proj.weight", (a.hidden_size, query // tensor))
    yield Parameter(f"{prefix}.linear_qkv.weight", ((query + gates + 2 * other) // tensor, a.hidden_size))
    yield Parameter(f"{prefix}.q_layernorm.weight", (a.head_dim,))
    yield Parameter(f"{prefix}.k_layernorm.weight", (a.head_dim,))


def _delta_net(a: ArchitectureConfig, tensor: int, prefix: str) -> Iterator[Parameter]:
    key, value = a.linear_num_key_heads * a.linear_key_head_dim, a.linear_num_value_heads * a.linear_value_head_dim
    heads = a.linear_num_value_heads // tensor
    yield Parameter(f"{prefix}.dt_bias", (heads,))
    yield Parameter(f"{prefix}.A_log", (heads,), is_float32=True)
    yield Parameter(f"{prefix}.in_proj.weight", ((2 * key + 2 * value) // tensor + 2 * heads, a.hidden_size))
    yield Parameter(f"{prefix}.conv1d.weight", ((2 * key + value) // tensor, 1, a.linear_conv_kernel_dim))
    yield Parameter(f"{prefix}.out_norm.weight", (a.linear_value_head_dim,), is_float32=True)
    yield Parameter(f"{prefix}.out_proj.weight", (a.hidden_size, value // tensor))


def _experts(a: ArchitectureConfig, layout: LayoutConfig, prefix: str) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.router.weight", (a.num_experts, a.hidden_size))
    width = a.moe_intermediate_size // layout.expert_tensor
    for expert in range(a.num_experts // layout.expert):
        yield Parameter(f"{prefix}.experts.local_experts.{expert}.linear_fc1.weight", (2 * width, a.hidden_size), True)
        yield Parameter(f"{prefix}.experts.local_experts.{expert}.linear_fc2.weight", (a.hidden_size, width), True)
    if shared := a.shared_expert_intermediate_size // layout.tensor:
        yield Parameter(f"{prefix}.shared_experts.gate_weight", (1, a.hidden_size))
        yield Parameter(f"{prefix}.shared_experts.linear_fc1.weight", (2 * shared, a.hidden_size))
        yield Parameter(f"{prefix}.shared_experts.linear_fc2.weight", (a.hidden_size, shared))


def place_of(layout: LayoutConfig, rank: int) -> Place:
    """Where `rank` stands in Megatron's order: tensor fastest, then context, data, pipeline; experts likewise."""
    per_stage = layout.processes // layout.pipeline
    stage, inner = divmod(rank, per_stage)
    return Place(stage, inner // layout.tensor, inner // (layout.expert_tensor * layout.expert))


def dense_replicas(layout: LayoutConfig) -> int:
    """Ranks that hold the same dense parameters: data x context parallel."""
    return layout.processes // (layout.pipeline * layout.tensor)


def expert_replicas(layout: LayoutConfig) -> int:
    """Ranks that hold the same experts."""
    return layout.processes // (layout.pipeline * layout.expert * layout.expert_tensor)


def rank_bytes(architecture: ArchitectureConfig, layout: LayoutConfig, dtype: str, role: str, rank: int) -> RankBytes:
    """What `rank` holds of a model that is trained: parameters, gradient buffers, its optimizer shard.

    Args:
        dtype: of the parameters; gradients, master copies and moments are float32.
    """
    place = place_of(layout, rank)
    # Layers of a kind are equal, so that stages which look alike are counted once.
    pattern = tuple(
        (part.is_first, part.is_last, tuple(has_full_attention(architecture, layer) for layer in part.layers))
        for part in chunks_of(architecture, layout, place.stage)
    )
    sizes = (layout.tensor, layout.expert, layout.expert_tensor)
    replicas, shards = (dense_replicas(layout), expert_replicas(layout)), (place.dense_shard, place.expert_shard)
    counted = _stage_bytes(
        astuple(architecture), sizes, pattern, role, dtype, replicas, shards, layout.distributed_optimizer
    )
    return RankBytes(rank, *counted)


@lru_cache(4096)
def _stage_bytes(
    numbers: tuple,
    sizes: tuple[int, int, int],
    pattern: tuple[tuple[bool, bool, tuple[bool, ...]], ...],
    role: str,
    dtype: str,
    replicas: tuple[int, int],
    shards: tuple[int, int],
    distributed: bool,
) -> tuple[int, int, int, int, int]:
    """The fields of a `RankBytes`, without the rank, of a rank whose chunks have the layers of `pattern`."""
    architecture = ArchitectureConfig(*numbers)
    layout = LayoutConfig(tensor=sizes[0], expert=sizes[1], expert_tensor=sizes[2])
    counts, weights, gradients, optimizer = [0, 0], 0, 0, 0
    for is_first, is_last, kinds in pattern:
        ends = _sizes(architecture, layout, role, Chunk([], is_first, is_last))  # what no layer has: embedding, head
        layers = {
            attends: _sizes(architecture, layout, role, Chunk([_layer_of_kind(architecture, attends)], False, False))
            for attends in set(kinds)
        }
        buffers = defaultdict(list)
        for part in (ends[:is_first], *(layers[attends] for attends in kinds), ends[is_first:]):
            for size, is_expert, is_float32 in part:
                counts[is_expert] += size
                apart = is_expert and layout.expert > 1  # Megatron reduces unshared experts like everything else
                buffers[apart, "float32" if is_float32 else dtype].append(size)
        for (kind, own_type), local in buffers.items():
            per_shard = 8 if own_type == "float32" else 12  # both moments; a master copy of what isn't float32 itself
            buffered = buffer_elements(local, replicas[kind], distributed_optimizer=distributed)
            weights += WIDTHS[own_type] * (buffered if distributed else sum(local))
            gradients += 4 * buffered
            optimizer += per_shard * shard_elements(
                local, replicas[kind], shards[kind], distributed_optimizer=distributed
            )
    return counts[0], counts[1], weights, gradients, optimizer


def _sizes(
    architecture: ArchitectureConfig, layout: LayoutConfig, role: str, chunk: Chunk
) -> list[tuple[int, bool, bool]]:
    """(elements, whether of an expert, whether float32 in any model) of a chunk's parameters, in their order."""
    return [
        (each.size, each.is_expert, each.is_float32) for each in chunk_parameters(architecture, layout, role, chunk)
    ]


def _layer_of_kind(architecture: ArchitectureConfig, attends: bool) -> int:
    """A layer with full attention, or one without."""
    return architecture.full_attention_interval - 1 if attends else 0


def total_parameters(architecture: ArchitectureConfig, role: str = "policy") -> int:
    """Of the whole model, without multi-token prediction and vision."""
    return _total_parameters(astuple(architecture), role)


@lru_cache(64)
def _total_parameters(numbers: tuple, role: str) -> int:
    architecture, whole = ArchitectureConfig(*numbers), LayoutConfig(processes=1, expert=1)
    chunk = Chunk(range(architecture.num_hidden_layers), True, True)
    return sum(each.size for each in chunk_parameters(architecture, whole, role, chunk))


def active_parameters(architecture: ArchitectureConfig) -> int:
    """That one token is multiplied with: its top-k experts, and the vocabulary projection but not the embedding."""
    a = architecture
    expert = 3 * a.hidden_size * a.moe_intermediate_size
    idle = a.num_hidden_layers * (a.num_experts - a.num_experts_per_tok) * expert
    embedding = 0 if a.tie_word_embeddings else a.vocab_size * a.hidden_size
    return total_parameters(a) - idle - embedding


def fullest_rank(architecture: ArchitectureConfig, layout: LayoutConfig, dtype: str, role: str) -> dict[int, RankBytes]:
    """stage -> the bytes of its first rank; the ranks of a stage differ by the padding of their shards alone."""
    per_stage = layout.processes // layout.pipeline
    return {stage: rank_bytes(architecture, layout, dtype, role, stage * per_stage) for stage in range(layout.pipeline)}
