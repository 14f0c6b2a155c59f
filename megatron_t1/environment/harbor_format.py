"""One task directory in Harbor's format: task.toml, instruction.md, environment/, tests/, solution/, steps/.

A task that contradicts the format is refused with every problem in one error. What is well formed and can't be played
here (another operating system, a container for the verifier alone, ...) is loaded, and named in `Task.obstacles`:
whoever wants to play it is told.
"""

from __future__ import annotations

import datetime
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_t1.environment.exec_limits import too_large
from megatron_t1.environment.image import load_image, require_dockerfile
from megatron_t1.environment.steps import REWARD, SETUP
from megatron_t1.environment.task import MEAN, Healthcheck, Resources, Step, Task
from megatron_t1.environment.task_toml import check_document, size_in_mb
from megatron_t1.environment.tree import walk
from megatron_t1.errors import T1Error

DEFAULT_TIMEOUT_S = 600.0
MAX_TEXT_BYTES = 4 << 20  # of an instruction
MAX_TABLES_BYTES = 512 << 10  # of task.toml, and of another file that is parsed
MAX_DEPTH = 32  # of tables in tables
UNKNOWN_FIELDS = "unknown_fields"
ROOT_USERS = (None, "root", 0, "0")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_KEY = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+{_KEY}(?:\.[ \t]*+{_KEY}){{{MAX_DEPTH}}}", re.MULTILINE)
_IGNORE_FILE = ".harborignore"


def read_task(directory: Path, *, engine_builds: bool = False) -> Task:
    """The task in `directory`.

    Args:
        engine_builds: the Dockerfile is a container engine's to build, and only has to be one.

    Raises:
        T1Error: lists every problem of this task, by file and field.
    """
    problems: list[str] = []
    if not _NAME.fullmatch(directory.name):
        problems.append(f"folder name {directory.name!r}: letters, digits, '.', '_' and '-' only")
    raw = _read_toml(directory, problems)
    found = check_document(raw)
    problems += [f"task.toml: {problem}" for problem in found.problems or _too_large_environments(raw)]
    instruction, steps, obstacles = "", [], []
    if raw.get("steps"):
        listed = [] if found.problems else raw["steps"]
        steps = [_step(directory, raw, step, problems, obstacles) for step in listed]
        instruction = steps[0].instruction if steps else ""
    else:
        instruction = _instruction(directory, "instruction.md", problems)
        _require_tests(directory, "tests", problems)
    _require_environment(directory, raw, problems, engine_builds)
    for name in ("tests", "solution", "steps"):
        problems += [f"{name}/{link}: links out of the task" for link in _links_out(directory, name)]
    if problems:
        raise T1Error("; ".join(problems), where=str(directory), remedy="repair the task")
    obstacles = [*_obstacles(directory, raw), *obstacles]
    return _task(directory, raw, instruction, tuple(steps), found.unknown, obstacles)


def _task(
    directory: Path,
    raw: dict[str, Any],
    instruction: str,
    steps: tuple[Step, ...],
    unknown: dict[str, Any],
    obstacles: list[str],
) -> Task:
    environment, agent, verifier = (raw.get(name, {}) for name in ("environment", "agent", "verifier"))
    variables = {
        name: _resolved(raw.get(name, {}).get("env", {}), f"{name}.env", obstacles)
        for name in ("environment", "verifier", "solution")
    }
    metadata = dict(raw.get("metadata", {}))
    if unknown:
        metadata[UNKNOWN_FIELDS] = unknown
    return Task(
        name=directory.name,
        instruction=instruction,
        directory=directory.resolve(),
        workdir=environment.get("workdir", ""),
        docker_image=environment.get("docker_image", ""),
        env=variables["environment"],
        verifier_env=variables["verifier"],
        solution_env=variables["solution"],
        verifier_timeout_s=float(verifier.get("timeout_sec", DEFAULT_TIMEOUT_S)),
        agent_timeout_s=float(agent.get("timeout_sec", DEFAULT_TIMEOUT_S)),
        baseline=metadata.get("baseline", -1),
        package=raw.get("task", {}).get("name", ""),
        resources=_resources(environment),
        steps=steps,
        strategy=raw.get("multi_step_reward_strategy", MEAN).lower(),
        obstacles=tuple(obstacles),
        metadata=_plain(metadata),
    )


def _too_large_environments(raw: dict[str, Any]) -> list[str]:
    tables = {name: raw.get(name, {}).get("env", {}) for name in ("environment", "verifier", "solution")}
    for step in raw.get("steps", []):
        tables[f"steps.{step['name']}.verifier"] = tables["verifier"] | step.get("verifier", {}).get("env", {})
    said = {name: too_large((), tables["environment"] | table) for name, table in tables.items()}
    return [f"{name}.env: {problem}" for name, problem in said.items() if problem]


def _resources(environment: dict[str, Any]) -> Resources:
    sizes = {
        name: environment.get(f"{name}_mb", size_in_mb(environment[name]) if name in environment else 0)
        for name in ("memory", "storage")
    }
    return Resources(
        cpus=float(environment.get("cpus", 0)),
        memory_mb=sizes["memory"],
        storage_mb=sizes["storage"],
        build_timeout_s=float(environment.get("build_timeout_sec", DEFAULT_TIMEOUT_S)),
    )


def _obstacles(directory: Path, raw: dict[str, Any]) -> Iterator[str]:
    """What is allowed by the format and not offered by the sandboxes or the agent loop here."""
    environment = raw.get("environment", {})
    if not raw.get("steps") and (directory / "steps").is_dir():
        yield "steps/: a folder of steps that task.toml doesn't list"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"environment.os = {environment['os']!r}"
    for name in ("gpus", "tpu", "mcp_servers", "skills_dir", "healthcheck"):
        if environment.get(name):
            yield f"environment.{name}"
    if environment.get("network_mode", "").lower() == "allowlist":
        yield "environment.network_mode = 'allowlist': a sandbox has no network"
    if (directory / "environment" / "docker-compose.yaml").exists():
        yield "environment/docker-compose.yaml: more than one container"
    yield from _part_obstacles(raw, "")
    yield from _file_obstacles(directory, "")


def _part_obstacles(part: dict[str, Any], prefix: str) -> Iterator[str]:
    """Of [agent] and [verifier], the task's or a step's."""
    agent, verifier = part.get("agent", {}), part.get("verifier", {})
    for name, section in (("agent", agent), ("verifier", verifier)):
        if section.get("user") not in ROOT_USERS:
            yield f"{prefix}{name}.user = {section['user']!r}: agent and verifier have the user of the Dockerfile"
    if verifier.get("environment_mode", "").lower() == "separate" or "environment" in verifier:
        yield f"{prefix}verifier.environment_mode = 'separate': the verifier runs in the agent's sandbox, after its end"
    if verifier.get("collect"):
        yield f"{prefix}verifier.collect"
    for name, section in (("agent", agent), ("verifier", verifier)):
        if section.get("network_mode", "").lower() == "allowlist":
            yield f"{prefix}{name}.network_mode = 'allowlist': a sandbox has no network"


def _file_obstacles(directory: Path, folder: str) -> Iterator[str]:
    """In a task's or a step's folder."""
    if (directory / folder / "trajectory.json").exists():
        yield f"{folder}trajectory.json: a conversation to go on with"
    places = [f"{folder}{name}" for name in ("", "tests/", "solution/", "workdir/")]
    yield from (f"{place}{_IGNORE_FILE}" for place in places if (directory / place / _IGNORE_FILE).exists())


def _resolved(table: dict[str, str], field: str, obstacles: list[str]) -> dict[str, str]:
    """`${NAME:-default}` becomes its default: variables of this machine never enter a sandbox."""
    values = {}
    for name, value in table.items():
        template = _TEMPLATE.fullmatch(value)
        if template and template[2] is None:
            obstacles.append(f"{field}.{name} = {value!r}: variables of this machine stay out of a sandbox")
        values[name] = (template[2] or "") if template else value
    return values


def _step(
    directory: Path, raw: dict[str, Any], step: dict[str, Any], problems: list[str], obstacles: list[str]
) -> Step:
    folder = f"steps/{step['name']}"
    field = f"steps.{step['name']}."
    obstacles += [*_part_obstacles(step, field), *_file_obstacles(directory, f"{folder}/")]
    if os.path.lexists(directory / folder / "workdir" / SETUP):
        read_text(directory, f"{folder}/workdir/{SETUP}", problems)
    least = step.get("min_reward", {})
    least = least if isinstance(least, dict) else {REWARD: least}
    if not (directory / folder / "tests" / "test.sh").is_file():
        _require_tests(directory, "tests", problems, instead_of=f"{folder}/tests")
    shared = {name: raw.get(name, {}).get("timeout_sec", DEFAULT_TIMEOUT_S) for name in ("agent", "verifier")}
    return Step(
        name=step["name"],
        instruction=_instruction(directory, f"{folder}/instruction.md", problems),
        agent_timeout_s=float(step.get("agent", {}).get("timeout_sec", shared["agent"])),
        verifier_timeout_s=float(step.get("verifier", {}).get("timeout_sec", shared["verifier"])),
        verifier_env=_resolved(step.get("verifier", {}).get("env", {}), f"{field}verifier.env", obstacles),
        min_reward={name: float(value) for name, value in least.items()},
        healthcheck=_healthcheck(step["healthcheck"]) if "healthcheck" in step else None,
    )


def _healthcheck(table: dict[str, Any]) -> Healthcheck:
    seconds = ("interval", "timeout", "start_period", "start_interval")
    given = {f"{name}_s": float(table[f"{name}_sec"]) for name in seconds if f"{name}_sec" in table}
    return Healthcheck(table["command"], **given, **({"retries": table["retries"]} if "retries" in table else {}))


def _require_tests(directory: Path, name: str, problems: list[str], *, instead_of: str = "") -> None:
    path = directory / name / "test.sh"
    described = f"{instead_of}/test.sh: missing, and so is {name}/test.sh" if instead_of else f"{name}/test.sh: missing"
    if not path.is_file():
        problems.append(f"{described} (a task without a verifier can't be scored)")
        return
    try:
        with open(path, "rb") as file:
            if not file.read(MAX_TEXT_BYTES).strip():
                problems.append(f"{name}/test.sh: empty")
    except OSError as error:
        problems.append(f"{name}/test.sh: {error.strerror}")


def _require_environment(directory: Path, raw: dict[str, Any], problems: list[str], engine_builds: bool) -> None:
    folder, environment = directory / "environment", raw.get("environment", {})
    ready = isinstance(environment, dict) and environment.get("docker_image")
    if not os.path.lexists(folder / "Dockerfile") and (ready or (folder / "docker-compose.yaml").exists()):
        return
    before = len(problems)
    read_text(directory, "environment/Dockerfile", problems)
    if len(problems) > before:
        return
    try:
        if engine_builds:
            require_dockerfile(folder, where=directory.name)
        else:
            load_image(folder, where=directory.name)
    except T1Error as error:
        problems.append(f"environment/Dockerfile: {error.problem}")


def _links_out(directory: Path, name: str) -> list[str]:
    folder = directory / name
    try:
        own = [] if not folder.is_symlink() or folder.resolve().is_relative_to(directory.resolve()) else ["."]
        return own + (links_out(folder, directory) if folder.is_dir() else [])
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        return [str(error)]


def links_out(folder: Path, root: Path) -> list[str]:
    """Links below a folder that lead out of `root`, or nowhere. Raises OSError: not all of it can be looked at."""
    found, resolved = [], root.resolve()
    for entry in walk(folder):
        try:
            if stat.S_ISLNK(entry.mode) and not Path(entry.path).resolve().is_relative_to(resolved):
                found.append(entry.name)
        except (OSError, RuntimeError):
            found.append(entry.name)
    return found


def _read_toml(directory: Path, problems: list[str]) -> dict[str, Any]:
    text = read_text(directory, "task.toml", problems, MAX_TABLES_BYTES)
    try:
        if _LONG_KEY.search(text):  # the time that tomllib takes for a key grows with the cube of its parts
            raise RecursionError
        raw = tomllib.loads(text)
        if not _is_shallow(raw):
            raise RecursionError
        return raw
    except (ValueError, RecursionError) as error:
        problems.append(f"task.toml: {error if isinstance(error, ValueError) else 'nested too deeply'}")
        return {}


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
    return not level


def _instruction(directory: Path, name: str, problems: list[str]) -> str:
    before = len(problems)
    lines = read_text(directory, name, problems).split("\n")
    while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)  # a mark against training on benchmarks, not for the agent
    text = "\n".join(lines).strip()
    if not text and len(problems) == before:
        problems.append(f"{name}: empty")
    if "\0" in text:
        problems.append(f"{name}: holds a NUL character")
    return text


def read_text(directory: Path, name: str, problems: list[str], limit: int = MAX_TEXT_BYTES) -> str:
    """Of a regular file in the task; "" and a problem where there is none."""
    path = directory / name
    try:
        if not path.exists():
            problems.append(f"{name}: missing")
        elif not path.resolve().is_relative_to(directory.resolve()):
            problems.append(f"{name}: links out of the task")
        elif not path.is_file():
            problems.append(f"{name}: not a file")
        elif path.stat().st_size > limit:
            problems.append(f"{name}: larger than {limit >> 10} KiB")
        else:
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{name}: not UTF-8 ({error.reason} at byte {error.start})")
    except (OSError, ValueError, RuntimeError) as error:
        problems.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    return ""


def _plain(value: Any) -> Any:
    """Of TOML's values, those that JSON lacks (dates and times) as texts."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value
