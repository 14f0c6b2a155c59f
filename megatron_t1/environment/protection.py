"""What surrounds a task's tests when they run, so that what the agent left behind doesn't count: for every backend.

The agent's processes are dead by then, and the tests are a copy that it never saw. What remains is what programs pick
up by themselves from environment variables and from files in well-known places.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_t1.environment.results import PYTEST
from megatron_t1.environment.sandbox.interface import Change
from megatron_t1.environment.task import DEFAULT_WORKDIR, Files, Task
from megatron_t1.errors import T1Error

VERIFIER_DIR = "/logs/verifier"
# Settings that pytest looks for beside the tests and in the folders above, up to /, where an agent may put some.
PYTEST_SETTINGS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg")
_RUNS_PYTEST = re.compile(r"(?:^|[\s;&|(/])(?:pytest|py\.test)(?=\s|$|;|\))")
_RUNS_MODULE = re.compile(r"\bpython[\d.]*\s(?:.*\s)?-m\s+(?:pytest|unittest)\b")
# What `python -m pytest` looks for in the working directory before anywhere else.
_IMPORTED = {*sys.stdlib_module_names, "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"}
_CHANGES_DIRECTORY = re.compile(r"\bcd\s+[\"']?(/[^\s;&|\"']*)")
_NO_RUN = re.compile(r"\b(?:install|which|type|add)\b|command -v|--version|^\s*(?:echo|#)")


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
    or 1 can be counted one by one; packages in the agent's home are not loaded.
    """
    env = {"PYTHONNOUSERSITE": "1", **image_env, **task.verifier_env}
    report = f"--junitxml={VERIFIER_DIR}/{PYTEST}"
    env["PYTEST_ADDOPTS"] = f"{env['PYTEST_ADDOPTS']} {report}" if env.get("PYTEST_ADDOPTS") else report
    return env


def planted(task: Task, changes: Iterable[Change]) -> str:
    """A file that the agent added and that takes the place of a part of pytest or Python in the tests; "" for none.

    `python -m pytest` puts the working directory first among the places that modules are looked for in.
    """
    places = {f"{place.rstrip('/')}/" for place in _places(task)}
    for change in changes:
        if change.kind != "added" or not change.path.endswith((".py", ".so", ".pyc")):
            continue
        for place in places:
            first = change.path.removeprefix(place).partition("/")[0]
            if change.path.startswith(place) and first.partition(".")[0] in _IMPORTED:
                return change.path
    return ""


def runs_module(task: Task) -> bool:
    """Whether tests/test.sh runs `python -m pytest` (or unittest), as far as its lines show."""
    return any(_RUNS_MODULE.search(line) for line in _lines(task))


def runs_pytest(task: Task) -> bool:
    """Whether tests/test.sh runs pytest, as far as its lines show."""
    return any(_RUNS_PYTEST.search(line) and not _NO_RUN.search(line) for line in _lines(task))


def _places(task: Task) -> set[str]:
    """Directories that the tests may run in: the image's, and those that tests/test.sh names."""
    named = {place for line in _lines(task) for place in _CHANGES_DIRECTORY.findall(line)}
    try:
        return {*named, task.image.workdir}
    except T1Error:  # a Dockerfile that only a container engine can follow
        return {*named, task.workdir or DEFAULT_WORKDIR}


def _lines(task: Task) -> list[str]:
    return task.test_files().get("test.sh", (b"", 0))[0].decode(errors="replace").splitlines()
