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

from megatron_t1.environment.reward import Reward
from megatron_t1.environment.sandbox.interface import CommandResult, Sandbox, SandboxLost
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.rollout.budget import EpisodeLimits, within
from megatron_t1.rollout.engine.completion import EngineRoutes
from megatron_t1.rollout.engine.errors import EngineRequestFailed
from megatron_t1.rollout.formats import (
    ChatFormat,
    Command,
    Conversation,
    ConversationRefused,
    FormatProblem,
    Submit,
)
from megatron_t1.rollout.samplers import NoRoom, Sampler
from megatron_t1.rollout.stream import EditKind, TokenStream
from megatron_t1.trajectory.record import EndReason, Header, Origin, Trajectory, Verdict

FORMAT_PROBLEMS_IN_A_ROW = 3  # a policy that has lost the format gains nothing from more turns; ours
TURN_ATTEMPTS = 2  # a turn whose request failed is sampled again before the whole episode is; ours
Verifier = Callable[[Sandbox, Task, float], Awaitable[Verdict]]


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
    route_shape: EngineRoutes | None = None,
    verify: Verifier | None = None,
    reward: Reward | None = None,
) -> Trajectory:
    """Play one episode to its record.

    A lost sandbox or a failed request is no result of the agent. A turn whose request failed is sampled again, and
    nothing of the failed one stays. When that fails too, or the sandbox is lost, the episode is played once more from
    the start, and when it is lost again, the record's verdict is untrusted (rllm#677). So is that of a conversation
    which its chat format refuses to continue.

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
                await episode.score(verify)
            break
        except (SandboxLost, EngineRequestFailed) as error:
            episode.lost(error)
        except ConversationRefused as error:
            episode.untrusted(EndReason.CONVERSATION_REFUSED, error)
            break
    return episode.finish(reward)


class _Episode:
    def __init__(
        self,
        attempt: Attempt,
        sandbox: Sandbox,
        sampler: Sampler,
        chat: ChatFormat,
        limits: EpisodeLimits,
        route_shape: EngineRoutes | None,
    ):
        self.attempt, self.sandbox, self.sampler, self.chat, self.limits = attempt, sandbox, sampler, chat, limits
        self.stream = TokenStream(route_shape, policy=attempt.policy)
        self.counts: Counter[str] = Counter()
        self.timings_s: dict[str, float] = {}
        self.end_reason = ""
        self.verdict: Verdict | None = None
        self._began = time.monotonic()

    async def play(self) -> None:
        """Turns until the agent submits or a limit ends the episode; sets `end_reason`."""
        task, limits = self.attempt.task, self.limits
        conversation = opening(task, self.chat, limits.max_context)
        self.stream.append(conversation.prompt, Origin.PROMPT)
        with self.timed("sandbox"):
            await within(limits.start_timeout_s, self.sandbox.start(task), "the sandbox's start")
        began, limit_s = time.monotonic(), min(limits.agent_timeout_s, task.agent_timeout_s)
        deadline, problems_in_a_row = began + limit_s, 0
        while True:
            room = min(limits.max_tokens_per_turn, limits.max_context - len(self.stream))
            try:
                sampled = await self._sample(room, deadline)
            except TimeoutError:
                self.stream.abort_turn()
                self.end_reason = EndReason.AGENT_TIMEOUT
                return
            except NoRoom:
                self.end_reason = EndReason.TOKEN_LIMIT
                return
            deadline = began + limit_s - self.sampler.earlier_s
            action = self.chat.parse(sampled)
            early = self.stream.turns < limits.min_turns
            if isinstance(action, Submit) and not early:
                self.end_reason = EndReason.SUBMITTED
                return
            if isinstance(action, Command):
                problems_in_a_row = 0
                observation = await self._run(action.text, deadline)
            elif isinstance(action, Submit):
                problems_in_a_row = 0
                self.counts["early_submissions"] += 1
                observation = "error not finished"
            else:
                problems_in_a_row += 1
                observation = self._format_problem(action)
            self.end_reason = self._limit_reached(0, deadline, problems_in_a_row)
            if self.end_reason:
                return
            reply = conversation.reply(observation, sampled)
            self.end_reason = self._limit_reached(sum(len(span.ids) for span in reply), deadline, problems_in_a_row)
            if self.end_reason:
                return
            for span in reply:
                self.stream.append(span.ids, span.origin)

    async def score(self, verify: Verifier) -> None:
        """Count what was achieved, in the verifier's own time; sets `verdict`."""
        task, limits = self.attempt.task, self.limits
        limit = min(limits.verifier_timeout_s, task.verifier_timeout_s)
        with self.timed("verifier"):
            verifying = verify(self.sandbox, task, limit)
            self.verdict = await within(limit + limits.teardown_timeout_s, verifying, "the verifier")

    def lost(self, error: T1Error) -> None:
        lost_sandbox = isinstance(error, SandboxLost)
        self.untrusted(EndReason.SANDBOX_LOST if lost_sandbox else EndReason.ENGINE_LOST, error)

    def untrusted(self, end_reason: str, error: T1Error) -> None:
        self.end_reason = end_reason
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
        if self.sampler.continued_turns:
            counts["continued_turns"] = self.sampler.continued_turns
            self.timings_s["engine"] = self.timings_s.get("engine", 0.0) + self.sampler.earlier_s
        pays = reward is not None and self.verdict is not None and self.verdict.trusted
        known = self.attempt.task.baseline_checks
        if pays and known is None and getattr(reward, "needs_baseline", False):
            pays = False  # of an evaluation; the tasks of a rollout are looked at before it starts
        header = Header(
            trajectory_id=self.attempt.trajectory_id,
            task=self.attempt.task.name,
            attempt=self.attempt.attempt,
            iteration=self.attempt.iteration,
            policy_versions=self.stream.policy_versions if self.sampler.contract is not None else (),
            end_reason=self.end_reason,
            verdict=self.verdict,
            reward=reward(self.verdict, known) if pays else {},
            contract=self.sampler.contract,
            counts=counts,
            timings_s={name: round(seconds, 6) for name, seconds in self.timings_s.items()},
            extra=self._extra(),
        )
        return self.stream.finish(header)

    def _extra(self) -> dict[str, Any]:
        """Edits that the record doesn't show (turns that were begun and are not in it), and which template spoke."""
        edits = [edit for edit in self.stream.edits if edit.kind in (EditKind.ABORT, EditKind.TRUNCATE)]
        rows = [{"kind": e.kind.name.lower(), "start": e.start, "removed": e.removed, "turn": e.turn} for e in edits]
        template = getattr(self.chat, "template_sha256", "")  # formats that are code have none
        return {**({"edits": rows} if rows else {}), **({"template_sha256": template} if template else {})}

    async def _sample(self, room: int, deadline: float) -> np.ndarray:
        """The next turn's ids; a failed request is repeated from the same tokens (nothing of it is in the stream)."""
        attempt = 0
        while True:
            attempt += 1
            try:
                with self.timed("engine"):
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        return await self.sampler.next_turn(self.stream, room)
            except EngineRequestFailed:
                self.stream.abort_turn()
                self.counts["aborted_turns"] += 1
                if attempt == TURN_ATTEMPTS:
                    raise

    async def _run(self, command: str, deadline: float) -> str:
        timeout_s = min(self.limits.command_timeout_s, deadline - time.monotonic())
        if timeout_s <= 0:
            return ""  # the deadline ends the episode before anybody reads this
        with self.timed("commands"):
            running = self.sandbox.run(command, timeout_s)
            result = await within(timeout_s + self.limits.teardown_timeout_s, running, "a command")
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
        if problems_in_a_row >= FORMAT_PROBLEMS_IN_A_ROW and self.stream.turns >= self.limits.min_turns:
            return EndReason.FORMAT_ERROR
        return ""

    def timed(self, name: str) -> Any:
        return _Timer(self.timings_s, name)


def opening(task: Task, chat: ChatFormat, max_context: int) -> Conversation:
    """The conversation that a task begins.

    Raises:
        T1Error: the tokens before its first turn leave no room for a turn.
    """
    conversation = chat.begin(task.instruction)
    if len(conversation.prompt) >= max_context:
        raise T1Error(
            f"the instruction has {len(conversation.prompt)} tokens, the context {max_context}",
            where=f"task {task.name}",
            remedy="raise rollout.max_context or remove the task",
        )
    return conversation


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
