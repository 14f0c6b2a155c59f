"""Routes for tokens that only fill a micro-batch. numpy only.

Padding that all goes to the first experts makes one expert-parallel rank hot (slime#2308, miles#2697); equal experts
in a row crash or lose probability (verl#4986).
"""

from __future__ import annotations

import numpy as np

from megatron_t1.errors import ConfigError
from megatron_t1.trajectory.routes import route_dtype


def padding_routes(
    count: int, num_moe_layers: int, num_experts: int, top_k: int, expert_parallel: int = 1, *, offset: int = 0
) -> np.ndarray:
    """Distinct experts for each padding token, spread evenly over expert-parallel ranks first, then over experts.

    Args:
        count: padding tokens.
        expert_parallel: ranks the experts are spread over; rank r holds experts r * E / ranks onwards.
        offset: padding tokens that were given routes before these, so that a step's padding continues evenly.

    Returns:
        uint8 (up to 256 experts) or uint16 [count, num_moe_layers, top_k]. Loads of two ranks differ by at most one
        choice per layer, and so do loads of two experts.

    Raises:
        ConfigError: top_k exceeds the experts, or ranks don't divide them.
    """
    if not 0 < top_k <= num_experts:
        raise ConfigError(f"{top_k} distinct experts can't be taken from {num_experts}", where="padding routes")
    if num_experts % expert_parallel:
        raise ConfigError(f"{num_experts} experts can't be spread over {expert_parallel} ranks", where="layout.expert")
    # Experts in visiting order: one of each rank, then the next of each rank.
    order = np.arange(num_experts).reshape(expert_parallel, -1).T.reshape(-1).astype(route_dtype(num_experts))
    choices = (offset + np.arange(count))[:, None, None] * top_k + np.arange(top_k)
    # Each layer starts elsewhere: with few padding tokens the same experts aren't taken in every layer.
    starts = (np.arange(num_moe_layers) * top_k)[None, :, None]
    return order[(choices + starts) % num_experts]
