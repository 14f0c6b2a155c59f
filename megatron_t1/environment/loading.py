"""Read and write tasks in Harbor's format: task.toml, instruction.md, environment/, tests/test.sh, solution/."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from megatron_t1.environment.image import load_image
from megatron_t1.environment.task import Files, Task
from megatron_t1.errors import T1Error

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load_tasks(directory: str | Path) -> list[Task]:
    """Every task below `directory` (one folder each), sorted by name.

    Raises:
        T1Error: the directory is missing or holds no task, or some task is broken; lists the problems of all of them.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise T1Error(
            "there is no such task directory", where=str(directory), remedy="make one with: t1 tasks generate"
        )
    folders = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders = [folder for folder in folders if (folder / "task.toml").exists() or (folder / "instruction.md").exists()]
    if not folders:
        raise T1Error(
            "no task (folder with task.toml) in it", where=str(directory), remedy="give the folder above the tasks"
        )
    tasks, problems = [], []
    for folder in folders:
        try:
            tasks.append(load_task(folder))
        except T1Error as error:
            problems.append(f"{folder.name}: {error.problem}")
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise T1Error(
            f"{len(problems)} of {len(folders)} tasks are broken:\n  {shown}",
            where=str(directory),
            remedy="repair or remove these tasks",
        )
    return tasks


def load_task(directory: str | Path) -> Task:
    """One task.

    Raises:
        T1Error: lists every problem of this task, by file and field.
    """
    directory = Path(directory)
    problems: list[str] = []
    if not _NAME.fullmatch(directory.name):
        problems.append(f"folder name {directory.name!r}: letters, digits, '.', '_' and '-' only")
    table = _Table(_read_toml(directory / "task.toml", problems), problems)
    instruction = _read_instruction(directory / "instruction.md", problems)
    test_script = directory / "tests" / "test.sh"
    if not test_script.is_file():
        problems.append("tests/test.sh: missing (a task without a verifier can't be scored)")
    elif not test_script.read_bytes().strip():
        problems.append("tests/test.sh: empty")
    if (directory / "steps").is_dir():
        problems.append("steps/: tasks of several steps are not supported")
    try:
        load_image(directory / "environment", where=directory.name)
    except T1Error as error:
        problems.append(f"environment/Dockerfile: {error.problem}")
    metadata = table.table("metadata")
    baseline = metadata.get("baseline", -1)
    if isinstance(baseline, bool) or not isinstance(baseline, int) or baseline < -1:
        problems.append(f"task.toml: metadata.baseline: {baseline!r} is not a number of checks")
    task = Task(
        name=directory.name,
        instruction=instruction,
        directory=directory.resolve(),
        workdir=table.text("environment", "workdir"),
        env=table.environment("environment"),
        verifier_env=table.environment("verifier"),
        verifier_timeout_s=table.seconds("verifier", "timeout_sec", 600.0),
        agent_timeout_s=table.seconds("agent", "timeout_sec", 600.0),
        baseline=baseline,
        metadata=metadata,
    )
    if task.workdir and not task.workdir.startswith("/"):
        problems.append(f"task.toml: environment.workdir: {task.workdir!r} is not an absolute path")
    if problems:
        raise T1Error("; ".join(problems), where=str(directory), remedy="repair the task")
    return task


def write_task(task: Task, directory: str | Path) -> None:
    """Write an in-memory task as a Harbor directory (which must not exist)."""
    directory = Path(directory)
    if task.content is None:
        raise ValueError(f"task {task.name} already lies in {task.directory}")
    directory.mkdir(parents=True)
    (directory / "instruction.md").write_text(task.instruction + "\n")
    (directory / "task.toml").write_text(_toml(task))
    workdir = task.image.workdir
    lines = ["FROM debian:12-slim"]
    lines += [f"ENV {name}={_quote(value)}" for name, value in task.env.items()]
    lines += [f"WORKDIR {workdir}/{path}" for path in task.content.directories]  # creates it, without a shell
    lines.append(f"WORKDIR {workdir}")
    _write_files(directory / "environment" / "files", task.content.files)
    if task.content.files:
        lines.append(f"COPY files/ {workdir}/")
    (directory / "environment" / "Dockerfile").write_text("\n".join(lines) + "\n")
    _write_files(directory / "tests", task.content.tests)
    _write_files(directory / "solution", task.content.solution)


def _write_files(directory: Path, files: Files) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, (content, mode) in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)


def _toml(task: Task) -> str:
    lines = ['schema_version = "1.4"', "", "[metadata]"]
    metadata = {**task.metadata, "baseline": task.baseline}
    lines += [f"{name} = {_toml_value(value)}" for name, value in metadata.items()]
    lines += ["", "[agent]", f"timeout_sec = {task.agent_timeout_s}", "", "[verifier]"]
    lines += [f"timeout_sec = {task.verifier_timeout_s}", "", "[environment]", 'network_mode = "no-network"']
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    raise TypeError(f"task metadata can't hold {value!r}")


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _read_toml(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        problems.append("task.toml: missing")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"task.toml: {error}")
    return {}


def _read_instruction(path: Path, problems: list[str]) -> str:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"instruction.md: {'missing' if isinstance(error, FileNotFoundError) else error}")
        return ""
    if not text:
        problems.append("instruction.md: empty")
    return text


class _Table:
    """Typed access to task.toml that notes every wrong type."""

    def __init__(self, raw: dict[str, Any], problems: list[str]):
        self._raw, self._problems = raw, problems

    def table(self, section: str) -> dict[str, Any]:
        value = self._raw.get(section, {})
        if isinstance(value, dict):
            return value
        self._note(section, "is not a table", value)
        return {}

    def _note(self, field: str, problem: str, value: Any) -> None:
        message = f"task.toml: {field}: {value!r} {problem}"
        if message not in self._problems:
            self._problems.append(message)

    def text(self, section: str, field: str) -> str:
        value = self.table(section).get(field, "")
        if isinstance(value, str):
            return value
        self._note(f"{section}.{field}", "is not a text", value)
        return ""

    def seconds(self, section: str, field: str, default: float) -> float:
        value = self.table(section).get(field, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e7:
            return float(value)
        self._note(f"{section}.{field}", "is not a positive number of seconds", value)
        return default

    def environment(self, section: str) -> dict[str, str]:
        value = self.table(section).get("env", {})
        if isinstance(value, dict) and all(isinstance(item, str) and "\0" not in item for item in value.values()):
            return dict(value)
        self._note(f"{section}.env", "is not a table of texts", value)
        return {}
