"""Harbor's environments as sandboxes here: Docker, Daytona, Modal, E2B, Kubernetes, ... (Python 3.12, `harbor`).

    env.sandbox._target_=megatron_t1.harbor.sandbox.HarborSandbox env.sandbox.engine=daytona

`env.sandbox.engine` names the provider, or a class as package.module:Class; `env.sandbox.options` goes to it, except
`network_mode` (no-network, which a provider may refuse, or public). The verifier runs as Harbor's shared one does: the
agent's processes are killed and the tests come in afterwards, but programs that the agent replaced are not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import shlex
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harbor.environments.base import BaseEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.task.task import Task as HarborTask
from harbor.models.trial.paths import TrialPaths

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.planted import describe_planted, exposed
from megatron_t1.environment.protection import VERIFIER_DIR, verifier_environment, write_protected_tests
from megatron_t1.environment.sandbox.interface import (
    RESULT_LIMIT_BYTES,
    Change,
    CommandResult,
    Fetched,
    FileRefused,
    SandboxLost,
    VerifierRun,
)
from megatron_t1.environment.sandbox.own_files import OwnFiles, child_command
from megatron_t1.environment.task import Files, Task
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.harbor.shell import RemoteShell, processes

VERIFIER_OUTPUT_CHARACTERS = 20_000
MARGIN_S = 60  # what a provider may need beyond a command's own limit
LISTING = (
    r"find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path '/tmp/.t1-*' -o -path /logs \) -prune "
    r"-o -printf '%y %C@ %p\0'"
)
Answer = TypeVar("Answer")


class EnvironmentSandbox:
    """See `environment.sandbox.interface.Sandbox`: an environment that somebody else started and will stop."""

    def __init__(self, environment: BaseEnvironment | None, output_limit: int = 16_000):
        self._environment, self._output_limit = environment, output_limit
        self._shell: RemoteShell | None = None
        self._workdir, self._own, self._spared = "/", OwnFiles(), ""
        self._initial: dict[str, tuple[str, str]] = {}

    async def start(self, task: Task) -> None:
        self._workdir = task.workdir or (await self._execute("pwd", 30.0)).strip() or "/"
        self._initial, self._own = await self._listing(), OwnFiles()
        self._spared = await processes(self._execute)
        self._shell = self._new_shell()

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        if self._shell is None:
            raise SandboxLost("the sandbox has no session: it was not started, or its verifier has run")
        return await self._shell.run(command, timeout_s)

    async def execute(self, command: str, timeout_s: float) -> CommandResult:
        return await self.run(child_command(command), timeout_s)

    async def put_files(self, files: Files) -> None:
        for path, (content, mode) in files.items():
            place = shlex.quote(path)
            free = f'mkdir -p -- "$(dirname -- {place})" && rm -f -- {place} && [ ! -e {place} ] && echo free'
            if (await self._execute(free, 60.0)).strip() != "free":
                raise FileRefused(f"can't write {path}: something else stands there", where="the environment")
            await self._put_file(path, content)
            await self._execute(f"chmod {mode:o} -- {place}", 60.0)

    async def get_files(self, paths: Sequence[str], limit_bytes: int) -> Fetched:
        fetched = Fetched()
        for path in paths:
            place = shlex.quote(path)
            seen = f"if [ -f {place} ]; then wc -c < {place}; elif [ -e {place} ]; then echo other; else echo none; fi"
            size = (await self._execute(seen, 60.0)).strip()
            if not size.isdigit():
                fetched.problems[path] = "is missing" if size == "none" else "is not a regular file"
            elif int(size) > limit_bytes:
                fetched.problems[path] = f"is larger than {limit_bytes} bytes"
            else:
                fetched.files[path] = await self._get_file(path)
        return fetched

    async def changes(self) -> list[Change]:
        """By names and change times, which GNU find tells; raises SandboxLost where there is none."""
        before, now = self._initial, await self._listing()
        if not before:
            raise SandboxLost("what changed can't be told: the environment has no GNU find")
        found = [Change(path, "added") for path in now.keys() - before.keys()]
        found += [Change(path, "removed") for path in before.keys() - now.keys()]
        same = [path for path in now.keys() & before.keys() if now[path] != before[path] and now[path][0] != "d"]
        return sorted(found + [Change(path, "modified") for path in same])

    def guarantees(self) -> Mapping[str, str]:
        kind = self._environment.type() if self._environment else "Harbor"
        provider = getattr(kind, "value", str(kind))
        bounds = dict.fromkeys(("memory", "processes", "cpu", "disk", "calls"), f"as {provider} bounds them")
        return {
            "system": f"Harbor's {provider}; changed programs are not noticed by the verifier",
            "network": "no",
            **bounds,
        }

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        if self._shell is None:
            raise SandboxLost("the sandbox has no session to verify")
        shell, self._shell = self._shell, None
        await shell.end()
        # Looked at only now that nothing of the agent's can change it any more.
        env = verifier_environment(task, task.env)
        surroundings = await asyncio.to_thread(exposed, task, env, shell.start_directory)
        planted = surroundings.planted(await self.changes()) if surroundings else []
        doubt = describe_planted(await self._own.others(planted, self._read))
        if doubt:
            return VerifierRun(None, "", False, doubt=doubt)
        with tempfile.TemporaryDirectory() as folder:
            write_protected_tests(task, Path(folder) / "tests")
            await self._execute(f"rm -rf /tests {VERIFIER_DIR} && mkdir -p /tests {VERIFIER_DIR}", 60.0)
            await self._ask(self._environment.upload_dir(Path(folder) / "tests", "/tests"), 300.0)
        output = f"/tmp/.t1-verifier-{secrets.token_hex(8)}"
        limit = max(1, math.ceil(timeout_s))
        words = f"cd {shlex.quote(shell.start_directory)} 2>/dev/null || cd /; "
        words += (
            f"timeout -k 5 {limit} /bin/bash --noprofile --norc /tests/test.sh > {output} 2>&1 < /dev/null; echo $?"
        )
        code = (await self._execute(words, limit + 5.0, env=env)).strip()
        await shell.end()
        said = await self._execute(f"head -c {VERIFIER_OUTPUT_CHARACTERS} {output}; rm -f {output}", 60.0)
        exit_code = int(code) if code.isdigit() else None
        timed_out = exit_code in (124, 137)
        found = await self.get_files([f"{VERIFIER_DIR}/{name}" for name in names], RESULT_LIMIT_BYTES)
        files = {path.rpartition("/")[2]: content for path, content in found.files.items()}
        problems = {path.rpartition("/")[2]: why for path, why in found.problems.items() if why != "is missing"}
        return VerifierRun(None if timed_out else exit_code, said, timed_out, files, problems)

    async def resume(self, files: Files) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.end()
        else:  # a verifier ran
            await self._execute(f"rm -rf /tests {VERIFIER_DIR} && mkdir -p /tests {VERIFIER_DIR}", 60.0)
        await self.put_files(self._own.place(files, self._workdir))
        self._shell = self._new_shell()

    async def stop(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            with contextlib.suppress(SandboxLost):
                await shell.end()

    def _new_shell(self) -> RemoteShell:
        return RemoteShell(self._execute, self._put_file, self._workdir, self._output_limit, self._spared)

    async def _read(self, path: str, limit_bytes: int) -> bytes:
        """Raises ValueError: no regular file of this size."""
        if (await self._execute(f"[ -L {shlex.quote(path)} ] && echo link", 60.0)).strip():
            raise ValueError("is a symbolic link")
        fetched = await self.get_files([path], limit_bytes)
        if path not in fetched.files:
            raise ValueError(fetched.problems[path])
        return fetched.files[path]

    async def _listing(self) -> dict[str, tuple[str, str]]:
        place = f"/tmp/.t1-listing-{secrets.token_hex(8)}"
        await self._execute(f"{LISTING} > {place} 2>/dev/null; true", 120.0)
        rows = (await self._get_file(place)).decode(errors="surrogateescape").split("\0")
        await self._execute(f"rm -f {place}", 60.0)
        return {path: (kind, when) for kind, when, path in (row.split(" ", 2) for row in rows if row.count(" ") >= 2)}

    async def _put_file(self, path: str, content: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            await self._ask(self._environment.upload_file(Path(file.name), path), 300.0)

    async def _get_file(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            await self._ask(self._environment.download_file(path, Path(folder) / "file"), 300.0)
            return (Path(folder) / "file").read_bytes()

    async def _execute(self, command: str, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
        limit = math.ceil(timeout_s)
        call = self._environment.exec(command, env=dict(env) if env else None, timeout_sec=limit, user="root")
        return (await self._ask(call, limit + MARGIN_S)).stdout or ""

    async def _ask(self, call: Awaitable[Answer], limit_s: float) -> Answer:
        """Whatever a provider raises (each has errors of its own) is a lost sandbox, never the agent's result."""
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except (T1Error, asyncio.CancelledError):
            raise
        except Exception as error:
            kind = type(error).__name__
            raise SandboxLost(
                f"the environment failed: {kind}: {error}", where=type(self._environment).__name__
            ) from error


class HarborSandbox(EnvironmentSandbox):
    """An environment of a provider, made for each task.

    Args:
        config: `engine` is the provider, `options` its own, `cpus`, `memory_mb` and `disk_mb` are asked for.
    """

    builds_dockerfiles = True

    def __init__(self, config: SandboxConfig, scratch_dir: str | Path | None = None, output_limit: int = 16_000):
        super().__init__(None, output_limit)
        self._config, self._scratch_dir = config, scratch_dir or config.scratch_dir or None
        self._folder: tempfile.TemporaryDirectory | None = None
        self._options = dict(config.options)
        mode = self._options.pop("network_mode", NetworkMode.NO_NETWORK.value)
        try:
            self._policy = NetworkPolicy(network_mode=mode)
            self._make = _maker(config.engine)
        except ValueError as error:
            raise ConfigError(f"env.sandbox: {error}", where="env.sandbox.engine, env.sandbox.options") from error

    async def start(self, task: Task) -> None:
        await self.stop()
        self._folder = tempfile.TemporaryDirectory(prefix="t1-harbor-", dir=self._scratch_dir)
        folder = Path(self._folder.name)
        directory = task.directory
        if directory is None:
            directory = folder / "task"
            write_task(task, directory)
        paths = TrialPaths(folder / "trial")
        paths.mkdir()
        try:
            definition = HarborTask(directory).config.environment
            environment = self._make(
                environment_dir=directory / "environment",
                environment_name=task.name,
                session_id=f"t1-{task.name}-{secrets.token_hex(4)}",
                trial_paths=paths,
                task_env_config=definition,
                network_policy=self._policy,
                override_cpus=self._config.cpus or None,
                override_memory_mb=self._config.memory_mb,
                override_storage_mb=self._config.disk_mb,
                **self._options,
            )
        except (ValueError, OSError) as error:
            raise T1Error(f"Harbor refuses the task's environment: {error}", where=f"task {task.name}") from error
        self._environment = environment
        await self._ask(environment.start(force_build=False), task.resources.build_timeout_s + MARGIN_S)
        await super().start(task)

    async def stop(self) -> None:
        await super().stop()
        environment, self._environment = self._environment, None
        folder, self._folder = self._folder, None
        try:
            if environment is not None:
                await environment.stop(delete=True)
        finally:
            if folder is not None:
                folder.cleanup()


def _maker(provider: str) -> Any:
    """What makes an environment of a provider. Raises ValueError: there is none of this name."""
    if ":" in provider:
        return lambda **facts: EnvironmentFactory.create_environment_from_import_path(provider, **facts)
    kind = EnvironmentType(provider or "docker")
    return lambda **facts: EnvironmentFactory.create_environment(kind, **facts)
