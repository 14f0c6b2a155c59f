"""The token stream of one episode: append-only, and the only source of what training sees (TITO).

Sampled tokens enter as the engine's `Completion` and nothing else; text can only become prompt, environment, repair or
demonstration tokens. Whatever happens to the stream is one `Edit`, applied to ids, origins, log-probs, turns and routes
together, so that they can't disagree. Loss mask, turn table and messages are views of what is here.

Shapes: T tokens of the stream, L MoE layers, K experts per token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_t1.rollout.engine.completion import Completion
from megatron_t1.trajectory.record import Header, Origin, Trajectory
from megatron_t1.trajectory.routes import RouteShape

_FIRST_CAPACITY = 256
_GROWTH = 4  # capacity grows by a quarter: 11 bytes per token then occupy at most 14
_NOTHING = np.empty(0, np.int32)
MAX_TURN = np.iinfo(np.uint16).max


class EditKind(IntEnum):
    """What can happen to a stream. Only the last two take tokens away, and only from its end."""

    APPEND = 0
    RESUME = 1  # more sampled tokens of the turn at the end
    ABORT = 2  # the turn at the end is dropped, to be sampled again
    TRUNCATE = 3  # the stream is cut to a length


@dataclass(frozen=True)
class Edit:
    """One change of the stream: from position `start` on, `removed` tokens were replaced by `inserted` ones.

    `origin` is that of the inserted tokens (None without any), `turn` the assistant turn concerned.
    """

    kind: EditKind
    start: int
    removed: int
    inserted: int
    origin: Origin | None
    turn: int


class TokenStream:
    """Builds one trajectory.

    Args:
        route_shape: the model's experts; None when routes are not recorded.
        policy: version of the policy that samples.

    Attributes:
        policy: version that the next turn is sampled by; every turn keeps the one it was sampled by.
        route_overlap: rows that the engine returned again for positions already recorded.
        route_differences: of those, rows whose set of experts differs in some layer; the first recording stays.
    """

    def __init__(self, route_shape: RouteShape | None = None, *, policy: int = 0):
        self.route_shape = route_shape
        self.policy = policy
        self.route_overlap = 0
        self.route_differences = 0
        self._length = 0
        self._ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._origin = np.empty(_FIRST_CAPACITY, np.uint8)
        self._turn = np.empty(_FIRST_CAPACITY, np.uint16)
        self._logprobs = np.empty(_FIRST_CAPACITY, np.float32)
        self._routes = None
        if route_shape is not None:
            shape = (_FIRST_CAPACITY, route_shape.num_moe_layers, route_shape.top_k)
            self._routes = np.zeros(shape, route_shape.dtype)
        self._routed = 0  # rows of routes are recorded from position 0 up to here, without gaps
        self._turn_starts, self._turn_policies = array("l"), array("l")
        self._routed_before = array("l")  # what was recorded when each turn began: an aborted turn takes back its rows
        self._edits = array("l")

    def __len__(self) -> int:
        return self._length

    @property
    def turns(self) -> int:
        """Assistant turns in the stream."""
        return len(self._turn_starts)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Version of the policy that sampled each turn (prime-rl#1650)."""
        return tuple(self._turn_policies)

    @property
    def edits(self) -> list[Edit]:
        """Everything that happened to the stream, in order."""
        rows = np.array(self._edits, np.int64).reshape(-1, 6).tolist()
        return [
            Edit(EditKind(kind), start, removed, inserted, Origin(origin) if inserted else None, turn)
            for kind, start, removed, inserted, origin, turn in rows
        ]

    @property
    def ids(self) -> np.ndarray:
        """int32 [T], a read-only view."""
        view = self._ids[: self._length]
        view.flags.writeable = False
        return view

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the engine sampled: what the loss mask of the record will count."""
        return int((self._origin[: self._length] == Origin.SAMPLED).sum())

    @property
    def routes_from(self) -> int | None:
        """First position without recorded experts: where the next request starts asking (vllm#57966)."""
        return None if self._routes is None else self._routed

    @property
    def nbytes(self) -> int:
        """Bytes that ids, origins, log-probs, turns and edits occupy, spare capacity included; without routes."""
        fields = (self._ids, self._origin, self._turn, self._logprobs)
        tables = (self._turn_starts, self._turn_policies, self._routed_before, self._edits)
        return sum(field.nbytes for field in fields) + sum(len(table) * table.itemsize for table in tables)

    def append(self, ids: np.ndarray, origin: Origin) -> None:
        """Append tokens that nobody sampled: PROMPT before the first turn, ENVIRONMENT and REPAIR after a turn.

        Raises:
            ValueError: for SAMPLED and DEMONSTRATION, which have their own methods, or tokens in the wrong place.
        """
        if origin not in (Origin.PROMPT, Origin.ENVIRONMENT, Origin.REPAIR):
            raise ValueError(f"{Origin(origin).name} tokens are not appended from text")
        if (origin == Origin.PROMPT) != (self.turns == 0):
            raise ValueError(f"{Origin(origin).name} tokens after {self.turns} turns")
        self._apply_edit(EditKind.APPEND, self._length, _tokens(ids), origin)

    def append_sampled(self, completion: Completion, *, resumes: bool = False) -> None:
        """Append the next assistant turn and merge the routes that came with it.

        Args:
            resumes: the completion goes on with the turn at the end of the stream instead of beginning one.

        Raises:
            TypeError: for anything but the engine's own result.
            ValueError: the completion answers another stream than this one, its routes leave a gap, or there is no
                turn to resume (none at the end, or one sampled by another version of the policy).
        """
        if type(completion) is not Completion:
            raise TypeError("sampled tokens are the engine's Completion and nothing else")
        if completion.prompt_length != self._length:
            raise ValueError(
                f"the completion continues a stream of {completion.prompt_length} tokens, this one has {self._length}"
            )
        self._require_routes(completion)
        if resumes:
            if not self._length or self._origin[self._length - 1] != Origin.SAMPLED:
                raise ValueError("no sampled turn stands at the end of the stream")
            if self._turn_policies[-1] != self.policy:
                raise ValueError(f"turn of policy {self._turn_policies[-1]} can't be resumed by policy {self.policy}")
            kind = EditKind.RESUME
        else:
            self._begin_turn()
            kind = EditKind.APPEND
        self._apply_edit(kind, self._length, completion.ids, Origin.SAMPLED, completion.logprobs)
        if self._routes is not None:
            self._merge_routes(completion.routes, completion.routes_start)

    def append_demonstration(self, ids: np.ndarray) -> None:
        """Append an assistant turn written by a scripted policy: trained on by SFT, without log-probs and routes."""
        ids = _tokens(ids)
        self._begin_turn()
        self._apply_edit(EditKind.APPEND, self._length, ids, Origin.DEMONSTRATION)

    def abort_turn(self) -> int:
        """Drop the turn at the end of the stream, so that it is sampled again; return how many tokens went.

        Routes and policy version that came with it go too: nothing of it is left but the edit. Where the stream doesn't
        end in a turn (its request failed before anything came), only the edit is recorded.
        """
        start = self._length
        if self._length and self._origin[self._length - 1] in (Origin.SAMPLED, Origin.DEMONSTRATION):
            start = self._turn_starts[-1]
            self._routed = min(self._routed, self._routed_before[-1])
        removed = self._length - start
        self._apply_edit(EditKind.ABORT, start)
        return removed

    def truncate(self, length: int) -> int:
        """Cut the stream to its first `length` tokens (at least 1); return how many went (verifiers#1394).

        Turns that begin after the cut are gone; one that is cut in its middle stays, without an end.
        """
        if not 1 <= length <= self._length:
            raise ValueError(f"can't cut {self._length} tokens to {length}")
        removed = self._length - length
        self._apply_edit(EditKind.TRUNCATE, length)
        return removed

    def finish(self, header: Header) -> Trajectory:
        """The immutable record of what was appended."""
        end = self._length
        return Trajectory(
            header=header,
            ids=self._ids[:end].copy(),
            origin=self._origin[:end].copy(),
            turn=self._turn[:end].copy(),
            logprobs=self._logprobs[:end].copy(),
            routes=None if self._routes is None else self._routes[:end].copy(),
            routed=np.arange(end) < self._routed,
        )

    def _begin_turn(self) -> None:
        if self._length == 0:
            raise ValueError("a turn needs a prompt before it")
        if self.turns > MAX_TURN:
            raise ValueError(f"more than {MAX_TURN + 1} turns")
        self._turn_starts.append(self._length)
        self._turn_policies.append(self.policy)
        self._routed_before.append(self._routed)

    def _apply_edit(
        self,
        kind: EditKind,
        start: int,
        ids: np.ndarray = _NOTHING,
        origin: Origin = Origin.PROMPT,
        logprobs: np.ndarray | None = None,
    ) -> None:
        """The one place where the stream changes: what stands at `start` and after it becomes `ids`."""
        removed, end = self._length - start, start + len(ids)
        if removed:
            while self._turn_starts and self._turn_starts[-1] >= start:
                for table in (self._turn_starts, self._turn_policies, self._routed_before):
                    table.pop()
            if self._routes is not None:
                self._routed = min(self._routed, start)
                self._routes[self._routed : self._length] = 0
        turn = max(0, self.turns - 1)
        self._reserve(end)
        self._ids[start:end] = ids
        self._origin[start:end] = origin
        self._turn[start:end] = turn
        self._logprobs[start:end] = np.nan if logprobs is None else logprobs
        self._length = end
        concerned = self.turns if kind == EditKind.ABORT else turn
        self._edits.extend((kind, start, removed, len(ids), origin, concerned))

    def _reserve(self, length: int) -> None:
        capacity = len(self._ids)
        if length <= capacity:
            return
        capacity = max(length, capacity + capacity // _GROWTH)
        for name in ("_ids", "_origin", "_turn", "_logprobs", "_routes"):
            old = getattr(self, name)
            if old is not None:
                new = np.zeros((capacity, *old.shape[1:]), old.dtype)
                new[: self._length] = old[: self._length]
                setattr(self, name, new)

    def _require_routes(self, completion: Completion) -> None:
        if self._routes is None:
            return
        if completion.routes is None:
            raise ValueError("the engine returned no routes for a stream that records them")
        start, end = completion.routes_start, completion.routes_start + len(completion.routes)
        expected = self._length + len(completion) - 1
        if start > self._routed:
            raise ValueError(f"routes start at position {start}, recorded are those up to {self._routed}")
        if end != expected:
            raise ValueError(f"routes end at position {end}, the last sampled token is at {expected}")

    def _merge_routes(self, rows: np.ndarray, start: int) -> None:
        """Write rows by absolute position; a position recorded before keeps its first row (NeMo-RL#3485).

        A prefix that the engine computed again can flip near ties in bf16, so the row of the computation whose
        key-value state later tokens first read is the one that counts; differences are only counted.
        """
        again = min(self._routed - start, len(rows))
        if again:
            old = self._routes[start : start + again]
            self.route_overlap += again
            differs = (np.sort(old, axis=2) != np.sort(rows[:again], axis=2)).any(axis=(1, 2))
            self.route_differences += int(differs.sum())
        end = start + len(rows)
        self._routes[start + again : end] = rows[again:]
        self._routed = max(self._routed, end)


def _tokens(ids: np.ndarray) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.dtype != np.int32:
        raise ValueError(f"token ids must be int32 [n], got {ids.dtype} {ids.shape}")
    return ids
