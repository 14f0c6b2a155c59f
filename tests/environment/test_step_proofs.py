"""Proofs of tasks of several steps, each step in a real sandbox, and the baselines that come of them."""

import json
import shutil

import pytest

from megatron_t1.cli import main
from megatron_t1.environment.baseline import read_baselines, with_baselines
from megatron_t1.environment.loading import load_tasks
from megatron_t1.environment.proof import Status, prove
from tests.environment.step_tasks import CTRF, FINAL, maker

bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def make(tmp_path):
    return maker(tmp_path / "tasks")


@pytest.fixture
def proof(in_sandbox):
    return lambda task, repeats=1: in_sandbox(lambda sandbox: prove(sandbox, task, repeats=repeats))


@bubblewrap
@pytest.mark.slow
def test_a_proof_plays_every_step(make, proof):
    found = proof(make(), repeats=2)
    assert (found.status, found.passed, found.reason) == (Status.PROVEN, 6, "")
    assert found.names == ["build/alpha", "build/beta", "build/made", "plan/alpha", "plan/kept", "ship/gamma"]
    idle = {"plan/kept": True, "plan/alpha": False, "build/alpha": False, "build/beta": False, "build/made": True}
    assert found.baseline == {**idle, "ship/gamma": False}


@bubblewrap
@pytest.mark.slow
def test_a_proof_minds_min_reward(make, proof):
    gate = {'name = "plan"': 'name = "plan"\nmin_reward = 1.0'}
    found = proof(make(toml=gate))
    assert found.status == Status.PROVEN and found.baseline == {"plan/kept": True, "plan/alpha": False}
    found = proof(make({"steps/plan/solution/solve.sh": "exit 2\n"}, gate, name="other"))
    assert found.status == Status.UNSOLVED
    assert "not plan/alpha, build/not reached, ship/not reached (status 2" in found.reason


@bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "status", "why"),
    [
        ({"steps/build/solution/solve.sh": None}, Status.UNPROVEN, "step build has no solution/solve.sh"),
        ({"steps/build/solution/solve.sh": "true\n"}, Status.UNSOLVED, "not build/beta"),
        ({"steps/build/workdir/setup.sh": "exit 4\n"}, Status.UNTRUSTED, "step build: setup.sh failed (exit status 4)"),
        ({"steps/ship/tests/test.sh": "true\n"}, Status.UNTRUSTED, "step ship: the verifier left no result file"),
    ],
)
def test_a_proof_names_the_step(make, proof, files, status, why):
    found = proof(make(files))
    assert found.status == status and why in found.reason


@bubblewrap
@pytest.mark.slow
def test_final_needs_every_step_proven_and_counts_the_last(make, proof):
    found = proof(make(toml=FINAL))
    assert found.status == Status.PROVEN and len(found.names) == 6
    found = proof(make({"steps/plan/solution/solve.sh": "true\n"}, FINAL, name="other"))
    assert found.status == Status.UNSOLVED and "plan/alpha" in found.reason
    found = proof(make({"steps/ship/tests/test.sh": CTRF % '"always": True'}, FINAL, name="third"))
    assert found.status == Status.SOLVED


@bubblewrap
@pytest.mark.slow
def test_tasks_check_brings_the_baselines_of_all_steps(make, tmp_path):
    make()
    out = tmp_path / "out"
    assert main(["tasks", "check", str(tmp_path / "tasks"), "--out", str(out), "--repeats", "1"]) == 0
    own = read_baselines(out / "baseline.json")["steps-task"]
    assert own.names == ("build/alpha", "build/beta", "build/made", "plan/alpha", "plan/kept", "ship/gamma")
    (task,) = with_baselines(load_tasks(out / "tasks.list"), out)
    assert task.baseline == 2 and task.stages[1].check_names == ("alpha", "beta", "made")
    assert task.stages[1].baseline_checks == {"alpha": False, "beta": False, "made": True}
    assert json.loads((out / "results.jsonl").read_text())["passed"] == 6
