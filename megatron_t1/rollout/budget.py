"""What bounds an episode: turns, tokens, and a time of its own for each part."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from megatron_t1.config.schema import Config
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.errors import T1Error

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EpisodeLimits:
    """What bounds an episode. Tokens of one trajectory, seconds, characters of an observation.

    The times are budgets of their own, one for each part: what the agent took is never missing to the verifier, and a
    sandbox that doesn't answer within its part is lost (verifiers#1245). At the end of the context an observation that
    doesn't fit whole is left out and the episode ends there (token_limit); it is verified and scored like any other.
    """

    max_turns: int
    max_context: int
    max_tokens_per_turn: int
    command_timeout_s: float
    agent_timeout_s: float
    verifier_timeout_s: float
    output_limit: int
    min_turns: int = 0
    start_timeout_s: float = 900.0
    teardown_timeout_s: float = 60.0

    @classmethod
    def of(cls, config: Config, *, max_turns: int = 0) -> EpisodeLimits:
        return cls(
            max_turns=max_turns or config.env.max_turns,
            max_context=config.rollout.max_context,
            max_tokens_per_turn=config.rollout.max_tokens_per_turn,
            command_timeout_s=config.env.command_timeout_s,
            agent_timeout_s=config.env.agent_timeout_s,
            verifier_timeout_s=config.env.verifier_timeout_s,
            output_limit=config.env.output_limit,
            min_turns=config.env.min_turns,
            start_timeout_s=config.env.start_timeout_s,
            teardown_timeout_s=config.env.teardown_timeout_s,
        )


async def within(seconds: float, work: Awaitable[Answer], what: str) -> Answer:
    """What `work`, a call of a sandbox, answers.

    One episode's trouble is not the phase's end (SkyRL#1110): when it is everybody's, the share of untrusted verdicts
    fails the phase, with the reason.

    Raises:
        SandboxLost: no answer within the budget, although the call has limits of its own: the sandbox hangs. Or an
            error that is no T1Error: a driver, library or connection of the sandbox failed.
        T1Error: what `work` raises.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise SandboxLost(
            f"{what} did not come to an end within {seconds:g} s", remedy="look at the machine that runs the sandboxes"
        ) from error
    except T1Error:
        raise
    except Exception as error:
        raise SandboxLost(f"{what} failed: {type(error).__name__}: {error}") from error
