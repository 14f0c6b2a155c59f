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
from megatron_t1.environment.sandbox.interface import Sandbox, SandboxLost
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
    Span,
    Submit,
)
from megatron_t1.rollout.observation import observation_text
from megatron_t1.rollout.samplers import NoRoom, Sampler
from megatron_t1.rollout.steps import play_steps
from megatron_t1.rollout.stream import EditKind, TokenStream
from megatron_t1.timing import timed
from megatron_t1.trajectory.record import EndReason, Header, Origin, StepOutcome, Trajectory, Verdict

FORMAT_PROBLEMS_IN_A_ROW = 3  # a policy that has lost the format gains nothing from more turns; ours
TURN_ATTEMPTS = 2  # a turn whose request failed is sampled again before the whole episode is; ours
NEVER_SAMPLED = np.empty(0, np.int32)
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
        verify: counts passed checks after the agent, or after each of its steps; None: not verified.
        reward: what a trusted verdict pays; None: nothing.

    Raises:
        T1Error: anything that says something about more than this episode, or that is known before any episode
            (engine gone, a Dockerfile that isn't understood, an instruction that doesn't fit).
    """
    for retries in (0, 1):
        episode = Episode(attempt, sandbox, sampler(), chat, limits, route_shape)
        episode.counts["retries"] = retries
        try:
            await episode.play(verify)
            break
        except (SandboxLost, EngineRequestFailed) as error:
            episode.lost(error)
        except ConversationRefused as error:
            episode.untrusted(EndReason.CONVERSATION_REFUSED, error)
            break
    return episode.finish(reward)


class Episode:
    """One play of an attempt, from `play` to `finish`; `run_episode` says what becomes of one that is lost."""

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
        self.steps: list[StepOutcome] = []
        self.conversation: Conversation | None = None
        self._unanswered: _Unanswered | None = None
        self._began = time.monotonic()

    async def play(self, verify: Verifier | None) -> None:
        """From the sandbox's start to the verdict; sets `end_reason`, `verdict` and `steps`."""
        task, limits = self.attempt.task, self.limits
        self.conversation = opening(task, self.chat, limits.max_context)
        self.stream.append(self.conversation.prompt, Origin.PROMPT)
        with timed(self.timings_s, "sandbox"):
            await within(limits.start_timeout_s, self.sandbox.start(task), "the sandbox's start")
        if task.steps:
            await play_steps(self, task, verify)
            return
        self.end_reason = await self.turns(task, limits.agent_timeout_s)
        self.verdict = await self.score(verify, task)

    async def turns(self, task: Task, budget_s: float, *, last: bool = True) -> str:
        """Turns until the agent submits or a limit ends them; returns the reason. See `instruct` for what comes after.

        Args:
            budget_s: the agent's time; the task's own limit where it is shorter.
            last: whether a submission ends the episode.
        """
        limits = self.limits
        began, limit_s, earlier_s = time.monotonic(), min(budget_s, task.agent_timeout_s), self.sampler.earlier_s
        deadline, problems_in_a_row = began + limit_s, 0
        self._unanswered = None
        while True:
            room = min(limits.max_tokens_per_turn, limits.max_context - len(self.stream))
            try:
                sampled = await self._sample(room, deadline)
            except TimeoutError:
                self.stream.abort_turn()
                return EndReason.AGENT_TIMEOUT
            except NoRoom:
                return EndReason.TOKEN_LIMIT
            deadline = began + limit_s - (self.sampler.earlier_s - earlier_s)
            action = self.chat.parse(sampled)
            early = last and self.stream.turns < limits.min_turns
            self._unanswered = _Unanswered(sampled)
            if isinstance(action, Submit) and not early:
                return EndReason.SUBMITTED
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
            self._unanswered = _Unanswered(sampled, observation)
            if end := self._limit_reached(0, deadline, problems_in_a_row):
                return end
            reply = self.conversation.reply(observation, sampled)
            self._unanswered = _Unanswered(sampled, observation, reply)
            if end := self._limit_reached(_size(reply), deadline, problems_in_a_row):
                return end
            self._append(reply)
            self._unanswered = None

    def instruct(self, text: str) -> bool:
        """Append the next step's instruction as a message of the user; False: there is no room for it and a turn.

        It answers the submission. After the agent's time ran out, a command's output comes first, and the turn that had
        been opened and never sampled is closed by the chat format as one that was cut off at once.
        """
        left, spans = self._unanswered, []
        sampled = left.sampled if left is not None else NEVER_SAMPLED
        if left is not None and left.observation is not None:
            spans += self.conversation.reply(left.observation, sampled) if left.reply is None else left.reply
            sampled = NEVER_SAMPLED
        spans += self.conversation.reply(text, sampled, role="user")
        if len(self.stream) + _size(spans) >= self.limits.max_context:
            return False
        self._append(spans)
        return True

    def _append(self, spans: list[Span]) -> None:
        for span in spans:
            self.stream.append(span.ids, span.origin if self.stream.turns else Origin.PROMPT)

    async def score(self, verify: Verifier | None, task: Task) -> Verdict | None:
        """What was achieved, in the verifier's own time; None where nobody verifies."""
        if verify is None:
            return None
        limit = min(self.limits.verifier_timeout_s, task.verifier_timeout_s)
        with timed(self.timings_s, "verifier"):
            verifying = verify(self.sandbox, task, limit)
            return await within(limit + self.limits.teardown_timeout_s, verifying, "the verifier")

    def lost(self, error: T1Error) -> None:
        lost_sandbox = isinstance(error, SandboxLost)
        self.untrusted(EndReason.SANDBOX_LOST if lost_sandbox else EndReason.ENGINE_LOST, error)

    def untrusted(self, end_reason: str, error: T1Error) -> None:
        self.end_reason = end_reason
        if len(self.steps) < len(self.attempt.task.steps):
            turns = self.stream.turns - sum(step.turns for step in self.steps)
            self.steps.append(StepOutcome(self.attempt.task.steps[len(self.steps)].name, turns, end_reason))
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
        task = self.attempt.task
        known = None if task.baseline_checks is None else task.counted(task.baseline_checks)
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
            steps=(*self.steps, *(StepOutcome(step.name) for step in task.steps[len(self.steps) :])),
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
                with timed(self.timings_s, "engine"):
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
        with timed(self.timings_s, "commands"):
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


def opening(task: Task, chat: ChatFormat, max_context: int) -> Conversation:
    """The conversation that a task begins.

    Raises:
        T1Error: the tokens before its first turn leave no room for a turn.
    """
    conversation = chat.begin(task.instruction)
    if len(conversation.prompt) >= max_context:
        raise T1Error(
            f"the instruction has {len(conversation.prompt)} tokens, the context {max_context}",
            where=f"task {task.name}{f', step {task.step}' if task.step else ''}",
            remedy="raise rollout.max_context or remove the task",
        )
    return conversation


@dataclass(frozen=True)
class _Unanswered:
    """The turn at the end of the stream, and what answers it where something does."""

    sampled: np.ndarray
    observation: str | None = None
    reply: list[Span] | None = None  # the observation's, where the conversation has it already


def _size(spans: list[Span]) -> int:
    return sum(len(span.ids) for span in spans)
