"""Memory of activations: what forward keeps for backward, and what a layer needs while its backward runs.

Counted operation by operation from what autograd saves, in bytes for each token, for two sets of kernels: `plain`, the
torch operations that the CPU backend runs (checked against a process, tests/planner), and `fused`, Transformer Engine,
FlashAttention and grouped GEMM, which keep fewer copies. With full recompute only layer inputs are kept, and one
layer's activations exist at a time (Korthikanti et al., arXiv 2205.05198, section 5).

Legend: H hidden size, q and kv widths of queries and of keys, k experts of a token, I width of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_t1.config.dtypes import WIDTHS
from megatron_t1.config.families import has_full_attention
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.planner.parameters import chunks_of
from megatron_t1.trajectory.routes import route_row_bytes

DELTA_CHUNK = 64  # tokens that the gated delta rule's kernels take at a time


@dataclass(frozen=True)
class Workload:
    """What one rank computes at a time.

    Attributes:
        tokens: of one micro-batch over all context ranks: train.capacity, the most there can be.
        micro_batches: of one optimizer step and replica.
        loss_share: of a micro-batch's tokens that carry loss.
        imbalance: rows of the fullest expert-parallel rank over the mean.
        fused: whether Transformer Engine's kernels are there.
    """

    tokens: int
    micro_batches: int = 1
    loss_share: float = 1.0
    imbalance: float = 1.0
    fused: bool = True


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and one token row of a tensor-parallel rank, before the split over ranks.

    Attributes:
        mixer: kept by attention or delta net, its norm and the residual stream before it.
        router: kept in front of the experts: norm, residual stream, router.
        experts: kept by routed and shared experts.
        backward: alive besides what is kept while the layer's backward runs.
    """

    mixer: float
    router: float
    experts: float
    backward: float

    @property
    def kept(self) -> float:
        return self.mixer + self.router + self.experts


def layer_bytes(
    a: ArchitectureConfig, dtype: str, work: Workload, layout: LayoutConfig, *, attends: bool
) -> LayerBytes:
    """Bytes for each token of a layer with full attention (`attends`) or a gated delta net.

    Ranks that share an expert (expert_tensor) each have all of its rows, and a part of its width.
    """
    width, fused = WIDTHS[dtype], work.fused
    hidden = a.hidden_size * width
    # A norm keeps its input; torch's keeps it, and what its weight is multiplied with, in float32.
    norm = hidden + 4 if fused else 8 * a.hidden_size + 4
    mixer = norm + hidden
    mixer += _attention_bytes(a, width, work, layout) if attends else _delta_net_bytes(a, width, fused=fused)
    router = norm + hidden + a.num_experts * (4 + 1) + 4 * a.num_experts_per_tok
    row = _row_bytes(a, width, layout.expert_tensor, fused=fused)
    rows = a.num_experts_per_tok * work.imbalance
    shared = a.shared_expert_intermediate_size * width * (3 if fused else 6) + (2 * hidden if fused else 3 * hidden)
    experts = rows * row + (shared if a.shared_expert_intermediate_size else 0)
    # Gradients of the experts' outputs and inputs, and of the stream; the all-gather dispatcher has that of every token
    # of its group.
    backward = 2 * rows * hidden * layout.expert_tensor + hidden
    if layout.dispatcher == "allgather":
        backward += hidden * layout.expert * layout.expert_tensor
    return LayerBytes(mixer, router, experts, backward)


def _attention_bytes(a: ArchitectureConfig, width: int, work: Workload, layout: LayoutConfig) -> float:
    query, heads = a.num_attention_heads * a.head_dim, a.num_key_value_heads
    gate = query if a.family == "qwen3_5_moe" else 0
    sums = 4 * (2 * a.num_attention_heads + heads)  # of the attention, and of the two norms
    # With more tensor ranks than key and value heads each rank gathers the whole projection, and keeps one head's keys
    # and values (core's `Attention.get_query_key_value_tensors`).
    copies = max(1.0, layout.tensor / heads)
    other = heads * a.head_dim * copies
    gathered = (query + gate + 2 * heads * a.head_dim) * (layout.tensor - 1) * width if copies > 1 else 0
    if work.fused:  # normed and rotated queries and keys, and the output, which is the projection's input
        return (3 * query + 3 * gate + 3 * other) * width + sums + gathered
    # Queries and keys in float32, before and after their norm; rotated queries and the output twice, gathered keys and
    # values, rotations; the projection itself where its type is the norms'.
    normed = 8 * (query + other) + ((query + other) * width if width == 4 else 0)
    kept = normed + (3 * (query + gate) + 2 * other + 4 * a.head_dim) * width + sums + gathered
    if layout.context > 1:
        # All ranks' keys and values, in order; and what a query may see of a micro-batch that is one trajectory: torch
        # widens the mask to numbers of the queries' type.
        kept += 2 * other * width * layout.context + work.tokens * (width + 1) * layout.tensor
    return kept


def _delta_net_bytes(a: ArchitectureConfig, width: int, *, fused: bool) -> float:
    key, value = a.linear_num_key_heads * a.linear_key_head_dim, a.linear_num_value_heads * a.linear_value_head_dim
    heads = a.linear_num_value_heads
    projected = (2 * key + 2 * value + 2 * heads) * width
    convolved = (2 * key + value) * width
    # Normed keys and queries, repeated to the value heads; decay and beta in float32; the triangular solve of a chunk.
    expanded = 2 * heads * a.linear_key_head_dim * width
    rule = expanded + 8 * heads + heads * DELTA_CHUNK * (width if fused else 4)
    output = 3 * value * width  # of the rule, gated and normed
    # Written in torch, each step of the rule keeps copies in float32: six times as much, as measured.
    return projected + convolved + output + (rule if fused else 6 * rule)


def _row_bytes(a: ArchitectureConfig, width: int, expert_tensor: int, *, fused: bool) -> float:
    """Kept for one token in one of its experts: the input, both halves of fc1, what SwiGLU makes of them."""
    inner = a.moe_intermediate_size
    index = 3 * 8  # where the row comes from and goes to
    return (a.hidden_size * expert_tensor + (3 if fused else 6) * inner) * width + index


@dataclass(frozen=True)
class StageActivations:
    """Peak of one pipeline stage, in bytes of one rank.

    Attributes:
        kept: for the backward of all micro-batches that are under way.
        layer: of the one layer that is recomputed, and of its backward.
        head: of the vocabulary projection (or the scalar head), its chunks of logits and its gradients.
        routes: recorded experts of the micro-batches under way.
    """

    kept: int
    layer: int
    head: int
    routes: int

    @property
    def peak(self) -> int:
        """The head's and a layer's own memory are never needed at the same time."""
        return self.kept + max(self.layer, self.head) + self.routes


def stage_activations(
    a: ArchitectureConfig, layout: LayoutConfig, dtype: str, role: str, stage: int, work: Workload, *, chunk: int
) -> StageActivations:
    """Activations of pipeline rank `stage` in a training step.

    Args:
        role: "policy" or "value".
        chunk: tokens projected to the vocabulary at a time (train.logprob_chunk).
    """
    rows = work.tokens / layout.context / layout.tensor  # everything is split over tensor ranks: sequence or heads
    width = WIDTHS[dtype]
    hidden = a.hidden_size * width
    chunks = chunks_of(a, layout, stage)
    each = len(chunks[0].layers)
    flying = in_flight(layout, stage, work.micro_batches)
    kinds = [has_full_attention(a, layer) for part in chunks for layer in part.layers]
    layers = {attends: layer_bytes(a, dtype, work, layout, attends=attends) for attends in set(kinds)}
    mean = sum(layers[attends].kept for attends in kinds) / len(kinds)
    largest = max(layer.kept + layer.backward for layer in layers.values())
    if layout.recompute == "full":
        # Megatron's dispatcher keeps the probabilities of its last call, whose graph holds the layer's input and its
        # gradient: one more hidden state for each layer than the checkpoints themselves.
        kept, layer = flying * each * hidden + (len(kinds) - 1) * hidden, largest - hidden
    elif layout.recompute == "moe":
        outside = sum(layers[attends].mixer + layers[attends].router for attends in kinds) / len(kinds)
        kept = flying * each * outside
        layer = max(layer.experts + layer.backward for layer in layers.values())
    else:
        kept, layer = flying * each * mean, max(layer.backward for layer in layers.values())
    if layout.pipeline > 1 and not work.fused:  # what was sent on stays: the CPU's schedules don't deallocate it
        kept += flying * hidden
    ends = hidden * (chunks[0].is_first + (2 if work.fused else 3) * chunks[-1].is_last)
    head = _head_bytes(a, layout, dtype, role, work, chunk=chunk) if chunks[-1].is_last else 0
    return StageActivations(
        int(rows * (kept + ends * max(1, flying / len(chunks)))), int(rows * layer), int(head),
        int(rows * route_row_bytes(a) * work.micro_batches),
    )  # fmt: skip


def in_flight(layout: LayoutConfig, stage: int, micro_batches: int) -> int:
    """Chunks whose backward is still to come, at most, on a pipeline rank: 1F1B, or interleaved with virtual stages.

    Narayanan et al., arXiv 2104.04473, section 2.2, and Megatron's number of warm-up micro-batches.
    """
    if layout.virtual_pipeline == 1:
        return min(micro_batches, layout.pipeline - stage)
    warmup = 2 * (layout.pipeline - stage - 1) + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(micro_batches * layout.virtual_pipeline, warmup + 1)


def _head_bytes(
    a: ArchitectureConfig, layout: LayoutConfig, dtype: str, role: str, work: Workload, *, chunk: int
) -> float:
    tokens, width = work.tokens / layout.context, WIDTHS[dtype]
    losses = tokens * work.loss_share
    if role == "value":
        return tokens / layout.tensor * a.hidden_size * 4 + tokens * 4 * 4
    columns = -(-a.vocab_size // layout.tensor)
    at_once = min(chunk, losses)
    logits = at_once * columns * 4
    # In float32 without mixed tensor-core products.
    widened = columns * a.hidden_size * (0 if work.fused or width == 4 else 4)
    gathered = tokens * a.hidden_size * width if layout.tensor > 1 else 0
    # Forward: logits, exponentials and their product; backward: logits and their gradient, the projection's gradient
    # in float32 and in the model's type, rows' gradients and those scattered back into all rows.
    gradient = columns * a.hidden_size * (4 + (width if width < 4 else 0))
    backward = 2 * logits + gradient + (losses + tokens) * a.hidden_size * width
    return max(3 * logits, backward) + widened + gathered + losses * (a.hidden_size * width + 4 * 8)
