"""`t1 tasks check`: every way in which a task can be unsound, proven in a real sandbox; goes on where it was."""

import asyncio
import json
import shutil

import pytest

from megatron_t1.cli import main
from megatron_t1.config.schema import EnvConfig, SandboxConfig
from megatron_t1.environment.baseline import read_baselines, with_baselines
from megatron_t1.environment.check import TaskCheck
from megatron_t1.environment.loading import load_tasks
from megatron_t1.environment.proof import Status
from megatron_t1.environment.sandbox.interface import SandboxLost

CHECKS = """\
python3 - <<'END'
import json, os, time
checks = {%s}
tests = [{"name": name, "status": "passed" if passed else "failed"} for name, passed in checks.items()]
json.dump({"results": {"tests": tests}}, open("/logs/verifier/ctrf.json", "w"))
END
"""
TWO = CHECKS % '"kept": os.path.exists("/app/kept"), "made": os.path.exists("/app/made")'
TASKS = {
    "proven": {},
    "unproven": {"solution/solve.sh": None},
    "solved": {"tests/test.sh": CHECKS % '"kept": True'},
    "unsolved": {"solution/solve.sh": "echo trying; exit 3\n"},
    "unstable": {"tests/test.sh": CHECKS % '"even": time.time_ns() // 1000 % 2 == 0, "n%d" % time.time_ns(): False'},
    "untrusted": {"tests/test.sh": "echo nothing to say\n"},
    "unbuildable": {"environment/Dockerfile": "FROM a\nRUN echo no such thing; false\n"},
    "unplayable": {"task.toml": "[environment]\ngpus = 1\n"},
    "broken": {"task.toml": "[agent]\ntimeout_sec = 'x'\n"},
    "uses_its_variables": {
        "task.toml": '[solution.env]\nNAME = "made; touch /app/injected"\n'
        '[environment]\nmemory_mb = 999999\nshape = "odd"\n',
        "solution/solve.sh": 'cp "$(dirname "$0")/data" "${NAME%%;*}"; pwd\n',
        "solution/data": "x\n",
    },
}
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    sound = {
        "task.toml": "[metadata]\nbaseline = 1\n", "instruction.md": "make it\n", "tests/test.sh": TWO,
        "environment/Dockerfile": "FROM a\nWORKDIR /app\nRUN touch kept\n", "solution/solve.sh": "touch made\n",
    }  # fmt: skip
    for name, changes in TASKS.items():
        for file, text in {**sound, **changes}.items():
            if text is not None:
                (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / name / file).write_text(text)
    return folder


def played(out):
    return [json.loads(line)["name"] for line in (out / "results.jsonl").read_text().splitlines()]


def test_every_status_and_what_is_written(tasks, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["tasks", "check", str(tasks), "--out", str(out), "--workers", "4"]) == 1
    said = capsys.readouterr().out
    found = {name: json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()
             for name in [json.loads(line)["name"]]}  # fmt: skip
    expected = {name: name for name in TASKS} | {"uses_its_variables": "proven"}
    assert {name: result["status"] for name, result in found.items()} == expected
    reasons = {name: result["reason"] for name, result in found.items()}
    assert reasons["unsolved"].startswith("the reference solution passes 1 of 2 checks, not made (status 3: trying")
    assert "doing nothing passes all 1 checks" in reasons["solved"] and "gpus" in reasons["unplayable"]
    assert "no result file" in reasons["untrusted"] and "no such thing" in reasons["unbuildable"]
    assert "agent.timeout_sec: 'x'" in reasons["broken"] and "different verdicts" in reasons["unstable"]
    assert found["proven"]["baseline"] == {"kept": True, "made": False} and found["proven"]["passed"] == 2
    assert set(found["proven"]["seconds"]) == {"build", "solution", "verifier"}
    notes = "; ".join(found["uses_its_variables"]["notes"])
    assert "unknown fields: environment.shape" in notes and "asks for 999999 MB" in notes
    assert "10 tasks: 2 proven, 1 unproven, 1 solved" in said and "table.txt" in said
    assert all(name in (out / "table.txt").read_text() for name in TASKS)
    listed = load_tasks(out / "tasks.list")
    assert [task.name for task in listed] == ["proven", "uses_its_variables"]
    assert with_baselines(listed, out)[0].baseline_checks == {"kept": True, "made": False}
    own = read_baselines(out / "baseline.json")
    assert (
        not (tasks / "baseline.json").exists()
        and sorted(own) == ["proven", "unproven", "uses_its_variables"]
        and own["proven"].names == ("kept", "made")
    )


def test_a_check_goes_on_and_forgets_what_changed(tasks, tmp_path, capsys):
    out, words = tmp_path / "out", ["tasks", "check", str(tasks), "--out", str(tmp_path / "out"), "--repeats", "1"]
    for name in TASKS:
        if name not in ("proven", "unproven", "unbuildable"):
            shutil.rmtree(tasks / name)
    assert main([*words, "--limit", "1"]) == 0
    assert played(out) == ["proven"]
    with open(out / "results.jsonl", "a") as file:
        file.write('{"settings": "cut sho')
    assert main([*words, "--with-unproven"]) == 1
    assert [task.name for task in load_tasks(out / "tasks.list")] == ["proven", "unproven"]
    assert "1 of 3 are known already" in capsys.readouterr().out


def test_what_depends_on_the_machine_is_tried_again(tasks, tmp_path):
    out = tmp_path / "out"
    checks = [TaskCheck(tasks, out, EnvConfig(), repeats=1)]
    sandbox = BrokenSandbox()
    proven = next(folder for folder in checks[0].folders if folder.path.name == "proven")
    asyncio.run(checks[0].play(proven, sandbox))
    assert checks[0].checked["proven"].proof.reason == "no room (/here)"
    again = TaskCheck(tasks, out, EnvConfig(), repeats=1)
    assert "proven" in [folder.path.name for folder in again.pending]
    gone = next(folder for folder in checks[0].folders if folder.path.name == "broken")
    asyncio.run(checks[0].play(gone, sandbox))
    names = {
        "as before": TaskCheck(tasks, out, EnvConfig(), repeats=1),
        "more repeats": TaskCheck(tasks, out, EnvConfig(), repeats=2),
        "another sandbox": TaskCheck(tasks, out, EnvConfig(sandbox=SandboxConfig(memory_mb=99)), repeats=1),
        "asked for": TaskCheck(tasks, out, EnvConfig(), repeats=1, again=[Status.BROKEN]),
    }
    known = {name: "broken" in check.checked for name, check in names.items()}
    assert known == {"as before": True, "more repeats": False, "another sandbox": False, "asked for": False}
    (tasks / "broken/task.toml").write_text("")
    assert "broken" not in TaskCheck(tasks, out, EnvConfig(), repeats=1).checked


class BrokenSandbox:
    async def start(self, task):
        raise SandboxLost("no room", where="/here")


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--workers", "0"], "--workers"), (["--again", "bad"], "--again"), (["env.sandbox.memory_mb=0"], "memory_mb")],
)
def test_wrong_command_lines(tasks, words, problem, capsys):
    assert main(["tasks", "check", str(tasks), *words]) == 2
    assert problem in capsys.readouterr().err


def test_convert(tmp_path, capsys):
    for name, extra in (("good", {}), ("bad", {"solution.yaml": "[]"})):
        folder = tmp_path / "old" / name
        folder.mkdir(parents=True)
        files = {"task.yaml": "instruction: x\n", "docker-compose.yaml": "services: {client: {build: .}}\n",
                 "Dockerfile": "FROM a\n", "run-tests.sh": "true\n"} | extra  # fmt: skip
        for file, text in files.items():
            (folder / file).write_text(text)
    assert main(["tasks", "convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    said = capsys.readouterr()
    assert "1 of 2 tasks converted" in said.out and "bad: solution.yaml" in said.err
    assert [task.name for task in load_tasks(tmp_path / "new")] == ["good"]
    assert main(["tasks", "convert", str(tmp_path / "new"), str(tmp_path / "newer")]) == 1
    assert "no task" in capsys.readouterr().err
