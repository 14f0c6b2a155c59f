"""Tasks whose tests/test.sh runs pytest and leaves only 0 or 1: each check is counted, and no agent talks into it."""

import sys
from pathlib import Path

import pytest

from megatron_t1.environment.protection import protected_tests, runs_pytest
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.environment.verifier import verify

PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
TESTS = """
import os, solution

def test_exists():
    assert os.path.exists("/app/made")

def test_value():
    assert solution.value() == 7

def test_never():
    raise ValueError
"""
PROGRAM = """#!/usr/bin/env python3
import sys
sys.path[:0] = ["/tests/lib", "/app"]
import pytest
sys.exit(pytest.main())
"""
RUN = """#!/bin/bash
PATH=/tests/bin:$PATH
pytest /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture(scope="session")
def pytest_files():
    """pytest's own files as they are loaded here, so that the sandbox's Python has them in the protected tests."""
    site = Path(pytest.__file__).parents[1]
    files = {Path(m.__file__) for name, m in list(sys.modules.items())
             if name.partition(".")[0] in PACKAGES and getattr(m, "__file__", None)}  # fmt: skip
    files |= {*(site / "_pytest").rglob("*.py"), *site.glob("pluggy-*.dist-info/METADATA")}
    found = {f"lib/{path.relative_to(site)}": (path.read_bytes(), 0o644) for path in files if path.suffix != ".so"}
    return {**found, "bin/pytest": (PROGRAM.encode(), 0o755)}


@pytest.fixture
def verdict_of(in_sandbox, pytest_files):
    def run(commands=(), *, test_sh=RUN, tests=TESTS, **options):
        content = TaskContent(
            files={"solution.py": (b"def value():\n    return 6\n", 0o644)},
            tests={**pytest_files, "test.sh": (test_sh.encode(), 0o755), "test_outputs.py": (tests.encode(), 0o644)},
        )
        task = Task("task", "do it", content=content, **options)

        async def body(sandbox):
            await sandbox.start(task)
            for command in commands:
                await sandbox.run(command, 60)
            return await verify(sandbox, task, 120)

        return in_sandbox(body, memory_mb=2048)

    return run


def test_every_check_of_a_binary_task_counts(verdict_of):  # Repo2RLEnv#44
    verdict = verdict_of(["touch made", "echo 'def value(): return 7' > solution.py"])
    assert (verdict.passed, verdict.total, verdict.trusted, verdict.source) == (2, 3, True, "pytest.xml"), (
        verdict.reason
    )
    assert verdict.checks == {"test_outputs::test_exists": True, "test_outputs::test_value": True,
                              "test_outputs::test_never": False}  # fmt: skip
    assert verdict.rewards == {"reward": 0.0} and not verdict.solved


@pytest.mark.slow
def test_tests_that_cannot_be_collected_are_failed_checks_by_name(verdict_of):
    names = ("test_outputs::test_exists", "test_outputs::test_value")
    verdict = verdict_of(["rm solution.py"], check_names=names)
    assert (verdict.passed, verdict.total, verdict.trusted) == (0, 2, True)
    assert verdict.statuses == dict.fromkeys(names, "missing")


@pytest.mark.parametrize(
    "command",
    [
        "printf '[pytest]\\naddopts = -k exists\\n' | tee /pytest.ini /tox.ini > /app/pytest.ini",
        "printf 'def pytest_collection_modifyitems(items):\\n  del items[1:]\\n' | tee /conftest.py > /app/conftest.py",
        "export PYTEST_ADDOPTS='-k exists' PYTEST_PLUGINS=evil PYTHONPATH=/app/evil PYTHONSTARTUP=/app/evil.py",
        "mkdir -p ~/.config ~/.local/lib/python3.11/site-packages;"
        " cd ~/.local/lib/python3.11/site-packages;"
        " echo 'import os; os._exit(0)' | tee evil.pth sitecustomize.py > usercustomize.py",
        "ln -s /logs/verifier/reward.txt link; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
        " ln /logs/verifier/reward.txt hard; echo '<testsuite/>' > /logs/verifier/pytest.xml",
        "(setsid sh -c 'cd /logs/verifier; while :; do echo 1 > reward.txt; rm -f pytest.xml; done' &) 2>/dev/null",
        "echo 'echo 1 > /logs/verifier/reward.txt; exit 0' | tee ~/.bashrc ~/.bash_profile > /etc/profile;"
        " export BASH_ENV=~/.bashrc ENV=~/.bashrc LD_PRELOAD=/app/evil.so LD_LIBRARY_PATH=/app",
        "cp /bin/true /app/bash; mv /bin/bash /bin/old; cp /bin/true /bin/bash; cp /bin/true /usr/bin/python3; hash -r",
        "rm /bin; mkdir /bin; for name in bash sh env python3; do cp /usr/bin/true /bin/$name; done",
    ],
)
@pytest.mark.slow
def test_what_the_agent_plants_changes_nothing(verdict_of, command):
    verdict = verdict_of([command])
    assert (verdict.passed, verdict.total, verdict.trusted) == (0, 3, True), verdict.reason
    assert verdict.source == "pytest.xml"


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "__import__('sys').exit(0)"])
@pytest.mark.slow
def test_code_that_ends_pytest_is_no_pass(verdict_of, ending):
    """The tests import the agent's module, which ends the process with status 0: test.sh then writes reward 1."""
    verdict = verdict_of([f"printf 'import os\\n{ending}\\n' > solution.py"])
    assert verdict.passed == 0 and not verdict.solved
    if "sys" not in ending:  # an exit that pytest catches is a failed collection
        assert not verdict.trusted and "left no report" in verdict.reason


def test_a_missing_pytest_is_no_zero(verdict_of):  # strands-env#183
    """test.sh calls a program that isn't there and writes 0: the verifier is broken, not the agent's work."""
    verdict = verdict_of(test_sh=RUN.replace("/tests/bin", "/none"))
    assert not verdict.trusted and "left no report" in verdict.reason


def test_a_module_in_the_place_of_pytest_is_noticed(verdict_of):
    script = (
        "#!/bin/bash\ncd /app\npython3 -m pytest /tests/test_outputs.py\necho $((! $?)) > /logs/verifier/reward.txt\n"
    )
    verdict = verdict_of(["echo 'raise SystemExit(0)' > pytest.py"], test_sh=script)
    assert not verdict.trusted and "/app/pytest.py" in verdict.reason


@pytest.mark.slow
def test_all_pass_and_a_reward_of_zero_contradict_each_other(verdict_of):
    tests = "def test_fine(): pass\n"
    script = RUN + "echo 0 > /logs/verifier/reward.txt\n"
    verdict = verdict_of(test_sh=script, tests=tests)
    assert not verdict.trusted and "the task's own reward is 0" in verdict.reason
    alone = verdict_of(test_sh=script, tests=tests, metadata={"result": "reward"})
    assert (alone.trusted, alone.passed, alone.total, alone.source) == (True, 0, 1, "reward.txt")


FORGES = {
    "an uninvited report": """
import json
tests = [{"name": str(index), "status": "passed"} for index in range(9999)]
with open("/logs/verifier/ctrf.json", "w") as file:
    json.dump({"results": {"tests": tests}}, file)
""",
    "the report, afterwards": """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
path = "/logs/verifier/pytest.xml"
while not (os.path.exists(path) and os.path.getsize(path)):
    time.sleep(0.01)
with open(path, "w") as file:
    file.write('<testsuite><testcase name="a"/><testcase name="b"/></testsuite>')
""",
}


@pytest.mark.parametrize("forged", sorted(FORGES))
@pytest.mark.slow
def test_a_program_that_the_tests_start_writes_no_verdict(verdict_of, forged):
    """It runs with the verifier's rights; what it writes contradicts the other things that pytest says."""
    tests = "import subprocess\ndef test_runs(): subprocess.run(['python3', '/app/made.py'])\ndef test_b(): assert 0\n"
    write = f"cat > made.py <<'END'\n{FORGES[forged]}\nEND"
    verdict = verdict_of([write], tests=tests, test_sh=RUN + "sleep 1\n")
    assert (verdict.trusted, verdict.passed) == (False, 0)
    assert "contradict" in verdict.reason or "last line says 1" in verdict.reason


@pytest.mark.parametrize(
    ("script", "runs"),
    [
        ("pytest /tests/test_outputs.py -rA", True),
        ("uvx -p 3.13 -w pytest==8.4.1 pytest --ctrf /logs/verifier/ctrf.json /tests/a.py", True),
        ("cd /app && python3 -m pytest -q", True),
        ("python -m unittest discover", False),
        ("/opt/venv/bin/pytest; true", True),
        ("pip install pytest", False),
        ("# pytest /tests\necho pytest", False),
        ("exec python3 -I -S /tests/test_outputs.py", False),
        ("pytest --version", False),
        ("python3 -mpytest /tests", True),
        ("$PYTHON -m \\\n  pytest /tests", True),
        ("bash /tests/inner.sh", True),
        ("bash /tests/other.sh", False),
    ],
)
def test_whether_pytest_runs_is_read_from_the_script(script, runs):
    scripts = {"test.sh": script, "inner.sh": "cd /app\n. /tests/inmost.sh", "inmost.sh": "pytest", "other.sh": "true"}
    files = {name: (text.encode(), 0o755) for name, text in scripts.items()}
    assert runs_pytest(Task("t", "do", content=TaskContent(tests=files))) == runs


def test_settings_of_the_tasks_own_stay(make_task):
    task = make_task()
    assert protected_tests(task)["pytest.ini"][0] == b"[pytest]\n"
    own = Task("t", "do", content=TaskContent(tests={"test.sh": (b"x", 0o755), "tox.ini": (b"[pytest]\n", 0o644)}))
    assert "pytest.ini" not in protected_tests(own)
