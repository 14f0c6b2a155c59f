"""Follow a task's Dockerfile on a private root."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.image import MAX_ID, CopyFiles, MakeDirectory, RunCommand
from megatron_t1.environment.packages import PackagesMissing, satisfied
from megatron_t1.environment.sandbox.base import Base, base_for
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.process import User
from megatron_t1.environment.sandbox.root import PrivateRoot
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error

USER_DATABASE_BYTES, USER_LINE_LENGTH = 1 << 20, 4096

RunOnce = Callable[..., Awaitable[tuple[int | None, OutputBuffer]]]


async def build(task: Task, root: PrivateRoot, base: Base, run_once: RunOnce) -> None:
    """Bring a root that was just reset to the task's initial state.

    Args:
        run_once: `await run_once(script, arguments=, env=, workdir=, user=, timeout_s=)`: exit status and output.

    Raises:
        SandboxLost: a step fails, or asks for packages that the base lacks (known before any step is taken).
    """
    steps = [_prepared(step, base) if isinstance(step, RunCommand) else step for step in task.image.steps]
    for step in steps:
        try:
            if isinstance(step, MakeDirectory):
                root.make_directory(step.path)
            elif isinstance(step, CopyFiles):
                root.copy(step)
            else:
                await _run(step, task, root, base, run_once)
        except OSError as error:
            place = error.filename or ""
            raise SandboxLost(
                f"can't build the task's files: {place}: {error.strerror}", where=f"task {task.name}"
            ) from error
        except T1Error as error:
            raise SandboxLost(error.problem, where=f"task {task.name}: {error.where}", remedy=error.remedy) from error


def refusal(task: Task, config: SandboxConfig) -> str:
    """Why the task can't be built, as far as that is known without building it; "" where it can be tried.

    Raises:
        T1Error: the Dockerfile can't be followed, or env.sandbox names no base.
    """
    base = base_for(task.image.base, config)
    try:
        for step in task.image.steps:
            if isinstance(step, RunCommand):
                _prepared(step, base)
    except SandboxLost as error:
        return error.problem
    return ""


def _prepared(step: RunCommand, base: Base) -> RunCommand:
    """The step without the package commands that the base satisfies."""
    if not step.shell_form:
        return step
    try:
        words = (*step.words[:-1], satisfied(step.line, base.inventory))
    except PackagesMissing as error:
        raise SandboxLost(
            f"RUN {error} ({base.name})",
            where="environment/Dockerfile",
            remedy="make a base with these packages: t1 tasks base; then name it in env.sandbox.base or images",
        ) from error
    return RunCommand(words, step.workdir, step.env, True, step.user)


async def _run(step: RunCommand, task: Task, root: PrivateRoot, base: Base, run_once: RunOnce) -> None:
    exit_code, output = await run_once(
        'exec "$@"',
        arguments=step.words,
        env=step.env,
        workdir=step.workdir,
        user=find_user(root, step.user),
        timeout_s=task.resources.build_timeout_s,
    )
    if exit_code != 0:
        reason = "ran out of time" if exit_code is None else f"exit status {exit_code}"
        raise SandboxLost(
            f"RUN {step.line[:200]!r}: {reason}: {output.text()[0][-500:].strip()}",
            where="environment/Dockerfile",
            remedy=f"the sandbox has no network, and this system: {root.description}; prepare the files with COPY, or "
            "make a base with what is needed (t1 tasks base)",
        )


def find_user(root: PrivateRoot, named: str) -> User:
    """Who USER means, by the root's /etc/passwd and /etc/group.

    Raises:
        SandboxLost: there is no such user.
    """
    name, _, group = named.partition(":")
    for fields in _database(root, "passwd"):
        if len(fields) > 5 and name in (fields[0], fields[2]):
            uid, gid, home = _number(fields[2]), _number(fields[3]), fields[5]
            if uid is None or gid is None or (home and not home.startswith("/")):
                raise SandboxLost(
                    f"USER {named}: /etc/passwd says {':'.join(fields)[:80]!r} of it, which is no user",
                    where="environment/Dockerfile",
                    remedy="repair what the Dockerfile writes there",
                )
            found = User(uid, gid, fields[0], home or "/")
            break
    else:
        uid = _number(name)
        if uid is None:
            raise SandboxLost(f"USER {named}: there is no such user", where="environment/Dockerfile")
        found = User(uid, uid, name, "/")
    if group:
        rows = [fields for fields in _database(root, "group") if len(fields) > 2 and group in (fields[0], fields[2])]
        gid = _number(rows[0][2] if rows else group)
        if gid is None:
            raise SandboxLost(f"USER {named}: there is no such group", where="environment/Dockerfile")
        found = User(found.uid, gid, found.name, found.home)
    return found


def _number(text: str) -> int | None:
    """Of a user or group; None: the text is none."""
    return int(text) if re.fullmatch("[0-9]{1,10}", text) and int(text) <= MAX_ID else None


def _database(root: PrivateRoot, name: str) -> list[list[str]]:
    try:
        text = root.files.read(f"/etc/{name}", USER_DATABASE_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return []
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    return [line.split(":") for line in lines if "\0" not in line and len(line) <= USER_LINE_LENGTH]
