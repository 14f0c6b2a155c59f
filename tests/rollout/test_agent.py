"""An episode's turns, limits, typed ends and trust, with prepared turns and a sandbox that only answers."""

import asyncio
import dataclasses

import numpy as np
import pytest

from megatron_t1.environment.reward import DenseReward
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost
from megatron_t1.errors import T1Error
from megatron_t1.rollout.agent import TURN_ATTEMPTS, Attempt, run_episode
from megatron_t1.rollout.budget import EpisodeLimits
from megatron_t1.rollout.engine.errors import EngineLost, EngineRequestFailed
from megatron_t1.rollout.formats import ConversationRefused
from megatron_t1.rollout.observation import observation_text
from megatron_t1.rollout.samplers import ScriptedSampler
from megatron_t1.trajectory.record import EndReason, Origin, Verdict
from megatron_t1.trajectory.selection import trainable
from megatron_t1.trajectory.validation import validate
from tests.rollout.conftest import SHAPE, FakeSampler, FakeSandbox

LIMITS = EpisodeLimits(
    max_turns=4,
    max_context=400,
    max_tokens_per_turn=40,
    command_timeout_s=5,
    agent_timeout_s=60,
    verifier_timeout_s=5,
    output_limit=50,
)


async def passes_two(sandbox, task, timeout_s):
    return Verdict(2, 4, 1, trusted=True)


def play(task, chat, turns, *, sandbox=None, limits=LIMITS, verify=passes_two, routes=False, sampler=None):
    samplers = iter([FakeSampler(part, routes) for part in (turns if isinstance(turns[0], tuple) else [turns])])
    record = asyncio.run(
        run_episode(
            Attempt(task, 3, iteration=7, policy=5),
            sandbox or FakeSandbox(),
            sampler or (lambda: next(samplers)),
            chat,
            limits,
            route_shape=SHAPE if routes else None,
            verify=verify,
            reward=DenseReward(scale=0.25),
        )
    )
    validate(record)
    return record


def test_a_whole_episode(task, chat):
    sandbox = FakeSandbox({"ls": CommandResult(0, "alpha.txt\n"), "cat x": CommandResult(1, "cat: x: missing\n")})
    turns = [chat.command("ls"), chat.command("cat x"), chat.submission()]
    record = play(task, chat, turns, sandbox=sandbox, routes=True)
    assert sandbox.commands == ["ls", "cat x"] and sandbox.starts == 1
    assert chat.decode(record.ids) == (
        "<|im_start|>user\ncreate the file alpha.txt<|im_end|>\n<|im_start|>assistant\n"
        "<tool_call>ls</tool_call><|im_end|>\n<|im_start|>tool\nalpha.txt<|im_end|>\n<|im_start|>assistant\n"
        "<tool_call>cat x</tool_call><|im_end|>\n<|im_start|>tool\nerror 1 cat: x: missing<|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>"
    )
    sampled = record.ids[record.origin == Origin.SAMPLED]
    assert sampled.tolist() == np.concatenate(turns).tolist()  # verl#6719: the very ids, in order
    header = record.header
    assert (header.trajectory_id, header.task, header.attempt, header.iteration) == ("demo-3", "demo", 3, 7)
    assert header.policy_versions == (5, 5, 5) and header.end_reason == EndReason.SUBMITTED
    assert header.reward == {"total": 0.5, "passed": 2.0}
    assert header.counts["commands"] == 2 and header.counts["commands_failed"] == 1
    assert header.counts["sampled_tokens"] == len(sampled)
    assert header.contract is not None


def test_turn_limit_still_runs_the_last_command(task, chat):
    sandbox = FakeSandbox()
    record = play(task, chat, [chat.command(f"echo {n}") for n in range(9)], sandbox=sandbox)
    assert record.header.end_reason == EndReason.TURN_LIMIT and len(sandbox.commands) == 4
    assert record.origin[-1] == Origin.SAMPLED  # nobody reads a reply after the last turn


def test_context_is_never_exceeded(task, chat):
    limits = dataclasses.replace(LIMITS, max_context=70, max_turns=50)
    record = play(task, chat, [chat.command("echo red > docs/alpha.txt")] * 50, limits=limits)
    assert record.header.end_reason == EndReason.TOKEN_LIMIT
    assert len(record) <= 70 and record.header.verdict.trusted


def test_a_turn_cut_at_the_token_limit_is_told_and_goes_on(task, chat):  # mini-swe-agent#851
    limits = dataclasses.replace(LIMITS, max_tokens_per_turn=6)
    long = chat.command("echo red > docs/alpha.txt and more")
    record = play(task, chat, [long, chat.submission()], limits=limits)
    assert record.header.counts["format_errors"] == record.header.counts["cut_off_turns"] == 1
    assert record.header.end_reason == EndReason.SUBMITTED
    text = chat.decode(record.ids)
    assert "<|im_end|>\n<|im_start|>tool\nerror format: turn cut off<|im_end|>" in text
    assert (record.origin == Origin.REPAIR).sum() == 2  # the synthetic terminator and its newline carry no loss


def test_three_format_problems_in_a_row_end_the_episode(task, chat):
    broken = chat.command("ls")[1:]  # no opening marker
    record = play(task, chat, [broken, chat.command("ls"), broken, broken, broken], limits=LIMITS)
    assert record.header.end_reason == EndReason.TURN_LIMIT
    record = play(task, chat, [broken] * 4)
    assert record.header.end_reason == EndReason.FORMAT_ERROR and record.header.counts["turns"] == 3
    assert record.header.verdict.trusted and record.header.reward["total"] == 0.5  # what was achieved still counts


def test_agent_timeout_is_typed_and_verified(task, chat):  # rllm#710
    async def never():
        await asyncio.sleep(600)

    limits = dataclasses.replace(LIMITS, agent_timeout_s=1.0)
    record = play(task, chat, [chat.command("ls"), never], limits=limits)
    assert record.header.end_reason == EndReason.AGENT_TIMEOUT
    assert record.header.verdict.trusted and record.header.counts["turns"] == 1
    assert trainable(record, timed_out_policy="score") is None
    assert trainable(record, timed_out_policy="exclude") == "agent_timeout"


def test_the_tasks_own_limit_counts(task, chat):
    async def never():
        await asyncio.sleep(60)

    short = dataclasses.replace(task, agent_timeout_s=0.1)
    assert play(short, chat, [never]).header.end_reason == EndReason.AGENT_TIMEOUT


def test_a_sandbox_that_never_starts_leaves_an_untrusted_record(task, chat):
    record = play(task, chat, [(), ()], sandbox=FakeSandbox(lost_starts=2))
    assert record.header.end_reason == EndReason.SANDBOX_LOST and record.header.counts["turns"] == 0
    assert not record.header.verdict.trusted and "the sandbox is gone" in record.header.verdict.reason


def test_a_lost_sandbox_is_tried_once_more_from_the_start(task, chat):
    sandbox = FakeSandbox(lost_starts=1)
    record = play(task, chat, [(), (chat.submission(),)], sandbox=sandbox)
    assert record.header.end_reason == EndReason.SUBMITTED and record.header.counts["retries"] == 1
    assert sandbox.starts == 2 and record.header.counts["turns"] == 1


@pytest.mark.parametrize(
    "failure, end_reason",
    [(SandboxLost("gone"), EndReason.SANDBOX_LOST), (EngineRequestFailed("slow"), EndReason.ENGINE_LOST)],
)
def test_lost_twice_is_untrusted_and_never_zero(task, chat, failure, end_reason):  # rllm#677, verifiers#1665
    part = (chat.command("ls"), *[failure] * TURN_ATTEMPTS)
    record = play(task, chat, [part, part])
    verdict = record.header.verdict
    assert record.header.end_reason == end_reason
    assert not verdict.trusted and failure.problem in verdict.reason
    assert record.header.reward == {}
    assert trainable(record) == "infrastructure_lost"


def test_a_sandbox_lost_during_verification_is_untrusted(task, chat):
    async def lost(sandbox, task, timeout_s):
        raise SandboxLost("gone while verifying")

    record = play(task, chat, [(chat.submission(),), (chat.submission(),)], verify=lost)
    assert record.header.end_reason == EndReason.SANDBOX_LOST and record.header.reward == {}


def test_an_untrusted_verdict_pays_nothing(task, chat):  # strands-env#183
    async def missing(sandbox, task, timeout_s):
        return Verdict(0, 0, -1, trusted=False, reason="no result file")

    record = play(task, chat, [chat.submission()], verify=missing)
    assert record.header.reward == {} and record.header.end_reason == EndReason.SUBMITTED


def test_a_lost_engine_ends_the_phase(task, chat):
    with pytest.raises(EngineLost):
        play(task, chat, [EngineLost("the engine ended with status 137")])


def test_a_turn_whose_request_failed_is_sampled_again_and_leaves_nothing(task, chat):
    turns = [chat.command("ls"), chat.command("cat x"), chat.submission()]
    plain = play(task, chat, turns, routes=True)
    failing = [turns[0], EngineRequestFailed("aborted"), turns[1], EngineRequestFailed("slow"), turns[2]]
    sandbox = FakeSandbox()
    again = play(task, chat, failing, sandbox=sandbox, routes=True)
    for name, array in plain.arrays().items():
        np.testing.assert_array_equal(array, again.arrays()[name])
    assert sandbox.starts == 1 and sandbox.commands == ["ls", "cat x"]  # the episode goes on, nothing is run twice
    assert again.header.counts["aborted_turns"] == 2 and again.header.counts["retries"] == 0
    first = int((again.turn <= 0).sum())
    assert again.header.extra["edits"][0] == {"kind": "abort", "start": first, "removed": 0, "turn": 1}
    assert "edits" not in plain.header.extra


def test_an_answer_that_comes_after_the_deadline_is_not_in_the_record(task, chat):
    """The turn was being sampled when the agent's time was over: nothing of it stays but the note."""

    async def late():
        await asyncio.sleep(600)
        return chat.command("late")

    limits = dataclasses.replace(LIMITS, agent_timeout_s=1.0)
    record = play(task, chat, [chat.command("ls"), late], limits=limits)
    assert record.header.policy_versions == (5,) and "late" not in chat.decode(record.ids)
    assert [edit["kind"] for edit in record.header.extra["edits"]] == ["abort"]


def test_every_turn_carries_the_version_that_sampled_it(task, chat):  # prime-rl#1650, NeMo-RL#4018
    class Updated(FakeSampler):
        async def next_turn(self, stream, max_tokens):
            stream.policy = 5 + stream.turns  # new weights between the turns
            return await super().next_turn(stream, max_tokens)

    turns = [chat.command("ls"), EngineRequestFailed("weights are being updated"), chat.submission()]
    record = play(task, chat, [()], sampler=lambda: Updated(turns))
    assert record.header.policy_versions == (5, 6)


def test_a_conversation_that_its_format_refuses_is_untrusted(task, chat):
    class Refusing:
        def __init__(self, chat):
            self.__dict__ = dict(chat.__dict__)
            self.parse, self.chat = chat.parse, chat

        def begin(self, instruction):
            conversation = self.chat.begin(instruction)

            def refuse(observation, sampled_ids):
                raise ConversationRefused("token 7 differs")

            conversation.reply = refuse
            return conversation

    record = play(task, Refusing(chat), [chat.command("ls"), chat.submission()])
    verdict = record.header.verdict
    assert record.header.end_reason == EndReason.CONVERSATION_REFUSED and record.header.reward == {}
    assert not verdict.trusted and "token 7 differs" in verdict.reason
    assert record.header.counts["retries"] == 0 and record.header.counts["turns"] == 1
    assert trainable(record) is not None


def test_an_instruction_longer_than_the_context_is_an_error(task, chat):
    with pytest.raises(T1Error, match="the context 10") as caught:
        play(task, chat, [chat.submission()], limits=dataclasses.replace(LIMITS, max_context=10))
    assert "demo" in caught.value.where


def test_demonstrations_use_the_same_loop(task, chat):
    sandbox = FakeSandbox()
    script = lambda: ScriptedSampler(chat, ["ls", "cat x"])  # noqa: E731
    record = play(task, chat, [()], sandbox=sandbox, sampler=script, verify=None)
    assert sandbox.commands == ["ls", "cat x"] and record.header.end_reason == EndReason.SUBMITTED
    assert set(record.origin.tolist()) == {Origin.PROMPT, Origin.DEMONSTRATION, Origin.ENVIRONMENT, Origin.REPAIR}
    assert record.header.contract is None and record.header.verdict is None and record.header.reward == {}
    trained = record.ids[record.loss_mask]
    assert trained.tolist() == [*chat.command("ls"), *chat.command("cat x"), *chat.submission()]


@pytest.mark.parametrize(
    "result, text",
    [
        (CommandResult(0, ""), "ok"),
        (CommandResult(0, "a\n\n"), "a"),
        (CommandResult(2, ""), "error 2"),
        (CommandResult(127, "ls: not found\n"), "error 127 ls: not found"),
        (CommandResult(None, "part", timed_out=True), "error timeout part"),
        (CommandResult(None, ""), "error shell ended"),
        (CommandResult(0, "x" * 30 + "y" * 30), "x" * 7 + " ... " + "y" * 7),
    ],
)
def test_observations(result, text):
    assert observation_text(result, 20) == text
