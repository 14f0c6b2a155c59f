"""The token stream of one episode: append-only, and the only source of what training sees (TITO).

Sampled tokens enter as the engine's `Completion` and nothing else; text can only become prompt, environment, repair or
demonstration tokens. Every append states origin and turn, so loss mask and turn table are never derived from text.

Shapes: T tokens of the stream, L MoE layers, K experts per token.
"""

from __future__ import annotations

import numpy as np

from megatron_t1.rollout.engine.completion import Completion, RouteShape
from megatron_t1.trajectory.record import Header, Origin, Trajectory

_FIRST_CAPACITY = 256
MAX_TURN = np.iinfo(np.uint16).max


class TokenStream:
    """Builds one trajectory.

    Args:
        route_shape: the model's experts; None when routes are not recorded.

    Attributes:
        turns: assistant turns appended so far.
        route_overlap: rows that the engine returned again for positions already recorded.
        route_differences: of those, rows whose set of experts differs in some layer; the first recording stays.
    """

    def __init__(self, route_shape: RouteShape | None = None):
        self.route_shape = route_shape
        self.turns = 0
        self.route_overlap = 0
        self.route_differences = 0
        self._length = 0
        self._ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._origin = np.empty(_FIRST_CAPACITY, np.uint8)
        self._turn = np.empty(_FIRST_CAPACITY, np.uint16)
        self._logprobs = np.empty(_FIRST_CAPACITY, np.float32)
        self._routed = np.zeros(_FIRST_CAPACITY, bool)
        self._routes = None
        if route_shape is not None:
            shape = (_FIRST_CAPACITY, route_shape.num_moe_layers, route_shape.top_k)
            self._routes = np.zeros(shape, route_shape.dtype)

    def __len__(self) -> int:
        return self._length

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
        if self._routes is None:
            return None
        missing = np.flatnonzero(~self._routed[: self._length])
        return int(missing[0]) if len(missing) else self._length

    def append(self, ids: np.ndarray, origin: Origin) -> None:
        """Append tokens that nobody sampled: PROMPT before the first turn, ENVIRONMENT and REPAIR after a turn.

        Raises:
            ValueError: for SAMPLED and DEMONSTRATION, which have their own methods, or tokens in the wrong place.
        """
        if origin not in (Origin.PROMPT, Origin.ENVIRONMENT, Origin.REPAIR):
            raise ValueError(f"{Origin(origin).name} tokens are not appended from text")
        if (origin == Origin.PROMPT) != (self.turns == 0):
            raise ValueError(f"{Origin(origin).name} tokens after {self.turns} turns")
        self._extend(ids, origin, max(0, self.turns - 1))

    def append_sampled(self, completion: Completion) -> None:
        """Append the next assistant turn and merge the routes that came with it.

        Raises:
            TypeError: for anything but the engine's own result.
            ValueError: the completion answers another stream than this one.
        """
        if type(completion) is not Completion:
            raise TypeError("sampled tokens are the engine's Completion and nothing else")
        if completion.prompt_length != self._length:
            raise ValueError(
                f"the completion continues a stream of {completion.prompt_length} tokens, this one has {self._length}"
            )
        self._begin_turn()
        self._extend(completion.ids, Origin.SAMPLED, self.turns - 1, completion.logprobs)
        if self._routes is not None:
            if completion.routes is None:
                raise ValueError("the engine returned no routes for a stream that records them")
            self._merge_routes(completion.routes, completion.routes_start)

    def append_demonstration(self, ids: np.ndarray) -> None:
        """Append an assistant turn written by a scripted policy: trained on by SFT, without log-probs and routes."""
        self._begin_turn()
        self._extend(ids, Origin.DEMONSTRATION, self.turns - 1)

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
            routed=self._routed[:end].copy(),
        )

    def _begin_turn(self) -> None:
        if self._length == 0:
            raise ValueError("a turn needs a prompt before it")
        if self.turns > MAX_TURN:
            raise ValueError(f"more than {MAX_TURN + 1} turns")
        self.turns += 1

    def _extend(self, ids: np.ndarray, origin: Origin, turn: int, logprobs: np.ndarray | None = None) -> None:
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype != np.int32:
            raise ValueError(f"token ids must be int32 [n], got {ids.dtype} {ids.shape}")
        start, end = self._length, self._length + len(ids)
        self._reserve(end)
        self._ids[start:end] = ids
        self._origin[start:end] = origin
        self._turn[start:end] = turn
        self._logprobs[start:end] = np.nan if logprobs is None else logprobs
        self._length = end

    def _reserve(self, length: int) -> None:
        capacity = len(self._ids)
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        for name in ("_ids", "_origin", "_turn", "_logprobs", "_routed", "_routes"):
            old = getattr(self, name)
            if old is not None:
                new = np.zeros((capacity, *old.shape[1:]), old.dtype)
                new[: self._length] = old[: self._length]
                setattr(self, name, new)

    def _merge_routes(self, rows: np.ndarray, start: int) -> None:
        """Write rows by absolute position; a position recorded before keeps its first row (NeMo-RL#3485).

        A prefix that the engine computed again can flip near ties in bf16, so the row of the computation whose
        key-value state later tokens first read is the one that counts; differences are only counted.
        """
        end = start + len(rows)
        if end != self._length - 1:
            raise ValueError(f"routes end at position {end}, the last sampled token is at {self._length - 1}")
        known = self._routed[start:end]
        if known.any():
            old, again = self._routes[start:end][known], rows[known]
            self.route_overlap += len(old)
            differs = (np.sort(old, axis=2) != np.sort(again, axis=2)).any(axis=(1, 2))
            self.route_differences += int(differs.sum())
        self._routes[start:end][~known] = rows[~known]
        self._routed[start:end] = True
