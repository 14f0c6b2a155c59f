"""Our sandboxes as a Harbor environment, for `harbor run` without a container engine:

    environment:
      import_path: megatron_t1.harbor.environment:SandboxEnvironment
      kwargs: {target: megatron_t1.environment.sandbox.bubblewrap.BubblewrapSandbox, base: /bases/debian}

`target` names the sandbox class (default: bubblewrap), every other option is one of `env.sandbox`. There is no network:
a task that asks for one starts all the same, with a warning.
"""

from __future__ import annotations

import asyncio
import importlib
import posixpath
import secrets
import shlex
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.environment.task import Task
from megatron_t1.errors import ConfigError
from megatron_t1.harbor.files import LIMIT_BYTES, get_tree, must, put_tree

BUBBLEWRAP = "megatron_t1.environment.sandbox.bubblewrap.BubblewrapSandbox"
UNBOUNDED_S = 86_400.0  # for a command that Harbor gives no limit: the trial has one
OUTPUT_LIMIT = 16_000
FOLDERS = ("/app", "/tests", "/solution", "/logs/agent", "/logs/verifier", "/logs/artifacts")


class SandboxEnvironment(BaseEnvironment):
    """One sandbox behind Harbor's interface. Commands run one after another in its persistent shell.

    Attributes:
        workdir: the image's working directory.
    """

    def __init__(self, *args: Any, target: str = BUBBLEWRAP, **kwargs: Any):
        known = {field.name for field in fields(SandboxConfig)} - {"_target_"}
        self._options = {name: kwargs.pop(name) for name in list(kwargs) if name in known}
        self._target, self._busy = target, asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self.workdir = "/"
        self._folder: tempfile.TemporaryDirectory | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "megatron-t1-sandbox"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @override
    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").exists() and not self.task_env_config.docker_image:
            raise FileNotFoundError(f"{self.environment_dir}: no Dockerfile, and no environment.docker_image")

    @property
    def sandbox(self) -> Sandbox:
        """The running one. Its shell is the driver's: nothing that an agent writes is evaluated there."""
        if self._sandbox is None:
            raise RuntimeError("the environment was not started")
        return self._sandbox

    @override
    async def start(self, force_build: bool) -> None:
        if not self._network_disabled:
            self.logger.warning("this environment has no network, whatever the task asks for")
        self._folder = tempfile.TemporaryDirectory(prefix="t1-harbor-")
        (Path(self._folder.name) / "environment").symlink_to(self.environment_dir.resolve())
        self._sandbox = _sandbox_class(self._target)(self._config(), None, OUTPUT_LIMIT)
        config = self.task_env_config
        name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in self.environment_name)
        task = Task(name, "", directory=Path(self._folder.name), workdir=config.workdir or "", env=self._startup_env())
        try:
            await self._sandbox.start(task)
            self.workdir = (await must(self._sandbox, "pwd")).strip()
            wanted = [*FOLDERS, *self._mount_targets(writable_only=True)]
            await must(self._sandbox, f"mkdir -p {shlex.join(wanted)}; chmod 777 {shlex.join(wanted[3:])}")
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    def _config(self) -> SandboxConfig:
        """The task's resources, unless the job's own options say otherwise."""
        asked = {
            "cpus": self._effective_cpus,
            "memory_mb": self._effective_memory_mb,
            "disk_mb": self._effective_storage_mb,
        }
        return SandboxConfig(**{name: value for name, value in asked.items() if value} | self._options)

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.stop()
        if self._folder is not None:
            self._folder.cleanup()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """As a child of the persistent shell, so that what it starts in the background lives on.

        Raises:
            RuntimeError: out of time; as Harbor's own environments do.
        """
        if self._resolve_user(user) not in (None, "root", 0, "0"):
            raise NotImplementedError("a sandbox has one user, root")
        place = f"/tmp/.t1-{secrets.token_hex(8)}"
        variables = shlex.join(f"{name}={value}" for name, value in (self._merge_env(env) or {}).items())
        run = f"env {variables} bash -c {shlex.quote(command)} > {place}.out 2> {place}.err < /dev/null"
        # An image's directory that is gone is not missed.
        words = f"cd -- {shlex.quote(cwd)} && exec {run}" if cwd else f"cd -- {shlex.quote(self.workdir)}; exec {run}"
        async with self._busy:
            result = await self.sandbox.run(f"({words})", float(timeout_sec or UNBOUNDED_S))
            paths = [f"{place}.out", f"{place}.err"]
            found = (await self.sandbox.get_files(paths, LIMIT_BYTES)).files
            await self.sandbox.run(f"rm -f {shlex.join(paths)}", 60.0)
        stdout, stderr = (found.get(path, b"").decode(errors="replace") for path in paths)
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(
            stdout=stdout,
            stderr=stderr + result.output,
            return_code=255 if result.exit_code is None else result.exit_code,
        )

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        if target_path.endswith("/") or await self.is_dir(target_path):
            target_path = posixpath.join(target_path, source.name)
        async with self._busy:
            await self.sandbox.put_files({target_path: (source.read_bytes(), source.stat().st_mode & 0o7777)})

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        async with self._busy:
            await put_tree(self.sandbox, Path(source_dir), target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        async with self._busy:
            fetched = await self.sandbox.get_files([source_path], LIMIT_BYTES)
        if source_path not in fetched.files:
            raise FileNotFoundError(f"{source_path}: {fetched.problems.get(source_path, 'is missing')}")
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(fetched.files[source_path])

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        async with self._busy:
            await get_tree(self.sandbox, source_dir, Path(target_dir))


def _sandbox_class(target: str) -> type:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"target={target!r} can't be imported: {error}", where="environment.kwargs.target") from error
