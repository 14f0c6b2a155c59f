"""An episode of a task of several steps: one sandbox and one token stream, a verdict after each step.

Between two steps the agent's processes end, the step's own tests run, the next instruction is appended to the stream
as a message of the user, and the next step's files, setup.sh and healthcheck come before the agent goes on. Turns,
tokens and the agent's time are the episode's; a step's own time limit ends the step alone.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.environment.steps import begin_step, below_minimum, combined, not_ready, recordable
from megatron_t1.environment.task import Task
from megatron_t1.rollout.budget import EpisodeLimits, within
from megatron_t1.rollout.samplers import Sampler
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.timing import timed
from megatron_t1.trajectory.record import EndReason, StepOutcome, Verdict


class Played(Protocol):
    """What is needed of `rollout.agent.Episode`."""

    sandbox: Sandbox
    sampler: Sampler
    stream: TokenStream
    limits: EpisodeLimits
    end_reason: str
    verdict: Verdict | None
    steps: list[StepOutcome]
    timings_s: dict[str, float]

    async def turns(self, task: Task, budget_s: float, *, last: bool) -> str: ...

    async def score(self, verify: Any, task: Task) -> Verdict | None: ...

    def instruct(self, text: str) -> bool: ...


async def play_steps(episode: Played, task: Task, verify: Any) -> None:
    """Play all steps that are reached; sets the episode's `end_reason`, `verdict` and `steps`.

    Raises:
        SandboxLost, EngineRequestFailed, ConversationRefused: see `rollout.agent.run_episode`.
    """
    left_s, stages = episode.limits.agent_timeout_s, task.stages
    for number, stage in enumerate(stages):
        last = number + 1 == len(stages)
        if number and not episode.instruct(stage.instruction):
            episode.end_reason = EndReason.TOKEN_LIMIT
            break
        if problem := await _begin(episode, task, number):
            episode.end_reason = EndReason.STEP_NOT_READY
            episode.steps.append(StepOutcome(stage.step, 0, episode.end_reason, not_ready(problem)))
            break
        before, began = episode.stream.turns, time.monotonic() + episode.sampler.earlier_s
        end = await episode.turns(stage, left_s, last=last)
        left_s -= time.monotonic() + episode.sampler.earlier_s - began
        verdict = await episode.score(verify, stage)
        if verdict is not None:
            verdict = recordable(verdict, episode.steps)
        episode.steps.append(StepOutcome(stage.step, episode.stream.turns - before, end, verdict))
        episode.end_reason = end
        if last or (verdict is not None and not verdict.trusted):
            break
        if verdict is not None and below_minimum(task.steps[number], verdict):
            episode.end_reason = EndReason.MIN_REWARD
            break
        if end := _end_of_episode(episode, end, left_s):
            episode.end_reason = end
            break
    if verify is not None:
        episode.verdict = combined(task, episode.steps)


async def _begin(episode: Played, task: Task, number: int) -> str:
    limit_s = episode.limits.start_timeout_s
    with timed(episode.timings_s, "sandbox"):
        beginning = begin_step(episode.sandbox, task, number, limit_s)
        return await within(2 * limit_s + episode.limits.teardown_timeout_s, beginning, "the start of a step")


def _end_of_episode(episode: Played, end: str, left_s: float) -> str:
    """Why no step follows one that ended by `end`; "" when one does."""
    if end not in (EndReason.SUBMITTED, EndReason.AGENT_TIMEOUT):
        return end
    if left_s <= 0:
        return EndReason.AGENT_TIMEOUT
    return EndReason.TURN_LIMIT if episode.stream.turns >= episode.limits.max_turns else ""
