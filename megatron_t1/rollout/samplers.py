"""Who writes the assistant's turns: the engine, or a script (demonstrations)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.engine.errors import EngineAnswerInvalid
from megatron_t1.rollout.formats import ChatFormat
from megatron_t1.rollout.journal import Journal
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import ExchangeSession


class NoRoom(Exception):
    """The next turn needs more tokens than the episode has left."""


class Sampler(Protocol):
    """`contract` is stated in the record's header; None for a script.

    `cached_tokens` counts prompt tokens that were not computed again. `continued_turns` were sampled before the phase
    was started again, and took `earlier_s` seconds then.
    """

    contract: SamplingContract | None
    cached_tokens: int
    continued_turns: int
    earlier_s: float

    async def next_turn(self, stream: TokenStream, max_tokens: int) -> np.ndarray:
        """Append the next turn of at most `max_tokens` tokens to the stream and return its ids, int32 [n].

        Raises:
            NoRoom: a turn that can't be shortened doesn't fit.
            EngineLost, EngineRequestFailed, EngineAnswerInvalid: see `rollout.engine`.
        """


class EngineSampler:
    """Samples from the policy in the engine, asking for the routes of new positions only.

    Args:
        contract: temperature, top-p and stop ids are taken from here, so the record can't state other ones.
        name: trajectory, for error messages.
        seed: of a turn, by its number; None: the engine's own randomness.
        exchange: where the client logs this play of the episode; None: nowhere.
        journal: what was answered in the episode before; None: nothing is kept.
    """

    def __init__(
        self,
        client: EngineClient,
        contract: SamplingContract,
        *,
        name: str = "",
        seed: Callable[[int], int] | None = None,
        exchange: ExchangeSession | None = None,
        journal: Journal | None = None,
    ):
        self.client = client
        self.contract = contract
        self.name = name
        self.seed = seed
        self.exchange = exchange
        self.journal = journal
        self.cached_tokens = 0

    @property
    def continued_turns(self) -> int:
        return self.journal.continued if self.journal is not None else 0

    @property
    def earlier_s(self) -> float:
        return self.journal.earlier_s if self.journal is not None else 0.0

    async def next_turn(self, stream: TokenStream, max_tokens: int) -> np.ndarray:
        completion = await self.client.generate(
            stream.ids,
            max_tokens=max_tokens,
            temperature=self.contract.temperature,
            top_p=self.contract.top_p,
            stop_ids=self.contract.stop_ids,
            seed=None if self.seed is None else self.seed(stream.turns),
            routes_from=stream.routes_from,
            exchange=self.exchange,
            journal=self.journal,
            where=f"{self.name}, turn {stream.turns}",
        )
        self.cached_tokens += completion.cached_tokens
        stream.append_sampled(completion)
        if stream.route_differences and self.contract.engine_dtype == "float32":
            raise EngineAnswerInvalid(
                f"the engine took other experts when it computed {stream.route_differences} tokens again",
                where=f"{self.name}, turn {stream.turns - 1}",
                remedy="in float32 this means other weights or a stale prefix cache; restart the engine",
            )
        return completion.ids


class ScriptedSampler:
    """Plays given commands and then submits; its tokens are demonstrations, not samples."""

    contract = None
    cached_tokens = continued_turns = 0
    earlier_s = 0.0

    def __init__(self, chat: ChatFormat, commands: Sequence[str]):
        self.chat = chat
        self.commands = commands

    async def next_turn(self, stream: TokenStream, max_tokens: int) -> np.ndarray:
        turn = stream.turns
        ids = self.chat.command(self.commands[turn]) if turn < len(self.commands) else self.chat.submission()
        if len(ids) > max_tokens:
            raise NoRoom(f"turn {turn} needs {len(ids)} tokens, {max_tokens} are left")
        stream.append_demonstration(ids)
        return ids
