"""The requests that made a foreign trajectory, as somebody else recorded them: do they make these very tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.trajectory.exchange import common_prefix
from megatron_t1.trajectory.record import Origin, Trajectory


@dataclass(frozen=True)
class ForeignTurn:
    """One request and its answer as somebody else recorded it."""

    prompt: np.ndarray  # int32 [P], everything that was sent
    sampled: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    routes: np.ndarray | None = None  # uint8 or uint16 [P + N - 1, L, K]


def require_exchanged(record: Trajectory, turns: Sequence[ForeignTurn], where: str) -> None:
    """Compare a record with the stream that the requests and answers make.

    An answer that the next request doesn't hold was taken back; what follows the last answer was never sent.

    Raises:
        T1Error: another token, a token sampled here and not there, another log-probability or turn.
    """
    ids, made_by, logprobs, turn = _stream(turns)
    length = len(ids)
    if length > len(record) or (ids != record.ids[:length]).any():
        at = common_prefix(record.ids, ids)
        found = f"is {record.ids[at]}" if at < len(record) else "isn't there"
        raise _contradiction(f"token {at} {found} in ids, and {ids[at]} in the exchanges", where)
    generated = np.isin(record.origin, (Origin.SAMPLED, Origin.DEMONSTRATION))
    sampled = np.concatenate([made_by >= 0, np.zeros(len(record) - length, bool)])
    if (wrong := np.flatnonzero(generated != sampled)).size:
        at = int(wrong[0])
        if generated[at]:
            raise _contradiction(f"token {at} counts as sampled, but no exchange has sampled it", where)
        raise _contradiction(f"token {at} was sampled by exchange {made_by[at]}, but has no log-prob or mask", where)
    at_sampled = np.flatnonzero(generated)
    differs = record.logprobs[at_sampled].view(np.int32) != logprobs[at_sampled].view(np.int32)
    if differs.any():
        at = int(at_sampled[differs.argmax()])
        found = f"{record.logprobs[at]} in logprobs, and {logprobs[at]} in exchange {made_by[at]}"
        raise _contradiction(f"the log-prob of token {at} is {found}", where)
    if (wrong := np.flatnonzero(sampled[:length] & (record.turn[:length] != turn))).size:
        at = int(wrong[0])
        raise _contradiction(f"token {at} is in turn {record.turn[at]}, and the exchanges' turn {turn[at]}", where)


def _contradiction(problem: str, where: str) -> T1Error:
    return T1Error(
        f"the exchanges contradict the trajectory: {problem}",
        where=where,
        remedy="correct it, or leave the exchanges out: without them the trajectory is checked in itself only",
    )


def _stream(turns: Sequence[ForeignTurn]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(ids int32, index of the exchange that sampled it or -1, log-prob float32 or NaN, turn or -1), each [T']."""
    ids, made_by = np.empty(0, np.int32), np.empty(0, np.int64)
    logprobs = np.empty(0, np.float32)
    numbers: list[int] = []  # of each exchange: the first of those that went on from one to the next
    for index, turn in enumerate(turns):
        kept = common_prefix(ids, turn.prompt)
        goes_on = index > 0 and kept == len(turn.prompt) == len(ids)
        numbers.append(numbers[-1] if goes_on else index)
        between = len(turn.prompt) - kept
        made_by = np.concatenate([made_by[:kept], np.full(between, -1), np.full(len(turn.sampled), index)])
        logprobs = np.concatenate([logprobs[:kept], np.full(between, np.nan, np.float32), turn.logprobs])
        ids = np.concatenate([turn.prompt, turn.sampled])
    number = np.full(len(ids), -1)
    sampled = made_by >= 0
    number[sampled] = np.unique(np.array(numbers, np.int64)[made_by[sampled]], return_inverse=True)[1]
    return ids, made_by, logprobs, number
