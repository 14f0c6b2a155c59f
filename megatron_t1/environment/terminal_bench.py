"""Terminal-Bench's older format (task.yaml) as Harbor's: the mapping of Harbor's own converter (`harbor` 0.25).

    task.yaml instruction, metadata, timeouts  ->  instruction.md, task.toml
    Dockerfile, docker-compose.yaml            ->  environment/Dockerfile, the service's variables as ENV and WORKDIR
    run-tests.sh, tests/                       ->  tests/test.sh, which also writes reward.txt; tests/
    solution.sh                                ->  solution/solve.sh
    everything else                            ->  environment/

What that converter refuses, or turns into several containers, is refused here by name.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_t1.environment import harbor_format
from megatron_t1.environment.task import Task
from megatron_t1.environment.task_toml import Findings, is_number, is_seconds, is_text, is_texts, one_of, shown
from megatron_t1.environment.toml_text import toml_document
from megatron_t1.environment.tree import bounded
from megatron_t1.errors import T1Error

TASK_FILE, COMPOSE_FILE = "task.yaml", "docker-compose.yaml"
TEST_DIR = "/tests"
NOT_IN_IMAGE = (TASK_FILE, COMPOSE_FILE, "Dockerfile", "solution.sh", "run-tests.sh", "tests")
FIELDS = {
    "instruction": is_text,
    "author_name": is_text,
    "author_email": is_text,
    "difficulty": one_of("easy", "medium", "hard", "unknown"),
    "category": is_text,
    "tags": is_texts,
    "estimated_duration_sec": is_number,
    "expert_time_estimate_min": is_number,
    "junior_time_estimate_min": is_number,
    "max_agent_timeout_sec": is_seconds,
    "max_test_timeout_sec": is_seconds,
}
METADATA_DEFAULTS = {
    "author_name": "unknown",
    "author_email": "unknown",
    "difficulty": "unknown",
    "category": "software_engineering",
    "tags": [],
}
AGENT_TIMEOUT_S, TEST_TIMEOUT_S = 360.0, 60.0
# Fields of the one service that become lines of the Dockerfile, and those that say nothing about the task.
MOVED = ("environment", "working_dir", "expose", "entrypoint", "platform")
MEANINGLESS = ("build", "image", "container_name", "command", "volumes")
OWN_VOLUMES = (
    "${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}",
    "${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}",
)
REWARD_LINES = """
status=$?
if [ "$status" -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
exit "$status"
"""

MAX_YAML_SIZE = 4 << 20

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_converted: Path | None = None
_numbers = itertools.count()


def read_task(directory: Path, *, engine_builds: bool = False) -> Task:
    """The task in a Terminal-Bench directory, by way of a converted copy that lives as long as this process.

    Args:
        engine_builds: see `harbor_format.read_task`.

    Raises:
        T1Error: lists every problem of this task, by file and field.
    """
    global _converted
    if _converted is None:
        _converted = Path(tempfile.mkdtemp(prefix="t1-terminal-bench-"))
        atexit.register(_remove, _converted, os.getpid())
    target = _converted / str(next(_numbers)) / directory.name
    convert(directory, target)
    try:
        return harbor_format.read_task(target, engine_builds=engine_builds)
    except T1Error as error:
        raise T1Error(error.problem, where=str(directory), remedy=error.remedy) from error


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not the end of a forked process
        shutil.rmtree(directory, ignore_errors=True)


def convert(source: str | Path, target: str | Path) -> None:
    """Write the Terminal-Bench task in `source` as a Harbor task in `target`, which must not exist.

    Raises:
        T1Error: the task is broken, or uses what the mapping refuses; all of it is listed.
    """
    source, target = Path(source), Path(target)
    problems: list[str] = []
    raw = _read_yaml(source, TASK_FILE, problems)
    found = _check(raw, problems)
    service = _service(_read_yaml(source, COMPOSE_FILE, problems), problems)
    context = _context(source, service, problems)
    if context is not None and not (context / "Dockerfile").is_file():
        problems.append(f"{(context / 'Dockerfile').relative_to(source.resolve())}: missing")
    if (source / "solution.yaml").exists():
        problems.append("solution.yaml: a solution of keystrokes is not supported; write solution.sh")
    try:
        problems += [f"{path}: links out of the task" for path in harbor_format.links_out(source, source)]
        bounded(source)
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror}")
    harbor_format.read_text(source, "run-tests.sh", problems)
    if problems:
        raise T1Error("; ".join(problems), where=str(source), remedy="repair the task")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _write(source, partial, raw, found.unknown, service, context)
        partial.rename(target)
    except (OSError, ValueError, TypeError, RecursionError, shutil.Error) as error:
        raise T1Error(
            f"can't be converted: {error}", where=str(source), remedy="check its files, and the room for a copy"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(raw: dict[str, Any], problems: list[str]) -> Findings:
    found = Findings()
    for name, value in raw.items():
        if name not in FIELDS:
            found.unknown[str(name)] = value
        elif value is not None and (problem := FIELDS[name](value)):
            found.add(name, f"{shown(value)} {problem}")
    if raw.get("instruction") is None:
        found.add("instruction", "missing")
    problems += [f"{TASK_FILE}: {problem}" for problem in found.problems]
    return found


def _service(compose: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The one service of docker-compose.yaml; what can't become part of one image is a problem."""
    services = compose.get("services")
    if not isinstance(services, dict) or not services:
        if services or compose:
            problems.append(f"{COMPOSE_FILE}: services: {shown(services)} is not a table of services")
        return {}
    odd = [f"{name}" for name in compose if name not in ("services", "version")]
    if len(services) > 1:
        odd.append(f"services {', '.join(map(str, services))}: more than one container")
    name = "client" if "client" in services else next(iter(services))
    service = services[name]
    if not isinstance(service, dict):
        problems.append(f"{COMPOSE_FILE}: services.{name}: {shown(service)} is not a table")
        return {}
    odd += [f"services.{name}.{field}" for field in service if field not in MOVED + MEANINGLESS]
    volumes = service.get("volumes") or []
    if not isinstance(volumes, list) or any(volume not in OWN_VOLUMES for volume in volumes):
        odd.append(f"services.{name}.volumes: {shown(volumes)}")
    problems += [f"{COMPOSE_FILE}: {field} is not supported" for field in odd]
    if not odd:
        try:
            list(_dockerfile_lines(service))
        except ValueError as error:
            problems.append(f"{COMPOSE_FILE}: services.{name}.{error}")
    return service


def _context(source: Path, service: dict[str, Any], problems: list[str]) -> Path | None:
    """The folder that the image is built from: the task's own, or one in it."""
    build = service.get("build") or {}
    name = build.get("context", ".") if isinstance(build, dict) else build
    root = source.resolve()
    if not isinstance(name, str) or "\0" in name:
        problems.append(f"{COMPOSE_FILE}: build: {shown(build)} names no folder")
        return None
    context = (root / name).resolve()
    if not context.is_relative_to(root) or not context.is_dir():
        problems.append(f"{COMPOSE_FILE}: build context {name!r} is no folder in the task")
        return None
    return context


def _dockerfile_lines(service: dict[str, Any]) -> Iterator[str]:
    """Lines to append to the Dockerfile. Raises ValueError, naming the field, for what no line can say."""
    yield f"ENV TEST_DIR={TEST_DIR}"
    variables = service.get("environment") or []
    if isinstance(variables, dict):
        variables = [f"{name}={_scalar(value, 'environment')}" for name, value in variables.items()]
    for variable in _texts(variables, "environment"):
        name, _, value = variable.partition("=")
        if name != "TEST_DIR":
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"environment: {shown(variable)} is not NAME=value")
            yield f"ENV {name}={json.dumps(value, ensure_ascii=False)}"
    workdir = service.get("working_dir") or ""
    if not isinstance(workdir, str) or _CONTROL.search(workdir):
        raise ValueError(f"working_dir: {shown(workdir)} is not a path")
    if workdir and "${" not in workdir:
        yield f"WORKDIR {workdir if re.fullmatch('[A-Za-z0-9_./-]+', workdir) else json.dumps(workdir)}"


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or any(is_text(item) or _CONTROL.search(item) for item in value):
        raise ValueError(f"{name}: {shown(value)} is not a list of texts")
    return value


def _scalar(value: Any, name: str) -> str:
    if isinstance(value, dict | list):
        raise ValueError(f"{name}: {shown(value)} is not a text")
    return "" if value is None else str(value)


def _write(
    source: Path, target: Path, raw: dict, unknown: dict[str, Any], service: dict[str, Any], context: Path
) -> None:
    root, environment, tests = source.resolve(), target / "environment", target / "tests"
    target.mkdir(parents=True)
    left_out = set(NOT_IN_IMAGE)
    environment.mkdir()
    if context != root:
        shutil.copytree(context, environment, symlinks=True, dirs_exist_ok=True)
        left_out.add(context.relative_to(root).parts[0])
    else:
        shutil.copy(root / "Dockerfile", environment)
    dockerfile = (environment / "Dockerfile").read_text(encoding="utf-8")
    for name in ("tests", "solution.sh"):  # an image that is made with them, on purpose
        if re.search(rf"^\s*(COPY|ADD)\s+(--\S+\s+)*(\./)?{re.escape(name)}", dockerfile, re.MULTILINE):
            left_out.discard(name)
    for entry in sorted(root.iterdir()):
        if entry.name not in left_out:
            _copy(entry, environment / entry.name)
    added = "\n".join(("", "# Mapped from docker-compose.yaml", *_dockerfile_lines(service)))
    (environment / "Dockerfile").write_text(f"{dockerfile.rstrip()}\n{added}\n", encoding="utf-8")
    if (root / "tests").is_dir():
        shutil.copytree(root / "tests", tests)
    tests.mkdir(exist_ok=True)
    script = (root / "run-tests.sh").read_text(encoding="utf-8").rstrip() + "\n" + REWARD_LINES
    (tests / "test.sh").write_text(script.replace("$TEST_DIR", TEST_DIR), encoding="utf-8")
    (tests / "test.sh").chmod(0o755)
    if (root / "solution.sh").is_file():
        (target / "solution").mkdir()
        _copy(root / "solution.sh", target / "solution" / "solve.sh")
        (target / "solution" / "solve.sh").chmod(0o755)
    (target / "instruction.md").write_text(raw["instruction"].rstrip("\n") + "\n", encoding="utf-8")
    (target / "task.toml").write_text(_task_toml(raw, unknown), encoding="utf-8")


def _task_toml(raw: dict[str, Any], unknown: dict[str, Any]) -> str:
    given = {name: value for name, value in raw.items() if name in FIELDS and value is not None}
    timeouts = {
        "agent": given.pop("max_agent_timeout_sec", AGENT_TIMEOUT_S),
        "verifier": given.pop("max_test_timeout_sec", TEST_TIMEOUT_S),
    }
    del given["instruction"]
    metadata = METADATA_DEFAULTS | given
    if unknown:
        metadata[harbor_format.UNKNOWN_FIELDS] = unknown
    sections = {name: {"timeout_sec": float(seconds)} for name, seconds in timeouts.items()}
    return toml_document({"schema_version": "1.4", "metadata": metadata, **sections})


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copy(source, target)


def _read_yaml(source: Path, name: str, problems: list[str]) -> dict[str, Any]:
    text = harbor_format.read_text(source, name, problems, harbor_format.MAX_TABLES_BYTES)
    if not text:
        return {}
    try:
        value = _safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        problems.append(f"{name}: {said[:300]}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{name}: {shown(value)} is not a table")
        return {}
    return value


def _safe_load(text: str) -> Any:
    """`yaml.safe_load`, which refuses what aliases of aliases blow up to more than MAX_YAML_SIZE."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_YAML_SIZE:
            raise ValueError("its aliases stand for too much")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Characters and values of a node once every alias is written out. Raises ValueError: it holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in sizes:
        sizes[id(node)] = -1
        children = node.value if isinstance(node, yaml.SequenceNode) else itertools.chain(*node.value)
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in children)
    elif sizes[id(node)] < 0:
        raise ValueError("an alias stands for what it is a part of")
    return sizes[id(node)]
