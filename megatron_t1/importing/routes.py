"""Routes of other people's JSON: lists of rows, or vLLM's own encoding as it stands in an answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.routes import decode_routes, repeated_experts, route_dtype

EXPERT_MAX = 2**16 - 1


def listed_routes(
    rows: Any, contract: SamplingContract | None, where: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Routes [T, L, K] and which rows were recorded, from a list of rows [L][K]; null stands for an unrecorded row.

    Raises:
        T1Error: rows of different shapes, something that is no expert, or one expert twice.
    """
    if rows is None:
        return None, None
    if not isinstance(rows, list) or not any(row is not None for row in rows):
        raise T1Error("routes is not a list of rows [layers][experts]", where=where)
    routed = np.array([row is not None for row in rows])
    try:
        known = np.array([row for row in rows if row is not None])
    except ValueError as error:
        raise T1Error(f"routes: rows of different shapes ({error})", where=where) from error
    known = _compact(known, np.flatnonzero(routed), contract, where)
    routes = np.zeros((len(rows), *known.shape[1:]), known.dtype)
    routes[routed] = known
    return routes, routed


def answered_routes(value: Any, tokens: int, contract: SamplingContract | None, where: str) -> np.ndarray:
    """Routes [tokens - 1, L, K] that came with an answer: rows of all tokens of prompt and answer but the last.

    Args:
        value: base64 of a .npy file, as vLLM writes it, or a list of rows [L][K].
        tokens: of prompt and answer together.

    Raises:
        T1Error: another number of rows, something that is no expert, or one expert twice.
    """
    try:
        rows = decode_routes(value) if isinstance(value, str) else np.array(value)
    except ValueError as error:
        raise T1Error(f"routed_experts: {error}", where=where) from error
    if rows.ndim == 3 and len(rows) != tokens - 1:
        raise T1Error(
            f"routed_experts has {len(rows)} rows, expected {tokens - 1}: one for each token but the last",
            where=where,
            remedy="record the rows of whole prompts (routed_experts_prompt_start=0), or leave them out: --no-routes",
        )
    return _compact(rows, np.arange(tokens - 1), contract, where)


def _compact(rows: np.ndarray, tokens: np.ndarray, contract: SamplingContract | None, where: str) -> np.ndarray:
    """`rows` [n, L, K] of the given tokens in their compact type, checked."""
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or not rows.size or rows.min() < 0:
        found = f"{rows.dtype} {rows.shape}"
        raise T1Error(f"routes must be non-negative integers [tokens][layers][experts], got {found}", where=where)
    largest = int(rows.max())
    if largest > EXPERT_MAX:
        token = int(tokens[(rows > EXPERT_MAX).any(axis=(1, 2)).argmax()])
        raise T1Error(f"routes of token {token} name expert {largest}, a record holds up to {EXPERT_MAX}", where=where)
    experts = contract.num_experts if contract is not None and contract.num_experts else largest + 1
    if largest >= experts:
        raise T1Error(f"routes name expert {largest}, the model has {experts}", where=where)
    twice = repeated_experts(rows).any(axis=1)
    if twice.any():
        raise T1Error(f"routes of token {int(tokens[twice.argmax()])} name an expert twice", where=where)
    return rows.astype(route_dtype(experts))
