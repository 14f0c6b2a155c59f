"""Episodes of tasks of several steps: one stream and one sandbox, what ends a step and what ends the episode."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_t1.audit.run import audit_target, exit_status
from megatron_t1.audit.targets import find_all
from megatron_t1.config.schema import Config
from megatron_t1.environment.loading import load_task
from megatron_t1.environment.reward import DenseReward
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.interface import CommandResult, FileRefused, SandboxLost
from megatron_t1.environment.trials import read_trials
from megatron_t1.errors import T1Error
from megatron_t1.report.summary_file import read_summary
from megatron_t1.rollout.agent import Attempt, run_episode
from megatron_t1.rollout.budget import EpisodeLimits
from megatron_t1.rollout.phase import run_phases
from megatron_t1.rollout.plan import Plan, require_playable
from megatron_t1.trajectory.record import EndReason, Header, Origin, StepOutcome, Verdict, load, save
from megatron_t1.trajectory.selection import trainable
from megatron_t1.trajectory.store import RolloutStore
from megatron_t1.trajectory.validation import validate
from tests.environment.step_tasks import write_steps
from tests.rollout.conftest import SHAPE, FakeSampler, FakeSandbox, FakeServer

LIMITS = EpisodeLimits(
    max_turns=9,
    max_context=600,
    max_tokens_per_turn=40,
    command_timeout_s=5,
    agent_timeout_s=60,
    verifier_timeout_s=20,
    output_limit=50,
)


class StepSandbox(FakeSandbox):
    """Remembers, in their order, sessions, the driver's commands and verifiers."""

    def __init__(self, results=None, setups=(0, 0, 0), **options):
        super().__init__(results, **options)
        self.log, self.setups = [], list(setups)

    async def resume(self, files):
        self.log.append(("resume", *sorted(files)))

    async def execute(self, command, timeout_s):
        self.log.append(("execute", command))
        return CommandResult(self.setups.pop(0), "said")

    async def run(self, command, timeout_s):
        self.log.append(("run", command))
        return await super().run(command, timeout_s)


@pytest.fixture
def steps_task(tmp_path):
    return load_task(write_steps(tmp_path / "demo"))


def play(task, chat, turns, *, sandbox=None, limits=LIMITS, verdicts=None, routes=False):
    """`verdicts` are passed checks of two, or verdicts, for each step."""
    sandbox = sandbox or StepSandbox()
    verdicts = list(verdicts or (2, 2, 2))

    async def verifier(of, stage, timeout_s):
        getattr(of, "log", []).append(("verify", stage.step, timeout_s))
        found = verdicts.pop(0)
        checks = {name: number < found for number, name in enumerate("ab")} if isinstance(found, int) else {}
        return Verdict(found, 2, -1, trusted=True, checks=checks) if isinstance(found, int) else found

    samplers = iter([FakeSampler(part, routes) for part in (turns if isinstance(turns[0], tuple) else [turns])])
    record = asyncio.run(
        run_episode(
            Attempt(task, 3),
            sandbox,
            lambda: next(samplers),
            chat,
            limits,
            route_shape=SHAPE if routes else None,
            verify=verifier,
            reward=DenseReward(scale=0.25),
        )
    )
    validate(record)
    return record


def outcome(header):
    return [(step.name, step.turns, step.end_reason, step.verdict and step.verdict.passed) for step in header.steps]


def test_three_steps_are_one_stream(steps_task, chat):
    sandbox = StepSandbox({"ls": CommandResult(0, "alpha.txt\n")})
    turns = [chat.command("ls"), chat.submission(), chat.submission(), chat.command("ls"), chat.submission()]
    record = play(steps_task, chat, turns, sandbox=sandbox, routes=True, verdicts=(2, 1, 2))
    assert chat.decode(record.ids) == (
        "<|im_start|>user\ncreate alpha.txt<|im_end|>\n<|im_start|>assistant\n"
        "<tool_call>ls</tool_call><|im_end|>\n<|im_start|>tool\nalpha.txt<|im_end|>\n<|im_start|>assistant\n"
        "done<|im_end|>\n<|im_start|>user\ncreate beta.txt<|im_end|>\n<|im_start|>assistant\n"
        "done<|im_end|>\n<|im_start|>user\ncreate gamma.txt<|im_end|>\n<|im_start|>assistant\n"
        "<tool_call>ls</tool_call><|im_end|>\n<|im_start|>tool\nalpha.txt<|im_end|>\n<|im_start|>assistant\n"
        "done<|im_end|>"
    )
    sampled = record.ids[record.origin == Origin.SAMPLED]
    assert sampled.tolist() == np.concatenate(turns).tolist()
    assert record.routed[:-1].all() and record.header.counts["turns"] == 5
    assert sandbox.starts == 1 and sandbox.log == [
        ("run", "ls"),
        ("verify", "plan", 20),
        ("resume", "data.txt", "setup.sh"),
        ("execute", 'exec /bin/bash "$PWD/setup.sh"'),
        ("verify", "build", 20),
        ("resume",),
        ("run", "ls"),
        ("verify", "ship", 20),
    ]
    header = record.header
    assert outcome(header) == [("plan", 2, "submitted", 2), ("build", 1, "submitted", 1), ("ship", 2, "submitted", 2)]
    assert header.end_reason == EndReason.SUBMITTED and header.reward == {"total": 1.25, "passed": 5.0}
    assert header.verdict.checks["build/a"] and not header.verdict.checks["build/b"] and header.verdict.total == 6


def test_the_record_keeps_the_steps(steps_task, chat, tmp_path):
    record = play(steps_task, chat, [chat.submission()] * 3, verdicts=(2, Verdict(0, 0, -1, False, reason="late")))
    save(record, tmp_path / "record")
    again = load(tmp_path / "record", verify=True)
    assert again.header == record.header and again.header.steps[2] == StepOutcome("ship")
    assert Header.from_json(record.header.to_json()) == record.header


def test_a_task_of_one_instruction_says_nothing_of_steps(task, chat):
    record = play(task, chat, [chat.submission()])
    assert "steps" not in record.header.to_json() and "step_share" not in record.header.to_json()["verdict"]


def test_min_reward_ends_the_episode(steps_task, chat):
    first = dataclasses.replace(steps_task.steps[0], min_reward={"reward": 0.75})
    task = dataclasses.replace(steps_task, steps=(first, *steps_task.steps[1:]))
    sandbox = StepSandbox()
    record = play(task, chat, [chat.submission()] * 3, sandbox=sandbox, verdicts=(1,))
    assert record.header.end_reason == EndReason.MIN_REWARD
    assert outcome(record.header) == [("plan", 1, "submitted", 1), ("build", 0, "", None), ("ship", 0, "", None)]
    assert record.header.verdict.trusted and record.header.verdict.total == 4 and record.header.reward["total"] == 0.25
    assert [entry[0] for entry in sandbox.log] == ["verify"] and trainable(record) is None
    assert "beta" not in chat.decode(record.ids)
    assert len(play(task, chat, [chat.submission()] * 3).header.verdict.checks) == 6


def test_an_untrusted_step_excludes_the_episode(steps_task, chat):  # rllm#677
    bad = Verdict(0, 0, -1, trusted=False, reason="the verifier crashed")
    record = play(steps_task, chat, [chat.submission()] * 3, verdicts=(2, bad))
    assert not record.header.verdict.trusted and record.header.reward == {} and trainable(record) is not None
    assert record.header.verdict.reason == "step build: the verifier crashed"
    assert outcome(record.header)[2] == ("ship", 0, "", None)


def test_reports_of_all_steps_fit_into_a_record(steps_task, chat, tmp_path):
    """What a tested program may make of its reports doesn't end the phase that reads the records."""
    long = Verdict(1, 700, -1, trusted=True, checks={f"{number:03}{'x' * 997}": number == 0 for number in range(700)})
    record = play(steps_task, chat, [chat.submission()] * 3, verdicts=(long, long, long))
    assert [step.verdict and step.verdict.trusted for step in record.header.steps] == [True, False, None]
    assert "have 1400000 characters" in record.header.verdict.reason and trainable(record) is not None
    save(record, tmp_path / "record")
    assert load(tmp_path / "record", verify=True).header == record.header


def test_a_later_instruction_without_room_is_said_before_anything_starts(steps_task, chat):
    long = dataclasses.replace(steps_task.steps[1], instruction="create beta.txt " * 300)
    task = dataclasses.replace(steps_task, steps=(steps_task.steps[0], long))
    plan = Plan("rollout", "", [Attempt(task, 0)], Path(), LIMITS, 1.0, routes=False)
    with pytest.raises(T1Error, match="the instruction has") as caught:
        require_playable(plan, chat)
    assert caught.value.where == "task demo, step build"


def test_a_setup_that_fails_is_no_zero(steps_task, chat):
    record = play(steps_task, chat, [chat.submission()] * 3, sandbox=StepSandbox(setups=[7]), verdicts=(2,))
    assert record.header.end_reason == EndReason.STEP_NOT_READY and not record.header.verdict.trusted
    assert record.header.verdict.reason == "step build: setup.sh failed (exit status 7): said"
    assert outcome(record.header)[1] == ("build", 0, "step_not_ready", 0)


def test_what_an_agent_puts_in_the_way_of_a_step_gives_no_second_play(steps_task, chat):
    class Blocked(StepSandbox):
        async def resume(self, files):
            raise FileRefused("can't write /app/data.txt: Is a directory")

    sandbox = Blocked()
    record = play(steps_task, chat, [chat.submission()] * 3, sandbox=sandbox, verdicts=(2,))
    assert sandbox.starts == 1 and record.header.counts["retries"] == 0
    assert record.header.end_reason == EndReason.STEP_NOT_READY and not record.header.verdict.trusted
    assert "can't write /app/data.txt" in record.header.verdict.reason


async def never():
    await asyncio.sleep(600)


def quick(task, seconds):
    steps = (dataclasses.replace(task.steps[0], agent_timeout_s=seconds), *task.steps[1:])
    return dataclasses.replace(task, steps=steps)


def test_a_steps_own_time_limit_ends_the_step(steps_task, chat):
    record = play(quick(steps_task, 0.3), chat, [chat.command("ls"), never, chat.submission(), chat.submission()])
    assert [end for _, _, end, _ in outcome(record.header)] == ["agent_timeout", "submitted", "submitted"]
    assert record.header.end_reason == EndReason.SUBMITTED and record.header.verdict.solved
    assert (
        "<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ncreate beta.txt<|im_end|>"
        in chat.decode(record.ids)
    )
    assert trainable(record) is None and trainable(record, timed_out_policy="exclude") == "agent_timeout"


def test_time_that_runs_out_before_the_first_turn(steps_task, chat):
    record = play(quick(steps_task, 0.1), chat, [never, chat.submission(), chat.submission()])
    assert [step.turns for step in record.header.steps] == [0, 1, 1] and record.header.policy_versions == (0, 0)
    text = chat.decode(record.ids)
    assert text.startswith(
        "<|im_start|>user\ncreate alpha.txt<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ncreate beta"
    )
    first = int((record.origin == Origin.SAMPLED).argmax())
    assert set(record.origin[:first].tolist()) == {Origin.PROMPT}


def test_time_that_runs_out_in_a_command(steps_task, chat):
    class Slow(StepSandbox):
        async def run(self, command, timeout_s):
            await asyncio.sleep(timeout_s)
            return CommandResult(None, "half", timed_out=True)

    record = play(
        quick(steps_task, 0.2), chat, [chat.command("make"), chat.submission(), chat.submission()], sandbox=Slow()
    )
    assert (
        "<tool_call>make</tool_call><|im_end|>\n<|im_start|>tool\nerror timeout half<|im_end|>\n<|im_start|>assistant\n"
        "<|im_end|>\n<|im_start|>user\ncreate beta.txt<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>"
        in chat.decode(record.ids)
    )
    assert [step.end_reason for step in record.header.steps] == ["agent_timeout", "submitted", "submitted"]


def test_the_agents_time_is_the_episodes(steps_task, chat):
    limits = dataclasses.replace(LIMITS, agent_timeout_s=1.0)
    record = play(steps_task, chat, [chat.submission(), never], limits=limits)
    assert record.header.end_reason == EndReason.AGENT_TIMEOUT
    assert [end for _, _, end, _ in outcome(record.header)] == ["submitted", "agent_timeout", ""]


def test_turns_and_context_are_the_episodes(steps_task, chat):
    limits = dataclasses.replace(LIMITS, max_turns=2)
    record = play(steps_task, chat, [chat.submission()] * 2, limits=limits)
    assert record.header.end_reason == EndReason.TURN_LIMIT
    assert [end for _, _, end, _ in outcome(record.header)] == ["submitted", "submitted", ""]
    record = play(steps_task, chat, [chat.submission(), chat.command("ls"), chat.command("ls")], limits=limits)
    assert [end for _, _, end, _ in outcome(record.header)] == ["submitted", "turn_limit", ""]
    whole = len(play(steps_task, chat, [chat.submission()] * 3))
    ends = set()
    for room in range(whole - 20, whole):
        record = play(steps_task, chat, [chat.submission()] * 3, limits=dataclasses.replace(LIMITS, max_context=room))
        assert record.header.end_reason == EndReason.TOKEN_LIMIT and len(record) <= room
        ends.add(record.header.steps[2].end_reason)  # its instruction didn't fit, or its turn
        assert record.header.verdict.solved == bool(record.header.steps[2].verdict)
    assert ends == {"", "token_limit"}


def test_lost_format_ends_the_episode(steps_task, chat):
    broken = chat.command("ls")[1:]
    record = play(steps_task, chat, [chat.submission(), broken, broken, broken])
    assert record.header.end_reason == EndReason.FORMAT_ERROR
    assert [end for _, _, end, _ in outcome(record.header)] == ["submitted", "format_error", ""]


def test_only_the_last_submission_can_be_early(steps_task, chat):
    limits = dataclasses.replace(LIMITS, min_turns=5)
    record = play(steps_task, chat, [chat.submission()] * 5, limits=limits)
    assert record.header.counts["early_submissions"] == 2 and [step.turns for step in record.header.steps] == [1, 1, 3]


def test_an_episode_that_lost_its_sandbox_in_a_step_is_played_again(steps_task, chat):
    lost = SandboxLost("the sandbox is gone")
    turns = (chat.submission(), chat.command("ls"))
    sandbox = StepSandbox({"ls": lost})
    record = play(steps_task, chat, [turns, turns], sandbox=sandbox, verdicts=(2, 2))
    assert sandbox.starts == 2 and record.header.end_reason == EndReason.SANDBOX_LOST
    assert outcome(record.header) == [
        ("plan", 1, "submitted", 2),
        ("build", 1, "sandbox_lost", None),
        ("ship", 0, "", None),
    ]
    assert not record.header.verdict.trusted


def test_final_pays_the_last_step_alone(steps_task, chat):
    task = dataclasses.replace(steps_task, strategy="final")
    record = play(task, chat, [chat.submission()] * 3, verdicts=(0, 2, 1))
    assert record.header.reward == {"total": 0.25, "passed": 1.0} and record.header.verdict.total == 2
    assert [step.verdict.passed for step in record.header.steps] == [0, 2, 1]


COMMANDS = ("touch alpha.txt; cd /; export X=1", "", "[ -z $X ] && cat data.txt && touch beta.txt", "", "cat made", "")
STREAM = """\
<|im_start|>user
create alpha.txt<|im_end|>
<|im_start|>assistant
<tool_call>touch alpha.txt; cd /; export X=1</tool_call><|im_end|>
<|im_start|>tool
ok<|im_end|>
<|im_start|>assistant
done<|im_end|>
<|im_start|>user
create beta.txt<|im_end|>
<|im_start|>assistant
<tool_call>[ -z $X ] && cat data.txt && touch beta.txt</tool_call><|im_end|>
<|im_start|>tool
of the second step<|im_end|>
<|im_start|>assistant
done<|im_end|>
<|im_start|>user
create gamma.txt<|im_end|>
<|im_start|>assistant
<tool_call>cat made</tool_call><|im_end|>
<|im_start|>tool
of the second step<|im_end|>
<|im_start|>assistant
done<|im_end|>"""


@pytest.fixture
def run_of_steps(tiny_model, chat, tmp_path, monkeypatch):
    """A run's config: real sandboxes and verifiers, the real client and phase; only what the model says is prepared."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")

    class Server(FakeServer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.turns = [chat.command(command) if command else chat.submission() for command in COMMANDS]

    monkeypatch.setattr("megatron_t1.rollout.phase.VllmServer", Server)
    write_steps(tmp_path / "tasks/demo")
    config = Config()
    config.run.dir, config.model.path = str(tmp_path / "run"), str(tiny_model)
    config.env.tasks = config.eval.tasks = str(tmp_path / "tasks")
    config.env.agent_timeout_s = config.env.verifier_timeout_s = 60.0
    config.rollout.tasks_per_iteration = config.rollout.samples_per_task = config.eval.attempts = 1
    return config


def test_an_episode_that_ended_between_two_steps_continues(run_of_steps, chat, tmp_path, monkeypatch):
    """The node is gone before the third step: the steps before are played from their answers, in a new sandbox."""
    resume, calls = BubblewrapSandbox.resume, []

    async def gone_once(self, files):
        calls.append(files)
        if len(calls) == 2:
            raise T1Error("the node is gone")
        await resume(self, files)

    monkeypatch.setattr(BubblewrapSandbox, "resume", gone_once)
    run_of_steps.rollout.in_flight = "continue"
    with pytest.raises(T1Error, match="the node is gone"):
        run_phases(run_of_steps, 0, ["rollout"])
    monkeypatch.setattr("tests.rollout.test_episode_steps.COMMANDS", COMMANDS[4:])  # asked for no more than these
    run_phases(run_of_steps, 0, ["rollout"])
    (record,) = RolloutStore(tmp_path / "run/rollouts/iter_0000")
    assert chat.decode(record.ids) == STREAM and record.header.counts["continued_turns"] == 4
    assert outcome(record.header) == [
        ("plan", 2, "submitted", 2),
        ("build", 2, "submitted", 3),
        ("ship", 2, "submitted", 0),
    ]
    (audit,) = [audit_target(target) for target in find_all([tmp_path / "run"])]
    assert exit_status([audit]) == 0


def test_a_rollout_and_an_evaluation_from_engine_to_audit(run_of_steps, chat, tmp_path):
    config = run_of_steps
    results = run_phases(config, 0, ["evaluation", "rollout"])
    (record,) = RolloutStore(tmp_path / "run/rollouts/iter_0000")
    assert chat.decode(record.ids) == STREAM and record.routed[:-1].all()
    header = record.header
    assert [step.describe() for step in header.steps] == [
        "plan: 2 turns, submitted, 2 of 2 checks",
        "build: 2 turns, submitted, 3 of 3 checks",
        "ship: 2 turns, submitted, 0 of 1 checks",
    ]
    assert (header.verdict.passed, header.verdict.total, header.verdict.source) == (5, 6, "ctrf.json")
    assert header.reward["total"] == 5 * config.reward.scale and header.verdict.share == pytest.approx(2 / 3)
    metrics = results["rollout"].metrics
    assert metrics["rollout/checks_fraction"] == pytest.approx(2 / 3) and metrics["rollout/steps_reached"] == 1.0
    (entry,) = read_summary(tmp_path / "run/evaluations/iter_0000").tasks.values()
    assert (entry["passed"], entry["total"], entry["solved"]) == ([5], [6], [False])
    assert entry["score"] == [pytest.approx(2 / 3)]
    assert [trial.verdict for trial in read_trials(tmp_path / "run")] == [header.verdict]
    audits = [audit_target(target) for target in find_all([tmp_path / "run"])]
    assert [audit.totals()["clean"] for audit in audits] == [1, 1] and exit_status(audits) == 0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("stalls", [0, 1])
def test_a_record_goes_on_after_a_step_that_ran_out_of_time(tiny_model, chat, tmp_path, monkeypatch, stalls):
    """In its first turn, or later: the record is what the engine was asked, also after a request nobody awaited."""

    class Server(FakeServer):
        async def generate(self, request):
            if len(self.requests) == stalls:
                self.requests.append(None)
                await asyncio.sleep(30.0)
            said = len(self.requests) - (len(self.requests) > stalls)
            self.turns = [chat.command("touch alpha.txt")] * 99 if said < stalls else [chat.submission()] * 99
            return await super().generate(request)

    monkeypatch.setattr("megatron_t1.rollout.phase.VllmServer", Server)
    write_steps(tmp_path / "tasks/demo", toml={'name = "plan"': 'name = "plan"\n[steps.agent]\ntimeout_sec = 3'})
    config = Config()
    config.run.dir, config.model.path, config.env.tasks = (
        str(tmp_path / "run"),
        str(tiny_model),
        str(tmp_path / "tasks"),
    )
    config.env.agent_timeout_s = config.env.verifier_timeout_s = 60.0
    config.rollout.tasks_per_iteration = config.rollout.samples_per_task = 1
    run_phases(config, 0, ["rollout"])
    (record,) = RolloutStore(tmp_path / "run/rollouts/iter_0000")
    ends = [(step.end_reason, step.turns) for step in record.header.steps]
    assert ends == [("agent_timeout", stalls), ("submitted", 1), ("submitted", 1)]
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ncreate beta.txt<|im_end|>" in chat.decode(record.ids)
    (audit,) = [audit_target(target) for target in find_all([tmp_path / "run"])]
    assert exit_status([audit]) == 0 and audit.totals()["clean"] == 1, audit
