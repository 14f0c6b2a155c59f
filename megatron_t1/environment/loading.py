"""Find tasks, load them, write them: directories in Harbor's format or the older Terminal-Bench format, and lists.

A list is a text file that names task directories, one a line, relative to itself; `t1 tasks check` writes one of the
tasks that it proved. A line is a path, or a JSON object with `path` and, to hold a task to what was proven, `sha256`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.environment import terminal_bench
from megatron_t1.environment.digest import task_digest
from megatron_t1.environment.dockerfile_words import literal
from megatron_t1.environment.harbor_format import read_task
from megatron_t1.environment.task import Files, Task
from megatron_t1.environment.toml_text import toml_document
from megatron_t1.errors import T1Error, readable

TASK_FILES = ("task.toml", "instruction.md", terminal_bench.TASK_FILE)
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class TaskFolder:
    """A place where a task should lie.

    Attributes:
        sha256: of its files (`digest.task_digest`) when it was proven; "" for any content.
    """

    path: Path
    sha256: str = ""


def find_tasks(path: str | Path) -> list[TaskFolder]:
    """The task directories that `path` names, sorted by name: the folders in a directory, or the lines of a list.

    Raises:
        T1Error: there is nothing, it names no task, or two tasks of one name.
    """
    path = Path(path)
    if path.is_dir():
        folders = [folder for folder in path.iterdir() if not folder.name.startswith(".") and folder.is_dir()]
        found = [TaskFolder(folder) for folder in folders if any((folder / name).exists() for name in TASK_FILES)]
        remedy = "give the folder above the tasks"
    elif path.is_file():
        found = _read_list(path)
        remedy = "name one task directory on each line"
    else:
        raise T1Error("there is no such task directory", where=str(path), remedy="make one with: t1 tasks generate")
    if not found:
        raise T1Error("no task (folder with task.toml) in it", where=str(path), remedy=remedy)
    found.sort(key=lambda folder: folder.path.name)
    for one, other in zip(found, found[1:], strict=False):
        if one.path.name == other.path.name:
            raise T1Error(
                f"two tasks are named {one.path.name!r}: {one.path} and {other.path}",
                where=str(path),
                remedy="rename one of the folders",
            )
    return found


def load_tasks(path: str | Path, *, engine_builds: bool = False) -> list[Task]:
    """Every task of a task directory or list, sorted by name.

    Args:
        engine_builds: see `builds_dockerfiles`; without it a Dockerfile has to be one that bubblewrap can follow.

    Raises:
        T1Error: there is none, or some are broken, have changed since they were proven, or need what can't be played
            here; lists the problems of all of them.
    """
    folders = find_tasks(path)
    tasks, problems = [], []
    for folder in folders:
        try:
            task = load_task(folder.path, engine_builds=engine_builds)
            if folder.sha256 and folder.sha256 != _digest(folder.path):
                problems.append(f"{folder.path.name}: changed since `t1 tasks check` proved it")
            elif task.obstacles:
                problems.append(f"{folder.path.name}: can't be played: {'; '.join(task.obstacles)}")
            else:
                tasks.append(task)
        except T1Error as error:
            problems.append(f"{folder.path.name}: {error.problem}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = "\n  ".join(problems[:SHOWN_PROBLEMS]) + (f"\n  and {more} more" if more > 0 else "")
        raise T1Error(
            f"{len(problems)} of {len(folders)} tasks are broken or can't be played:\n  {shown}",
            where=str(path),
            remedy="repair or remove these tasks; `t1 tasks check` writes a list without them",
        )
    return tasks


def load_task(directory: str | Path, *, engine_builds: bool = False) -> Task:
    """One task. A directory with task.yaml is read by Harbor's own rules for Terminal-Bench's format.

    Args:
        engine_builds: as in `load_tasks`.

    Raises:
        T1Error: lists every problem of this task, by file and field.
    """
    directory = Path(directory)
    try:
        if not (directory / "task.toml").exists() and (directory / terminal_bench.TASK_FILE).exists():
            return terminal_bench.read_task(directory, engine_builds=engine_builds)
        return read_task(directory, engine_builds=engine_builds)
    except OSError as error:
        raise T1Error(
            f"can't be read: {error.strerror or error}",
            where=str(error.filename or directory),
            remedy="check its permissions",
        ) from error


def _digest(directory: Path) -> str:
    try:
        return task_digest(directory)
    except OSError as error:
        raise readable(error) from error


def write_list(path: str | Path, folders: Sequence[TaskFolder]) -> None:
    """Write a list of tasks, complete or not at all; paths are relative to it where they lie below or beside it."""
    path = Path(path).resolve()
    lines = []
    for folder in sorted(folders, key=lambda folder: folder.path.name):
        entry = {"path": os.path.relpath(folder.path.resolve(), path.parent)}
        lines.append(json.dumps(entry | ({"sha256": folder.sha256} if folder.sha256 else {})))
    atomic.write_text(path, "".join(f"{line}\n" for line in lines))


def _read_list(path: Path) -> list[TaskFolder]:
    found, problems = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(f"can't read the list of tasks: {error}", where=str(path), remedy="check the file") from error
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            folder = _list_entry(line, path.parent)
            if not folder.path.is_dir():
                raise ValueError(f"there is no directory {folder.path}")
            found.append(folder)
        except (ValueError, RecursionError, OSError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise T1Error(
            "; ".join(problems[:SHOWN_PROBLEMS]),
            where=str(path),
            remedy="a line is the path of a task directory, or what `t1 tasks check` writes",
        )
    return found


def _list_entry(line: str, base: Path) -> TaskFolder:
    entry = json.loads(line) if line.startswith("{") else {"path": line}
    name, digest = entry.get("path"), entry.get("sha256", "")
    if not isinstance(name, str) or not name or not isinstance(digest, str):
        raise ValueError(f"{line[:80]!r} has no path")
    return TaskFolder(base / name, digest)


def write_task(task: Task, directory: str | Path) -> None:
    """Write an in-memory task as a Harbor directory (which must not exist).

    Raises:
        ValueError: it lies in a directory already, or a variable holds a line break.
    """
    directory = Path(directory)
    if task.content is None:
        raise ValueError(f"task {task.name} already lies in {task.directory}")
    directory.mkdir(parents=True)
    (directory / "instruction.md").write_text(task.instruction + "\n")
    (directory / "task.toml").write_text(_toml(task))
    workdir = task.image.workdir
    lines = ["FROM debian:12-slim"]
    lines += [f"ENV {name}={literal(value)}" for name, value in task.env.items()]
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
    return toml_document(
        {
            "schema_version": "1.4",
            "metadata": {**task.metadata, "baseline": task.baseline},
            "agent": {"timeout_sec": task.agent_timeout_s},
            "verifier": {"timeout_sec": task.verifier_timeout_s},
            "environment": {"network_mode": "no-network"},
        }
    )
