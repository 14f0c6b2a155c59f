"""What surrounds a task's tests when they run, so that what the agent left behind doesn't count: for every backend.

The agent's processes are dead by then, and the tests are a copy that it never saw. What remains is what programs pick
up by themselves from environment variables and from files in well-known places.
"""

from __future__ import annotations

import os
import posixpath
import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_t1.environment.results import PYTEST
from megatron_t1.environment.scripts import NO_RUN, RUNS_PYTEST, commands, texts, without_comments
from megatron_t1.environment.task import Files, Task
from megatron_t1.errors import T1Error

VERIFIER_DIR = "/logs/verifier"
# Settings that pytest looks for beside the tests and in the folders above, up to /, where an agent may put some.
PYTEST_SETTINGS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg")


def protected_tests(task: Task) -> Files:
    """The task's tests, with an empty pytest.ini where they bring no settings of their own.

    pytest then looks no further: settings and conftest.py files above /tests take no part.
    """
    tests = dict(task.test_files())
    if not any(name in tests for name in PYTEST_SETTINGS):
        tests["pytest.ini"] = (b"[pytest]\n", 0o644)
    return tests


def write_protected_tests(task: Task, directory: Path) -> None:
    """Write `protected_tests` to a new `directory`: the driver's own, readable for everybody.

    Raises:
        T1Error: a test lies outside of tests/.
        OSError: the directory can't be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, (content, mode) in protected_tests(task).items():
        if posixpath.normpath(name).startswith(("..", "/")):
            raise T1Error(f"test file {name!r} lies outside tests/", where=f"task {task.name}")
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode | 0o444)
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o755)


def verifier_environment(task: Task, image_env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of the verifier: the image's and the task's own; nothing of the agent's session.

    pytest is asked for a report of its own beside the task's results, so that the checks of a task that says only 0
    or 1 can be counted one by one; packages in the agent's home are not loaded, and pip and uv are told nothing by the
    agent's files about where packages are.
    """
    own = {"PYTHONNOUSERSITE": "1", "PIP_CONFIG_FILE": "/dev/null", "UV_NO_CONFIG": "1"}
    env = {**own, **image_env, **task.verifier_env}
    report = f"--junitxml={VERIFIER_DIR}/{PYTEST}"
    env["PYTEST_ADDOPTS"] = f"{env['PYTEST_ADDOPTS']} {report}" if env.get("PYTEST_ADDOPTS") else report
    return env


def runs_pytest(task: Task) -> bool:
    """Whether tests/test.sh, or a shell script beside it that it names, runs pytest, as far as its commands show."""
    found = commands(without_comments(_shell_text(task)))
    return any(RUNS_PYTEST.search(command) and not NO_RUN.search(command) for command in found)


def asks_for_junit(task: Task) -> bool:
    """Whether those scripts ask pytest for a JUnit report of their own, which takes the place of the one we ask for."""
    return "junit" in _shell_text(task).lower()


def _shell_text(task: Task) -> str:
    """tests/test.sh and the scripts that it leads to."""
    scripts = {name: text for name, text in texts(task.test_files()).items() if name.endswith(".sh")}
    reached, waiting = {}, ["test.sh"]
    while waiting:
        name = waiting.pop()
        reached[name] = text = scripts.get(name, "")
        waiting += {other for other in scripts.keys() - reached if posixpath.basename(other) in text} - {*waiting}
    return "\n".join(reached.values())
