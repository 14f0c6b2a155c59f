"""Checks of recorded routes where they enter training. numpy only, vectorised, in blocks of tokens.

Megatron accepts short, zero or duplicate rows in silence and trains with fewer experts; so nothing gets that far.
"""

from __future__ import annotations

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.routes import repeated_experts, route_dtype
from megatron_t1.trajectory.views import tokens_before_last_loss

BLOCK_TOKENS = 8192
CHOICES_FOR_CERTAINTY = 32  # for each expert; in so many, half of the experts are never missing in every layer


class RoutesError(T1Error):
    """Recorded routes are incomplete or can't belong to this model."""


def validate_routes(trajectory: Trajectory, num_experts: int, top_k: int, num_moe_layers: int) -> None:
    """Raise unless every token before the last one that carries loss has usable routes.

    Raises:
        RoutesError: names the trajectory and, where it applies, turn, token and layer.
    """
    check_routes(
        trajectory.routes,
        trajectory.routed,
        trajectory.turn,
        num_experts=num_experts,
        top_k=top_k,
        num_moe_layers=num_moe_layers,
        name=trajectory.header.trajectory_id,
        tokens=len(trajectory),
        needed=tokens_before_last_loss(trajectory),
    )


def check_routes(
    routes: np.ndarray | None,
    routed: np.ndarray,
    turn: np.ndarray,
    *,
    num_experts: int,
    top_k: int,
    num_moe_layers: int,
    name: str,
    tokens: int,
    needed: int | None = None,
) -> None:
    """`validate_routes` on bare arrays: routes [T, L, K], routed bool [T], turn [T].

    An error counts the MoE layers of the model from 1; dense layers between them have no number there.

    Args:
        needed: leading tokens that must have a row; None: all but the last.
    """

    def fail(problem: str, token: int | None = None, layer: int | None = None, remedy: str = "") -> None:
        where = f"trajectory {name}"
        if token is not None:
            where += f", turn {int(turn[token])}, token {token}"
        if layer is not None:
            where += f", MoE layer {layer + 1} of {num_moe_layers}"
        raise RoutesError(problem, where=where, remedy=remedy or "make a new rollout with this model")

    if routes is None:  # miles#407
        fail(
            "no routes were recorded, and replay is on", remedy="sample with rollout.routes=true, or switch replay off"
        )
    if routes.ndim != 3 or routes.shape[1:] != (num_moe_layers, top_k):
        fail(f"routes have shape {list(routes.shape)}, the model needs [{tokens}, {num_moe_layers}, {top_k}]")
    counts = len(routes), len(routed), len(turn)
    if counts != (tokens, tokens, tokens):  # vllm#28284: the engine gives one row fewer; the record has all
        fail("{} rows of routes, {} marks and {} turn numbers for {} tokens".format(*counts, tokens))
    if routed.dtype != np.bool_:
        fail(f"marks of recorded rows are {routed.dtype}, they must be bool", remedy="give `routed` as bool")
    expected = route_dtype(num_experts)
    if routes.dtype != expected:
        fail(f"routes are {routes.dtype}; with {num_experts} experts they are {expected}")
    missing = np.flatnonzero(~routed[: tokens - 1 if needed is None else needed])
    if missing.size:  # NeMo-RL#3485
        fail(
            f"{missing.size} tokens before the last trained one have no recorded routes",
            int(missing[0]),
            remedy="a row of an earlier turn's last token comes with the next turn's prompt; check the stitching",
        )
    _check_values(routes, routed, num_experts, fail)


def _check_values(routes: np.ndarray, routed: np.ndarray, num_experts: int, fail) -> None:
    zero_layers, largest = np.ones(routes.shape[1], dtype=bool), 0
    first_duplicate: tuple[int, int] | None = None
    for start in range(0, len(routes), BLOCK_TOKENS):
        here = routed[start : start + BLOCK_TOKENS]
        block = routes[start : start + BLOCK_TOKENS]
        too_large = (block >= num_experts).any(axis=2) & here[:, None]
        if too_large.any():
            token, layer = np.argwhere(too_large)[0]
            fail(
                f"experts {block[token, layer].tolist()} were recorded, the model has {num_experts}",
                start + int(token),
                int(layer),
            )
        zero_layers &= ~(block.any(axis=2) & here[:, None]).any(axis=0)
        largest = max(largest, int(block[here].max(initial=0)))
        duplicate = repeated_experts(block) & here[:, None]
        if first_duplicate is None and duplicate.any():
            token, layer = np.argwhere(duplicate)[0]
            first_duplicate = (start + int(token), int(layer))
    # All zero is a legal choice only with one expert per token, and then hardly in every layer.
    suspicious = zero_layers if routes.shape[2] > 1 else zero_layers & zero_layers.all()
    if routed.any() and num_experts > 1 and suspicious.any():
        layers = np.flatnonzero(suspicious)
        fail(f"all routes of {layers.size} layers are zero: they were never written", None, int(layers[0]))
    if first_duplicate is not None:
        token, layer = first_duplicate
        fail(f"experts {routes[token, layer].tolist()} repeat", token, layer)
    choices = int(routed.sum()) * routes.shape[1] * routes.shape[2]
    if 2 * (largest + 1) <= num_experts and choices >= CHOICES_FOR_CERTAINTY * num_experts:
        fail(f"no expert above {largest} was ever taken, the model has {num_experts}: routes of a smaller model")
