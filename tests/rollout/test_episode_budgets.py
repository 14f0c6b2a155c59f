"""Every part of an episode has its own time, and what hangs is lost, typed and never a zero."""

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import pytest

from megatron_t1.config.schema import Config
from megatron_t1.config.validate import validate
from megatron_t1.environment.baseline import Baseline, write_baselines
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.reward import DenseReward, GainReward
from megatron_t1.environment.sandbox.interface import CommandResult
from megatron_t1.environment.task import TaskContent
from megatron_t1.errors import T1Error
from megatron_t1.rollout.agent import Attempt, run_episode
from megatron_t1.rollout.budget import EpisodeLimits
from megatron_t1.rollout.plan import rollout_plan
from megatron_t1.rollout.pool import run_pool
from megatron_t1.trajectory.record import EndReason, Origin, Verdict
from megatron_t1.trajectory.selection import trainable
from tests.rollout.conftest import FakeSampler, FakeSandbox

LIMITS = EpisodeLimits(
    max_turns=4, max_context=400, max_tokens_per_turn=40, command_timeout_s=5, agent_timeout_s=60,
    verifier_timeout_s=5, output_limit=50, start_timeout_s=0.2, teardown_timeout_s=0.2,
)  # fmt: skip


async def passes_one(sandbox, task, timeout_s):
    return Verdict(1, 2, 0, trusted=True, checks={"a": True, "b": False})


def play(task, chat, turns, *, sandbox=None, limits=LIMITS, verify=passes_one, reward=None):
    return asyncio.run(
        run_episode(
            Attempt(task, 0), sandbox or FakeSandbox(), lambda: FakeSampler(list(turns)), chat, limits,
            verify=verify, reward=reward or DenseReward(scale=1.0),
        )
    )  # fmt: skip


def test_the_verifier_has_its_whole_time_after_the_agent_used_up_its_own(task, chat):  # verifiers#1245
    given = []

    async def never():
        await asyncio.sleep(60)

    async def slow(sandbox, task, timeout_s):
        given.append(timeout_s)
        await asyncio.sleep(1.0)  # longer than the agent's whole budget
        return await passes_one(sandbox, task, timeout_s)

    limits = dataclasses.replace(LIMITS, agent_timeout_s=0.8)
    record = play(task, chat, [chat.command("ls"), never], limits=limits, verify=slow)
    assert record.header.end_reason == EndReason.AGENT_TIMEOUT and record.header.verdict.trusted
    assert given == [LIMITS.verifier_timeout_s] and record.header.reward["total"] == 1.0
    assert trainable(record, timed_out_policy="score") is None
    assert trainable(record, timed_out_policy="exclude") == "agent_timeout"


def test_scoring_never_hangs(task, chat):  # verifiers#1245
    """A sandbox that doesn't come back from the verifier, although it was given a limit, is lost after the margin."""

    async def hangs(sandbox, task, timeout_s):
        await asyncio.sleep(600)

    began = time.monotonic()
    limits = dataclasses.replace(LIMITS, verifier_timeout_s=0.2)
    record = play(task, chat, [chat.submission()], limits=limits, verify=hangs)
    assert time.monotonic() - began < 10
    verdict = record.header.verdict
    assert record.header.end_reason == EndReason.SANDBOX_LOST and record.header.reward == {}
    assert not verdict.trusted and "the verifier did not come to an end within 0.4 s" in verdict.reason
    assert record.header.counts["retries"] == 1


@pytest.mark.parametrize("hanging", ["start", "run"])
def test_a_sandbox_that_hangs_is_lost(task, chat, hanging):  # SkyRL#1613, SkyRL#1986
    class Hanging(FakeSandbox):
        async def start(self, task):
            await (asyncio.sleep(600) if hanging == "start" else super().start(task))

        async def run(self, command, timeout_s):
            await asyncio.sleep(600)

    limits = dataclasses.replace(LIMITS, command_timeout_s=0.1)
    record = play(task, chat, [chat.command("ls")], sandbox=Hanging(), limits=limits)
    assert record.header.end_reason == EndReason.SANDBOX_LOST and not record.header.verdict.trusted
    assert "did not come to an end" in record.header.verdict.reason


def test_a_driver_that_fails_is_one_episodes_loss(task, chat):  # SkyRL#1110
    broken = FakeSandbox({"ls": ConnectionResetError("the daemon went away")})
    record = play(task, chat, [chat.command("ls")], sandbox=broken)
    assert record.header.end_reason == EndReason.SANDBOX_LOST and record.header.counts["retries"] == 1
    assert "a command failed: ConnectionResetError: the daemon went away" in record.header.verdict.reason
    with pytest.raises(T1Error, match="can't be read"):  # what is known to concern more than one episode

        async def unreadable(sandbox, task, timeout_s):
            raise T1Error("the tests can't be read")

        play(task, chat, [chat.submission()], verify=unreadable)


def test_a_teardown_that_hangs_does_not_hold_the_phase(task):
    class Stuck(FakeSandbox):
        async def stop(self):
            await asyncio.sleep(600)

    played = []

    async def note(job, sandbox):
        played.append(job)

    began = time.monotonic()
    asyncio.run(run_pool(range(3), note, workers=2, make_sandbox=Stuck, teardown_timeout_s=0.2))
    assert sorted(played) == [0, 1, 2] and time.monotonic() - began < 10


def test_an_observation_that_does_not_fit_is_left_out_and_the_episode_is_scored(task, chat):
    """The stated policy at the end of the context: no half observation, and no reward lost."""
    sandbox = FakeSandbox({"ls": CommandResult(0, "alpha " * 8)})
    whole = play(task, chat, [chat.command("ls"), chat.submission()], sandbox=sandbox)
    first = int((whole.origin == Origin.ENVIRONMENT).argmax())
    limits = dataclasses.replace(LIMITS, max_context=first + 3)
    record = play(task, chat, [chat.command("ls"), chat.submission()], sandbox=sandbox, limits=limits)
    assert record.header.end_reason == EndReason.TOKEN_LIMIT and record.header.verdict.trusted
    assert record.origin[-1] == Origin.SAMPLED and len(record) <= limits.max_context
    assert record.header.reward["total"] == 1.0 and trainable(record) is None


def test_a_context_beyond_the_packing_capacity_and_an_episode_beyond_its_phase_are_clashes():
    config = Config()
    config.env.tasks, config.eval.tasks = "a", "b"
    config.rollout.max_context = config.train.capacity + 1
    assert any("exceeds train.capacity" in problem for problem in validate(config))
    config = Config()
    config.cluster.phase_timeout_s = 1000.0  # verifiers#1245
    assert any("is less than one episode may take" in problem for problem in validate(config))
    config = Config()
    config.monitor.length, config.monitor.history = 1.0, 1
    assert sum("monitor." in problem for problem in validate(config)) == 2


def test_every_end_is_typed_and_format_errors_are_answered(task, chat):  # rllm#710
    sandbox = FakeSandbox()
    nonsense = chat.encode("no command") if hasattr(chat, "encode") else chat.submission()[:1]
    ends = {
        EndReason.SUBMITTED: [chat.submission()],
        EndReason.TURN_LIMIT: [chat.command("ls")] * 4,
        EndReason.FORMAT_ERROR: [[*nonsense]] * 4,
    }
    for reason, turns in ends.items():
        record = play(task, chat, turns, sandbox=sandbox)
        assert record.header.end_reason == reason and reason in EndReason.ALL
    assert record.header.counts["format_errors"] == 3
    assert chat.decode(record.ids).count("error format") == 2  # each was answered, the last one ended the episode


def test_gained_checks_are_paid_by_the_tasks_own_baseline(task, chat):
    known = dataclasses.replace(task, baseline_checks={"a": False, "b": True})
    reward = GainReward(scale=1.0, penalty=0.5)
    record = play(known, chat, [chat.submission()], reward=reward)
    assert record.header.reward == {"total": 0.5, "passed": 1.0, "gained": 1.0, "broken": 1.0}
    unknown = play(task, chat, [chat.submission()], reward=reward)  # of an evaluation
    assert unknown.header.reward == {} and unknown.header.verdict.trusted


def test_a_reward_that_needs_baselines_is_refused_before_anything_starts(tmp_path, task):
    for name in ("one", "two"):
        tests = {"test.sh": (b"#!/bin/bash\ntrue\n", 0o755)}
        write_task(dataclasses.replace(task, name=name, content=TaskContent(tests=tests)), tmp_path / "tasks" / name)
    config = Config()
    config.run.dir, config.env.tasks = str(tmp_path / "run"), str(tmp_path / "tasks")
    config.rollout.tasks_per_iteration = 2
    config.reward._target_ = "megatron_t1.environment.reward.GainReward"
    policy = SimpleNamespace(version=0, route_shape=None)
    with pytest.raises(T1Error, match="not known by check name for 2 tasks"):
        rollout_plan(config, policy, 0)
    write_baselines(tmp_path / "tasks/baseline.json", {"one": Baseline({"a": True}), "two": Baseline({}, ("b",))})
    plan = rollout_plan(config, policy, 0)
    assert {attempt.task.name: attempt.task.baseline for attempt in plan.attempts} == {"one": 1, "two": 0}
