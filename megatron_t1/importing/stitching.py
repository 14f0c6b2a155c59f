"""Requests and answers put together to trajectories, by token ids.

A prompt that doesn't go on where the answer before it ended (a history that was summarised or rendered again) begins a
new trajectory, so that every sampled token is trained on once, after the very tokens it was sampled after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.importing.exchanges import ForeignTurn
from megatron_t1.importing.foreign import Foreign, plain_name
from megatron_t1.importing.routes import answered_routes
from megatron_t1.importing.values import logprobs, token_ids
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import common_prefix


def read_turn(
    prompt: Any, answer: Any, scores: Any, where: str, *, routes: Any = None, contract: SamplingContract | None = None
) -> ForeignTurn:
    """One request from its lists of ids and log-probs (None: there are none) and its routes (see `answered_routes`).

    Raises:
        T1Error: something is no token id, log-prob or expert, or they aren't as many.
    """
    sampled = token_ids(answer, "completion_token_ids", where)
    own = logprobs(None if scores == [] else scores, where, tokens=len(sampled))
    sent = token_ids(prompt, "prompt_token_ids", where)
    rows = None if routes is None else answered_routes(routes, len(sent) + len(sampled), contract, where)
    return ForeignTurn(sent, sampled, own, rows)


def stitched(turns: Sequence[ForeignTurn], name: str, **facts: Any) -> Iterator[Foreign]:
    """A trajectory for each run of turns in which every prompt goes on where the answer before it ended.

    Args:
        name: of the trajectory; where there are several, NAME+0, NAME+1, ...
        facts: fields of `Foreign` that all of them have.
    """
    runs: list[list[ForeignTurn]] = []
    for turn in turns:
        if not len(turn.sampled):
            continue
        stream = np.concatenate([runs[-1][-1].prompt, runs[-1][-1].sampled]) if runs else None
        if stream is not None and common_prefix(stream, turn.prompt) == len(stream):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    for index, run in enumerate(runs):
        called, last = name if len(runs) == 1 else f"{name}+{index}", run[-1]
        ids = np.concatenate([last.prompt, last.sampled])
        mask, own = np.zeros(len(ids), bool), np.full(len(ids), np.nan, np.float32)
        for turn in run:
            here = slice(len(turn.prompt), len(turn.prompt) + len(turn.sampled))
            mask[here], own[here] = True, turn.logprobs
        routes, routed = _merged_routes(run, len(ids), facts.get("source", ""))
        has_logprobs = bool(np.isfinite(own).any())
        yield Foreign(
            name=plain_name(called),
            called=called,
            ids=ids,
            mask=mask,
            logprobs=own if has_logprobs else None,
            routes=routes,
            routed=routed,
            exchanges=list(run) if has_logprobs else [],
            **facts,
        )


def _merged_routes(run: Sequence[ForeignTurn], length: int, where: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Routes [T, L, K] and which rows are there [T]; of rows that came again the first stays, as in a stream."""
    answers = [turn.routes for turn in run if turn.routes is not None]
    if not answers:
        return None, None
    shapes = sorted({rows.shape[1:] for rows in answers})
    if len(shapes) > 1:
        raise T1Error(f"routed_experts of different models: [layers, experts] of {shapes}", where=where)
    routes = np.zeros((length, *shapes[0]), max(rows.dtype for rows in answers))
    routed = np.zeros(length, bool)
    for rows in answers:
        new = np.flatnonzero(~routed[: len(rows)])
        routes[new], routed[new] = rows[new], True
    return routes, routed
