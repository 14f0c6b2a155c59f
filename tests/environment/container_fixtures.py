"""Containers for tests: a base image without a registry, and a sandbox that must leave nothing behind."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_base import write_base

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers.container import ContainerSandbox
from megatron_t1.environment.containers.engine import DRIVER_LABEL

# What real tasks ask for with apt-get and pip, and what their tests need of it: python3 and pytest.
DECLARED_APT = {"python3": "", "python3-pip": ""}
DECLARED_PYTHON = {"pytest": "8.4.1", "pandas": "2.3.2", "scipy": "1.16.1"}


@dataclass(frozen=True)
class Podman:
    """A podman that runs containers on this machine: options for a sandbox, and the base directory it uses."""

    base: Path
    runtime: str
    engine: str = "podman"

    def config(self, **limits) -> SandboxConfig:
        options = {"base": str(self.base), "engine": self.engine, "runtime": self.runtime, "build_network": "none"}
        return SandboxConfig(**{**options, **limits})

    def run(self, body, *, output_limit=16_000, **limits):
        """Run a coroutine function with a sandbox, which is stopped afterwards and must leave nothing."""

        async def main():
            sandbox = ContainerSandbox(self.config(**limits), None, output_limit)
            try:
                return await asyncio.wait_for(body(sandbox), 120)
            finally:
                await sandbox.stop()
                assert self.left(sandbox._engine.driver) == []

        return asyncio.run(main())

    def left(self, driver: str) -> list[str]:
        """Containers, volumes and images that a driver made and that are still there."""
        label = f"label={DRIVER_LABEL}={driver}"
        found = []
        for listing in (("ps", "-a"), ("volume", "ls"), ("images",)):
            found += _podman(*listing, "--quiet", "--filter", label).stdout.split()
        return found


@pytest.fixture(scope="session")
def podman(tmp_path_factory):
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    if shutil.which("ldd") is None or not Path("/usr/bin/python3").exists():
        pytest.skip("no system python3 to make a base image from")
    runtime = "runc" if shutil.which("runc") else ""  # crun refuses machines with control groups of both versions
    base = write_base(tmp_path_factory.mktemp("base"), apt=DECLARED_APT, python=DECLARED_PYTHON)
    found = Podman(base, runtime)

    async def probe(sandbox):
        from megatron_t1.environment.task import Task, TaskContent

        await sandbox.start(Task("probe", "", content=TaskContent()))

    try:
        found.run(probe)
    except Exception as error:
        pytest.skip(f"podman runs no container here: {str(error)[:300]}")
    yield found
    images = _podman("images", "--quiet", "--filter", "reference=localhost/megatron-t1/*").stdout.split()
    for image in dict.fromkeys(images):
        _podman("rmi", "-f", image)


def _podman(*words):
    return subprocess.run(["podman", *words], capture_output=True, text=True, check=False, timeout=60)
