"""Sampled tokens: one assistant turn exactly as the engine produced it.

Shapes: P prompt tokens, N sampled tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_t1.rollout.engine.errors import EngineAnswerInvalid, EngineRequestFailed
from megatron_t1.trajectory.routes import RouteShape, decode_routes, route_problem

COUNT_MAX = 2**32 - 1  # what an exchange log holds
LOGPROB_FLOOR = -9000.0  # vLLM clamps minus infinity to -9999


@dataclass(frozen=True, kw_only=True)
class EngineRoutes(RouteShape):
    """The experts of a model, and where they stand in an answer of the engine, which has rows of every layer.

    `columns`: the MoE layers among the layers of the answer, where some layers are dense; empty: all are MoE.
    """

    num_layers: int = 0  # of the answer; 0: num_moe_layers
    columns: tuple[int, ...] = ()


class Completion:
    """A sampled turn. Only `from_response` makes one, out of the body of an answer.

    A body says nothing about who wrote it: that sampled ids come from an engine and never from text holds because the
    engine client alone calls `from_response`, with what it received; a test holds the package to that. What was
    received is in the exchange log, which `t1 audit` compares records with.

    Attributes:
        ids: int32 [N], at least one token, read-only.
        logprobs: float32 [N], the sampler's log-probability of each, finite.
        routes: uint8 or uint16 [P + N - 1 - routes_start, L, K], or None when they weren't asked for. Row i belongs to
            position routes_start + i of prompt plus answer; the last sampled token has none (vllm#28284).
        routes_start: absolute position of the first row.
        prompt_length: P.
        finish_reason: "stop" (a stop id was sampled) or "length".
        cached_tokens: prompt tokens that the engine took from its prefix cache.
        weights: the engine's own name of the weights that sampled all of it; "" when it doesn't say.
    """

    __slots__ = (
        "ids",
        "logprobs",
        "routes",
        "routes_start",
        "prompt_length",
        "finish_reason",
        "cached_tokens",
        "weights",
    )

    def __init__(self, *_, **__):
        raise TypeError("a Completion is made by the engine client only: Completion.from_response")

    def __setattr__(self, name, value):
        raise AttributeError("a Completion is immutable")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_response(
        cls,
        body: bytes,
        *,
        prompt_length: int,
        max_tokens: int,
        routes_from: int | None,
        route_shape: EngineRoutes | None,
        where: str,
        stop_ids: Sequence[int] = (),
    ) -> Completion:
        """Parse and check the body of an answer of vLLM's /inference/v1/generate.

        Args:
            body: raw JSON bytes.
            prompt_length, max_tokens: what was asked for.
            routes_from: first position whose routes were asked for; None: no routes.
            route_shape: needed when `routes_from` is given.
            where: names the request in errors.
            stop_ids: what was asked to end at; (): not checked.

        Raises:
            EngineRequestFailed: the engine aborted the request.
            EngineAnswerInvalid: anything is missing, of another length, or not a number.
        """
        import json

        def invalid(problem: str) -> EngineAnswerInvalid:
            return EngineAnswerInvalid(
                f"the engine's answer is invalid: {problem}",
                where=where,
                remedy="check the engine's version and log; the answer was not used",
            )

        try:
            answer = json.loads(body)
            (choice,) = answer["choices"]
            token_ids, reason = choice["token_ids"], choice["finish_reason"]
            content = (choice["logprobs"] or {}).get("content") or []
            entries = [(entry["token_id"], entry["logprob"]) for entry in content]
            usage = answer.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            weights = sorted({str(span["version"]) for span in choice.get("weight_versions") or []})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise invalid(f"{type(error).__name__}: {error}") from error
        if len(weights) > 1:
            raise invalid(f"one turn was sampled by several weights: {', '.join(weights)}")
        if reason not in ("stop", "length"):
            raise EngineRequestFailed(f"the engine ended a request with {reason!r}", where=where)
        ids = _int32(token_ids, invalid)
        if not 1 <= len(ids) <= max_tokens:
            raise invalid(f"{len(ids)} sampled tokens, asked for 1 to {max_tokens}")
        if reason == "length" and len(ids) != max_tokens:
            raise invalid(f"ended by length after {len(ids)} of {max_tokens} tokens")
        stops = np.flatnonzero(np.isin(ids, list(stop_ids)))
        if len(stops) and stops[0] < len(ids) - 1:
            raise invalid(f"tokens after the stop id {ids[stops[0]]}, which is sampled token {stops[0]} of {len(ids)}")
        if stop_ids and reason == "stop" and not len(stops):
            raise invalid(f"stopped after token {ids[-1]}, which is none of the stop ids")
        if [token for token, _ in entries] != token_ids:
            raise invalid(f"{len(entries)} log-probabilities that don't belong to the {len(ids)} sampled tokens")
        if not all(type(value) is float or (type(value) is int and abs(value) < 2**31) for _, value in entries):
            raise invalid("log-probabilities that are no numbers")
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which is refused below
            logprobs = np.array([value for _, value in entries], dtype=np.float32)
        if type(cached) is not int or not 0 <= cached <= COUNT_MAX:
            raise invalid(f"cached_tokens is {str(cached)[:60]!r}, expected a number of tokens")
        bad = ~np.isfinite(logprobs) | (logprobs < LOGPROB_FLOOR) | (logprobs > 1e-3)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise invalid(f"log-probability {logprobs[at]} of sampled token {at} (id {ids[at]})")
        routes = None
        if routes_from is not None:
            if route_shape is None:
                raise ValueError("routes_from needs a route_shape")
            rows = prompt_length + len(ids) - 1 - routes_from
            routes = _routes(choice.get("routed_experts"), rows, route_shape, invalid)

        made = object.__new__(cls)
        values: dict[str, Any] = {
            "ids": ids,
            "logprobs": logprobs,
            "routes": routes,
            "routes_start": routes_from or 0,
            "prompt_length": prompt_length,
            "finish_reason": reason,
            "cached_tokens": cached,
            "weights": "".join(weights),
        }
        for array in (ids, logprobs, routes):
            if array is not None:
                array.flags.writeable = False
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made


def _int32(values: Any, invalid) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise invalid("token_ids is not a list of token ids")
    return np.array(values, dtype=np.int32)


def _routes(encoded: Any, rows: int, shape: EngineRoutes, invalid) -> np.ndarray:
    if encoded is None:
        raise invalid("no routed experts, although they were asked for")
    try:
        routes = decode_routes(encoded)
    except ValueError as error:
        raise invalid(f"routed experts: {error}") from error
    expected = (rows, shape.num_layers or shape.num_moe_layers, shape.top_k)
    if routes.shape != expected:
        raise invalid(f"routed experts of shape {routes.shape}, expected {expected}")
    if shape.columns:
        routes = routes[:, list(shape.columns)]
    if routes.dtype.kind not in "iu":
        raise invalid(f"routed experts of type {routes.dtype}")
    if rows == 0:
        return np.empty((0, shape.num_moe_layers, shape.top_k), dtype=shape.dtype)
    problem = route_problem(routes, shape.num_experts)
    if problem:
        raise invalid(problem)
    return np.ascontiguousarray(routes, dtype=shape.dtype)
