"""Bytes that a layer's forward sends over links, and the time that takes where nothing else runs beside it.

Only what grows with the tokens: tensor-, expert- and context-parallel exchange of activations. The reduction of
gradients happens once for each optimizer step.
"""

from __future__ import annotations

from megatron_t1.config.dtypes import WIDTHS
from megatron_t1.config.families import has_full_attention
from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig, PlanConfig

NODE = 8  # GPUs that see each other over NVLink


def layer_seconds(a: ArchitectureConfig, layout: LayoutConfig, dtype: str, plan: PlanConfig, *, attends: bool) -> float:
    """Seconds per token of the micro-batch that one rank spends exchanging in one layer's forward."""
    width, tensor, context, expert = WIDTHS[dtype], layout.tensor, layout.context, layout.expert
    own = 1 / (context * tensor)  # of a micro-batch's tokens that are this rank's
    hidden = a.hidden_size * width
    # Under sequence parallelism each of mixer and shared expert gathers its input and scatters its output.
    blocks = 1 + (a.shared_expert_intermediate_size > 0)
    gathered = 2 * blocks * hidden * (tensor - 1) * own
    # All-to-all sends a token once for each of its experts, all-gather once to each rank.
    copies = a.num_experts_per_tok / expert if layout.dispatcher == "alltoall" else 1.0
    dispatched = 2 * copies * hidden * (expert - 1) * own
    if attends:
        moved = 2 * a.num_key_value_heads * a.head_dim * width * (context - 1) / context / tensor
    else:
        inner = a.linear_num_key_heads * a.linear_key_head_dim + a.linear_num_value_heads * a.linear_value_head_dim
        moved = 2 * inner * width * (context - 1) / context * own
    return (
        gathered / _rate(plan, tensor, 1)
        + dispatched / _rate(plan, expert * layout.expert_tensor, 1)
        + moved / _rate(plan, context, tensor)
    )


def _rate(plan: PlanConfig, ranks: int, stride: int) -> float:
    """Bytes a second of an exchange among ranks that lie `stride` apart: as slow as what leaves the node."""
    span = ranks * stride
    if span <= NODE:
        return 1e9 * plan.node_gb_s
    outside = 1 - max(1, NODE // stride) / ranks
    return 1e9 / (outside / plan.network_gb_s + (1 - outside) / plan.node_gb_s)


def exchange_seconds(config: Config, forwards: float, tokens: float) -> float:
    """Of a phase: `tokens` tokens, each through all layers `forwards` times, shared by all replicas.

    Args:
        forwards: exchanges in units of a forward's; a backward has as many as a forward.
    """
    a, layout = config.model.architecture, config.layout
    replicas = layout.processes / (layout.tensor * layout.pipeline * layout.context)
    layers = sum(
        layer_seconds(a, layout, config.model.dtype, config.plan, attends=has_full_attention(a, layer))
        for layer in range(a.num_hidden_layers)
    )
    return forwards * tokens / replicas * layers / layout.pipeline
