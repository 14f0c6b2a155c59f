"""Tasks of several steps: reading them, their verdicts, and each step in a real sandbox."""

import dataclasses
import errno
import shutil
from unittest.mock import Mock

import pytest

from megatron_t1.environment.baseline import Baseline, with_baselines, write_baselines
from megatron_t1.environment.loading import load_task, load_tasks
from megatron_t1.environment.overlap import document
from megatron_t1.environment.reward import BinaryReward, DenseReward, GainReward, RatioReward
from megatron_t1.environment.sandbox.inside import Inside
from megatron_t1.environment.sandbox.interface import FileRefused, SandboxLost, VerifierRun
from megatron_t1.environment.steps import below_minimum, combined
from megatron_t1.environment.task import Healthcheck
from megatron_t1.environment.verifier import judge, verify
from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import NOT_REACHED, StepOutcome, Verdict
from tests.environment import step_tasks
from tests.environment.step_tasks import FINAL, exists, maker, write_steps

bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def make(tmp_path):
    return maker(tmp_path / "tasks")


# Reading


def test_a_stage_is_a_task_of_one_instruction(make):
    task = make({"solution/solve.sh": "touch shared\n", "steps/ship/solution/solve.sh": None})
    assert task.obstacles == () and task.instruction == "create alpha.txt" and task.strategy == "mean"
    plan, build, ship = task.stages
    assert [stage.instruction for stage in task.stages] == ["create alpha.txt", "create beta.txt", "create gamma.txt"]
    assert {stage.name for stage in task.stages} == {"steps-task"} and not plan.steps
    assert (plan.agent_timeout_s, plan.verifier_timeout_s) == (50.0, 40.0)
    assert (plan.verifier_env, build.verifier_env) == ({"WHO": "task"}, {"WHO": "step"})
    assert sorted(plan.test_files()) == ["shared.txt", "test.sh"] and b"beta" in build.test_files()["test.sh"][0]
    assert sorted(build.workdir_files()) == ["data.txt", "setup.sh"] and not plan.workdir_files()
    assert b"beta" in build.solution_files()["solve.sh"][0]
    assert b"shared" in ship.solution_files()["solve.sh"][0]  # of the whole task where a step has none


def test_what_a_step_says_of_itself_is_read(make):
    task = make(
        toml={
            'name = "plan"': 'name = "plan"\nmin_reward = 1\n[steps.agent]\ntimeout_sec = 3\n'
            '[steps.healthcheck]\ncommand = "true"\nretries = 2\nstart_period_sec = 1.5',
            'name = "ship"': 'name = "ship"\nmin_reward = {safety = 0.5}\n[steps.verifier]\ntimeout_sec = 4',
            'schema_version = "1.4"': 'schema_version = "1.4"\nmulti_step_reward_strategy = "FINAL"',
        }
    )
    plan, _, ship = task.steps
    assert plan.healthcheck == Healthcheck("true", retries=2, start_period_s=1.5)
    assert plan.min_reward == {"reward": 1.0} and ship.min_reward == {"safety": 0.5} and task.strategy == "final"
    assert (task.stages[0].agent_timeout_s, task.stages[2].verifier_timeout_s) == (3.0, 4.0)


def of_ship(text):
    return {'name = "ship"': f'name = "ship"\n{text}'}


@pytest.mark.parametrize(
    ("toml", "files", "named"),
    [
        ({'WHO = "step"': 'WHO = "${HOST}"'}, {}, "steps.build.verifier.env.WHO"),
        (of_ship('[steps.agent]\nuser = "joe"'), {}, "steps.ship.agent.user"),
        (of_ship('[steps.verifier]\nenvironment_mode = "separate"'), {}, "steps.ship.verifier.environment_mode"),
        (of_ship('[[steps.verifier.collect]]\ncommand = "x"'), {}, "steps.ship.verifier.collect"),
        (of_ship('[steps.agent]\nnetwork_mode = "allowlist"'), {}, "steps.ship.agent.network_mode"),
        ({}, {"steps/plan/trajectory.json": "{}"}, "steps/plan/trajectory.json"),
        ({}, {"steps/build/workdir/.harborignore": "x"}, "steps/build/workdir/.harborignore"),
        ({"[agent]": '[environment.healthcheck]\ncommand = "true"\n[agent]'}, {}, "environment.healthcheck"),
    ],
)
def test_what_stays_unmapped_is_refused_by_name(make, tmp_path, toml, files, named):
    assert any(named in obstacle for obstacle in make(files, toml).obstacles)
    with pytest.raises(T1Error, match="can't be played"):
        load_tasks(tmp_path / "tasks")


@pytest.mark.parametrize(
    ("toml", "files", "problem"),
    [
        ({}, {"steps/build/instruction.md": None}, "steps/build/instruction.md: missing"),
        ({}, {"steps/build/instruction.md": "  "}, "steps/build/instruction.md: empty"),
        ({}, {"steps/ship/tests/test.sh": None}, "steps/ship/tests/test.sh: missing, and so is tests/test.sh"),
        ({'name = "plan"': 'name = "SHIP"'}, {}, "is taken by another step"),
        ({'name = "plan"': 'name = ".."'}, {}, "steps[0].name"),
        (of_ship('min_reward = "much"'), {}, "steps[2].min_reward"),
        (of_ship("min_reward = nan"), {}, "steps[2].min_reward"),
        (of_ship(f"min_reward = 1{'0' * 400}"), {}, "steps[2].min_reward"),  # exceeds every float
        (of_ship("min_reward = {reward = inf}"), {}, "steps[2].min_reward"),
        (of_ship("healthcheck = {retries = 1}"), {}, "steps[2].healthcheck.command: missing"),
        ({"[agent]": 'multi_step_reward_strategy = "best"\n[agent]'}, {}, "multi_step_reward_strategy"),
    ],
)
def test_malformed_steps(make, toml, files, problem):
    with pytest.raises(T1Error) as caught:
        make(files, toml)
    assert problem in caught.value.problem and caught.value.problem.count(";") == 0  # and nothing else


def test_links_stay_in_the_task(tmp_path):
    folder = write_steps(tmp_path / "linked", {"steps/ship/tests/test.sh": None})
    (folder / "steps/ship/tests").mkdir()
    (folder / "steps/ship/tests/test.sh").symlink_to("../../plan/tests/test.sh")
    assert b"alpha" in load_task(folder).stages[2].test_files()["test.sh"][0]
    (folder / "steps/build/workdir/setup.sh").unlink()
    (folder / "steps/build/workdir/setup.sh").symlink_to("/etc/hostname")
    with pytest.raises(T1Error, match="links out of the task"):
        load_task(folder)


def test_overlap_reads_every_step(make):
    text = "in the working directory\n" * 4
    found = document(make({"tests/shared.txt": "x" * 80, "steps/plan/workdir/a.txt": text}))
    assert {"alpha", "beta", "gamma"} <= {*found.words["instruction"]}
    assert "gamma" in found.words["tests"] and "working" in found.words["files"]
    assert found.words["tests"].count("x" * 80) == 1
    names = {"tests/shared.txt", "steps/ship/tests/test.sh", "steps/plan/files/a.txt"}
    assert names <= {*found.digests.values()}


# Verdicts


def write_known(path, task):
    write_baselines(path, {task.name: Baseline({"plan/c0": True})})
    return path


def passed(count, total, **options):
    checks = {f"c{number}": number < count for number in range(total)}
    return Verdict(count, total, -1, trusted=True, checks=checks, source="ctrf.json", **options)


def outcomes(*verdicts):
    return [StepOutcome(name, 1, "submitted", v) for name, v in zip(("plan", "build", "ship"), verdicts, strict=False)]


def test_mean_counts_all_steps_and_final_the_last(make):
    played = outcomes(passed(1, 2), passed(4, 4), passed(1, 1))
    whole = combined(make(), played)
    assert (whole.passed, whole.total, whole.trusted, whole.solved) == (6, 7, True, False)
    assert whole.checks["plan/c0"] and not whole.checks["plan/c1"] and whole.checks["ship/c0"]
    assert whole.step_share == pytest.approx((0.5 + 1 + 1) / 3) and whole.source == "ctrf.json"
    assert DenseReward(0.25)(whole)["total"] == 1.5
    assert RatioReward(2.0)(whole)["total"] == pytest.approx(5 / 3)  # each step counts as much
    assert BinaryReward()(whole)["total"] == 0
    last = combined(make(toml=FINAL, name="final"), played)
    assert (last.passed, last.total, last.solved, last.step_share) == (1, 1, True, 1.0)
    assert BinaryReward(2.0)(last)["total"] == 2.0 and DenseReward(0.25)(last)["total"] == 0.25


def test_a_step_that_was_not_reached_has_not_passed(make, tmp_path):
    task, final = make(), make(toml=FINAL, name="final")
    one = combined(task, outcomes(passed(2, 2)))
    assert (one.passed, one.total, one.solved) == (2, 4, False)  # one check stands for each step of unknown names
    assert one.statuses == {f"build/{NOT_REACHED}": NOT_REACHED, f"ship/{NOT_REACHED}": NOT_REACHED}
    assert one.score == one.step_share == pytest.approx(1 / 3)
    none = combined(final, outcomes(passed(2, 2)))
    assert (none.passed, none.total, none.solved, none.score) == (0, 1, False, 0.0)
    names = ("plan/c0", "plan/c1", "build/a", "build/b", "ship/g")
    baseline = Baseline({"plan/c0": True, "build/b": True, "ship/g": False}, names)
    write_baselines(tmp_path / "baseline.json", {task.name: baseline, final.name: baseline})
    task, final = with_baselines([task, final], tmp_path)
    whole = combined(task, outcomes(passed(2, 2)))
    assert (whole.passed, whole.total, whole.baseline) == (2, 5, 2)
    assert whole.statuses == dict.fromkeys(("build/a", "build/b", "ship/g"), NOT_REACHED)
    paid = GainReward(1.0)(whole, task.counted(task.baseline_checks))
    assert (paid["gained"], paid["broken"]) == (1.0, 0.0)  # build/b is not broken: nobody looked
    assert task.stages[0].baseline == 1 and final.stages[2].baseline == 0 and task.stages[1].baseline == 1
    unknown = with_baselines([task], tmp_path, write_known(tmp_path / "known.json", task))[0].stages[2]
    assert unknown.baseline == -1 and unknown.baseline_checks is None  # doing nothing never got there
    assert final.baseline == 0 and final.counted(final.baseline_checks) == {"ship/g": False}
    assert combined(final, outcomes(passed(2, 2))).total == 1


def test_rewards_are_harbors_means(make):
    task = make()
    played = outcomes(passed(1, 1, rewards={"reward": 0.5, "safe": 1.0}), passed(1, 1, rewards={"reward": 1.0}))
    assert combined(task, played).rewards == {"reward": 0.5, "safe": pytest.approx(1 / 3)}  # ship: not reached, 0
    assert combined(task, outcomes(passed(1, 1, rewards={"reward": 1.0}), passed(1, 1), passed(1, 1))).rewards == {}


def test_one_step_that_cant_be_trusted_is_enough(make):  # strands-env#183
    bad = Verdict(0, 0, -1, trusted=False, reason="the verifier crashed")
    whole = combined(make(), outcomes(passed(2, 2), bad))
    assert not whole.trusted and whole.reason == "step build: the verifier crashed" and DenseReward()(whole) == {}


@pytest.mark.parametrize(
    ("least", "rewards", "why"),
    [
        ({}, {}, ""),
        ({"reward": 0.5}, {"reward": 0.5}, ""),
        ({"reward": 0.6}, {"reward": 0.5}, "reward = 0.5, below 0.6"),
        ({"reward": 0.4}, {"other": 1.0}, "reward = -inf, below 0.4"),
        ({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.9}, "b = 0.9, below 1"),
        ({"reward": 0.6}, {}, "reward = 0.5, below 0.6"),  # no reward file: the share of checks
        ({"reward": 0.5}, {}, ""),
    ],
)
def test_min_reward(make, least, rewards, why):
    step = dataclasses.replace(make().steps[0], min_reward=least)
    assert below_minimum(step, passed(1, 2, rewards=rewards)) == why


@pytest.mark.parametrize("reward", ["nan", "2.5", "", '{"reward": 1'])
def test_a_malformed_reward_opens_no_gate(make, reward):
    name = "reward.json" if reward.startswith("{") else "reward.txt"
    ctrf = b'{"results": {"tests": [{"name": "a", "status": "passed"}]}}'
    run = VerifierRun(0, "", False, {"ctrf.json": ctrf, name: reward.encode()})
    test = {"steps/plan/tests/test.sh": f"# ctrf {name}\n", "steps/ship/tests/test.sh": f"# ctrf {name}\n"}
    task = make(test, {'name = "plan"': 'name = "plan"\nmin_reward = 0.5'})
    verdict = judge(task.stages[0], run, 1.0)
    assert not verdict.trusted and verdict.reason.startswith(name)
    assert judge(task.stages[2], run, 1.0).solved  # nothing depends on it


# In a sandbox


def play(task, *commands):
    return lambda sandbox: step_tasks.play(sandbox, task, *commands)


@bubblewrap
def test_three_steps_in_one_sandbox(make, in_sandbox):
    in_sandbox(lambda sandbox: step_tasks.check_three_steps(sandbox, make()))


@bubblewrap
def test_nothing_of_a_verifier_is_left_for_the_next_step(make, in_sandbox):
    test = "sleep 300 & touch /logs/verifier/x; [ ! -e /tests/planted ] && echo 1 > /logs/verifier/reward.txt\n"
    task = make({f"steps/{name}/tests/test.sh": test for name in ("plan", "build", "ship")})
    look = "! pgrep sleep && ! ls /tests/* /logs/verifier/* 2>/dev/null && touch /tests/planted"
    found = in_sandbox(play(task, "touch alpha.txt", look, look))
    assert [verdict.solved for verdict in found] == [True, True, True], found


@bubblewrap
def test_sessions_follow_each_other_in_order(make, in_sandbox):
    task = make()

    async def body(sandbox):
        with pytest.raises(SandboxLost, match="not started"):
            await sandbox.resume({})
        await sandbox.start(task)
        await sandbox.run("export X=1; cd /tmp; sleep 300 &", 9.0)
        await sandbox.resume({"sub/new": (b"n", 0o640)})
        seen = await sandbox.run("echo [$X] $PWD; stat -c %a sub/new; ps -e | grep -c sleep", 9.0)
        assert seen.output == "[] /app\n640\n0\n"
        assert (await sandbox.execute("cd /; X=2; exit 7", 9.0)).exit_code == 7
        assert (await sandbox.run("echo [$X] $PWD", 9.0)).output == "[] /app\n"
        await verify(sandbox, task.stages[0])
        for call in (sandbox.run("true", 9.0), sandbox.execute("true", 9.0), verify(sandbox, task.stages[1])):
            with pytest.raises(SandboxLost):
                await call

    in_sandbox(body)


PYTEST = "#!/bin/bash\ncd /app\npython3 -m pytest -q /tests/test_it.py\n"
PLANTED = {
    "a plug-in of pytest in the working directory": "echo 'import os' > pytest.py",
    "a module of the standard library": "printf 'raise SystemExit(0)' > json.py",
    "an entry point": "mkdir x.dist-info; printf '[pytest11]\\nx = evil\\n' > x.dist-info/entry_points.txt",
    "a link": "ln -s /tmp queue",
}


@bubblewrap
@pytest.mark.parametrize("kind", PLANTED)
def test_what_was_planted_in_one_step_counts_against_the_next(make, in_sandbox, kind):
    task = make(
        {
            "steps/plan/tests/test.sh": "[ -e /app/alpha.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
            "steps/build/tests/test.sh": PYTEST,
            "steps/build/tests/test_it.py": "def test_it():\n    assert False\n",
        }
    )
    plan, build = in_sandbox(play(task, f"touch alpha.txt; {PLANTED[kind]}", "touch beta.txt"))
    assert plan.solved  # whose tests don't look there
    assert not build.trusted and "the agent left /app/" in build.reason


@bubblewrap
@pytest.mark.parametrize(
    "stands", ["mkdir -p data.txt/x", "cd /; rm -r /app; ln -s /usr /app", "cd /; rm -r /app; : > /app"]
)
def test_what_stands_in_the_place_of_a_steps_file_loses_no_sandbox(make, in_sandbox, stands):
    test = "echo 1 > /logs/verifier/reward.txt\n"  # which looks nowhere
    plan, build = in_sandbox(play(make({"steps/plan/tests/test.sh": test}), f"touch alpha.txt; {stands}", None))
    assert plan.solved and build.startswith("its files can't be put in place: can't write /app/"), build


@bubblewrap
def test_a_machine_without_room_is_a_lost_sandbox(make, in_sandbox, monkeypatch):
    async def body(sandbox):
        await sandbox.start(make())
        for number, kind in ((errno.EIO, SandboxLost), (errno.ENOSPC, FileRefused)):
            monkeypatch.setattr(Inside, "write", Mock(side_effect=OSError(number, "said")))
            with pytest.raises(SandboxLost) as caught:
                await sandbox.resume({"x": (b"", 0o644)})
            assert type(caught.value) is kind

    in_sandbox(body)


@bubblewrap
def test_a_link_to_a_copy_of_a_steps_file_is_not_the_file(make, in_sandbox):
    linked = {"environment/Dockerfile": "FROM a\nRUN mkdir /srv/app && ln -s /srv/app /app\nWORKDIR /app\n"}
    own = {"steps/build/workdir/json.py": "# own\n", "steps/build/tests/test.sh": exists(beta="/app/beta.txt")}
    task = make({**linked, **own})
    (_, kept), (_, replaced) = (
        in_sandbox(play(task, "touch alpha.txt", f"touch beta.txt; {change}"))
        for change in ("true", "cp json.py /tmp/copy; ln -sf /tmp/copy json.py")
    )
    assert kept.solved, kept
    assert not replaced.trusted and "json.py" in replaced.reason


@bubblewrap
@pytest.mark.slow
def test_files_that_a_step_brings_are_its_own_until_they_are_changed(make, in_sandbox):
    task = make(
        {
            "steps/build/workdir/json.py": "# the task's own\n",
            "steps/build/workdir/setup.sh": "touch made\n",
            "steps/build/tests/test.sh": exists(beta="/app/beta.txt"),
        }
    )
    _, build = in_sandbox(play(task, "touch alpha.txt", "touch beta.txt"))
    assert build.trusted and build.solved, build
    _, build = in_sandbox(play(task, "touch alpha.txt", "touch beta.txt; echo >> json.py"))
    assert not build.trusted and "/app/json.py" in build.reason
    _, build = in_sandbox(play(task, "ln -s /tmp/x json.py; touch queue.py", "touch beta.txt"))
    assert not build.trusted and "/app/queue.py" in build.reason and "json.py" not in build.reason


SERVICE = "touch made; (sleep 0.5; touch up) &"


@bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "check", "why"),
    [
        ("echo no room; exit 3", "", "setup.sh failed (exit status 3): no room"),
        ("sleep 60", "", "setup.sh ran out of time"),
        ("touch made", 'command = "exit 1"\ninterval_sec = 0\nretries = 2', "its healthcheck failed 2 times"),
        ("touch made", 'command = "exit 1"\nstart_period_sec = 60\nstart_interval_sec = 2', "within 2 s"),
        (SERVICE, 'command = "ls up"\ninterval_sec = 0.3\nretries = 9', ""),
        (SERVICE, 'command = "ls up"\nstart_period_sec = 2\nstart_interval_sec = 0.1', ""),
    ],
)
def test_setup_and_healthcheck(make, in_sandbox, setup, check, why):
    toml = {'WHO = "step"': f'WHO = "step"\n[steps.healthcheck]\n{check}'} if check else {}
    task = make({"steps/build/workdir/setup.sh": setup}, toml)
    _, build = in_sandbox(play(task, "touch alpha.txt", "touch beta.txt"))
    assert why in build if why else build.solved


@bubblewrap
def test_the_first_step_is_set_up_too(make, in_sandbox):
    task = make({"steps/plan/workdir/setup.sh": "touch alpha.txt; cd /; X=2"})
    (plan,) = in_sandbox(play(task, "[ $PWD = /app ] && [ -z $X ]"))
    assert plan.solved
