"""One episode: a terminal agent in a sandbox, from the instruction to the verdict.

Each assistant turn is one shell command, or the submission. The agent never sees sampled text as anything but a command
to run; what it writes back is appended to the stream as tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_t1.config.schema import Config
from megatron_t1.environment.sandbox.interface import CommandResult, Sandbox, SandboxLost
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.rollout.engine.completion import RouteShape
from megatron_t1.rollout.engine.errors import EngineRequestFailed
from megatron_t1.rollout.formats import ChatFormat, Command, FormatProblem, Submit
from megatron_t1.rollout.samplers import NoRoom, Sampler
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.record import EndReason, Header, Origin, Trajectory, Verdict

FORMAT_PROBLEMS_IN_A_ROW = 3  # a policy that has lost the format gains nothing from more turns; ours
Verifier = Callable[[Sandbox, Task, float], Awaitable[Verdict]]
Reward = Callable[[Verdict], dict[str, float]]


@dataclass(frozen=True)
class EpisodeLimits:
    """What bounds an episode. Tokens of one trajectory, seconds, characters of an observation."""

    max_turns: int
    max_context: int
    max_tokens_per_turn: int
    command_timeout_s: float
    agent_timeout_s: float
    verifier_timeout_s: float
    output_limit: int

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
        )


@dataclass(frozen=True)
class Attempt:
    """Which episode this is: the `attempt`-th try of a task by policy version `policy`."""

    task: Task
    attempt: int
    iteration: int = 0
    policy: int = 0

    @property
    def trajectory_id(self) -> str:
        return f"{self.task.name}-{self.attempt}"


async def run_episode(
    attempt: Attempt,
    sandbox: Sandbox,
    sampler: Callable[[], Sampler],
    chat: ChatFormat,
    limits: EpisodeLimits,
    *,
    route_shape: RouteShape | None = None,
    verify: Verifier | None = None,
    reward: Reward | None = None,
) -> Trajectory:
    """Play one episode to its record.

    A lost sandbox or a failed request is no result of the agent: the episode is played once more from the start, and
    when that is lost too, the record's verdict is untrusted (rllm#677).

    Args:
        sampler: makes the sampler of a fresh play.
        route_shape: the model's experts, when routes are recorded.
        verify: counts passed checks after the agent; None: not verified.
        reward: what a trusted verdict pays; None: nothing.

    Raises:
        T1Error: anything that says something about more than this episode, or that is known before any episode
            (engine gone, a Dockerfile that isn't understood, an instruction that doesn't fit).
    """
    for retries in (0, 1):
        episode = _Episode(attempt, sandbox, sampler(), chat, limits, route_shape)
        episode.counts["retries"] = retries
        try:
            await episode.play()
            if verify is not None:
                with episode.timed("verifier"):
                    episode.verdict = await verify(sandbox, attempt.task, limits.verifier_timeout_s)
            break
        except (SandboxLost, EngineRequestFailed) as error:
            episode.lost(error)
    return episode.finish(reward)


class _Episode:
    def __init__(
        self,
        attempt: Attempt,
        sandbox: Sandbox,
        sampler: Sampler,
        chat: ChatFormat,
        limits: EpisodeLimits,
        route_shape: RouteShape | None,
    ):
        self.attempt, self.sandbox, self.sampler, self.chat, self.limits = attempt, sandbox, sampler, chat, limits
        self.stream = TokenStream(route_shape)
        self.counts: Counter[str] = Counter()
        self.timings_s: dict[str, float] = {}
        self.end_reason = ""
        self.verdict: Verdict | None = None
        self._began = time.monotonic()

    async def play(self) -> None:
        """Turns until the agent submits or a limit ends the episode; sets `end_reason`."""
        task, limits = self.attempt.task, self.limits
        self.stream.append(opening(task, self.chat, limits.max_context), Origin.PROMPT)
        with self.timed("sandbox"):
            await self.sandbox.start(task)
        deadline = time.monotonic() + min(limits.agent_timeout_s, task.agent_timeout_s)
        problems_in_a_row = 0
        while True:
            room = min(limits.max_tokens_per_turn, limits.max_context - len(self.stream))
            try:
                with self.timed("engine"):
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        sampled = await self.sampler.next_turn(self.stream, room)
            except TimeoutError:
                self.end_reason = EndReason.AGENT_TIMEOUT
                return
            except NoRoom:
                self.end_reason = EndReason.TOKEN_LIMIT
                return
            action = self.chat.parse(sampled)
            if isinstance(action, Submit):
                self.end_reason = EndReason.SUBMITTED
                return
            if isinstance(action, Command):
                problems_in_a_row = 0
                observation = await self._run(action.text, deadline)
            else:
                problems_in_a_row += 1
                observation = self._format_problem(action)
            reply = self.chat.reply(observation, sampled)
            self.end_reason = self._limit_reached(sum(len(span.ids) for span in reply), deadline, problems_in_a_row)
            if self.end_reason:
                return
            for span in reply:
                self.stream.append(span.ids, span.origin)

    def lost(self, error: T1Error) -> None:
        lost_sandbox = isinstance(error, SandboxLost)
        self.end_reason = EndReason.SANDBOX_LOST if lost_sandbox else EndReason.ENGINE_LOST
        reason = f"{self.end_reason}: {error}"
        self.verdict = Verdict(0, 0, self.attempt.task.baseline, trusted=False, reason=reason)

    def finish(self, reward: Reward | None) -> Trajectory:
        self.timings_s["total"] = time.monotonic() - self._began
        counts = {
            **self.counts,
            "turns": self.stream.turns,
            "tokens": len(self.stream),
            "sampled_tokens": self.stream.sampled_tokens,
            "cached_tokens": self.sampler.cached_tokens,
            "route_overlap": self.stream.route_overlap,
            "route_differences": self.stream.route_differences,
        }
        pays = reward is not None and self.verdict is not None and self.verdict.trusted
        header = Header(
            trajectory_id=self.attempt.trajectory_id,
            task=self.attempt.task.name,
            attempt=self.attempt.attempt,
            iteration=self.attempt.iteration,
            policy_versions=(self.attempt.policy,) * self.stream.turns if self.sampler.contract is not None else (),
            end_reason=self.end_reason,
            verdict=self.verdict,
            reward=reward(self.verdict) if pays else {},
            contract=self.sampler.contract,
            counts=counts,
            timings_s={name: round(seconds, 6) for name, seconds in self.timings_s.items()},
        )
        return self.stream.finish(header)

    async def _run(self, command: str, deadline: float) -> str:
        timeout_s = min(self.limits.command_timeout_s, deadline - time.monotonic())
        if timeout_s <= 0:
            return ""  # the deadline ends the episode before anybody reads this
        with self.timed("commands"):
            result = await self.sandbox.run(command, timeout_s)
        self.counts["commands"] += 1
        self.counts["command_timeouts"] += result.timed_out
        self.counts["commands_failed"] += result.exit_code != 0
        return observation_text(result, self.limits.output_limit)

    def _format_problem(self, problem: FormatProblem) -> str:
        self.counts["format_errors"] += 1
        self.counts["cut_off_turns"] += problem.cut_off
        return f"error format: {problem.reason}"

    def _limit_reached(self, reply_tokens: int, deadline: float, problems_in_a_row: int) -> str:
        """Why there is no next turn after this one; "" when there is one."""
        if time.monotonic() >= deadline:
            return EndReason.AGENT_TIMEOUT
        if self.stream.turns >= self.limits.max_turns:
            return EndReason.TURN_LIMIT
        if len(self.stream) + reply_tokens >= self.limits.max_context:
            return EndReason.TOKEN_LIMIT
        if problems_in_a_row >= FORMAT_PROBLEMS_IN_A_ROW:
            return EndReason.FORMAT_ERROR
        return ""

    def timed(self, name: str) -> Any:
        return _Timer(self.timings_s, name)


def opening(task: Task, chat: ChatFormat, max_context: int) -> np.ndarray:
    """The tokens before the first turn, int32 [n].

    Raises:
        T1Error: they leave no room for a turn.
    """
    prompt = chat.open(task.instruction)
    if len(prompt) >= max_context:
        raise T1Error(
            f"the instruction has {len(prompt)} tokens, the context {max_context}",
            where=f"task {task.name}",
            remedy="raise rollout.max_context or remove the task",
        )
    return prompt


class _Timer:
    def __init__(self, timings_s: dict[str, float], name: str):
        self.timings_s, self.name = timings_s, name

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_) -> None:
        self.timings_s[self.name] = self.timings_s.get(self.name, 0.0) + time.monotonic() - self.began


def observation_text(result: CommandResult, limit: int) -> str:
    """What the model reads of a command: its output, `ok` for none, `error STATUS ...` for a failure.

    The output is cut to `limit` characters, head and tail are kept.
    """
    output = clip(result.output.rstrip(), limit)
    if result.timed_out:
        return f"error timeout {output}".rstrip()
    if result.exit_code == 0:
        return output or "ok"
    status = "shell ended" if result.exit_code is None else result.exit_code
    return f"error {status} {output}".rstrip()


def clip(text: str, limit: int) -> str:
    """Head and tail of a text longer than `limit` characters, with the cut marked."""
    if len(text) <= limit:
        return text
    half = max(1, (limit - 5) // 2)
    return f"{text[:half]} ... {text[-half:]}"
