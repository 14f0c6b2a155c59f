"""One script in namespaces of its own on a sandbox's root, everything dead afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.cgroup import ControlGroups
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.process import ROOT, User, start_bwrap
from megatron_t1.environment.sandbox.root import PrivateRoot

OUTPUT_LIMIT = 20_000


async def run_script(
    config: SandboxConfig,
    root: PrivateRoot,
    script: str,
    *,
    output_path: Path,
    timeout_s: float,
    env: Mapping[str, str],
    workdir: str = "/",
    binds: Sequence[str] = (),
    arguments: Sequence[str] = (),
    user: User = ROOT,
    groups: ControlGroups | None = None,
) -> tuple[int | None, OutputBuffer]:
    """Exit status (None: out of time) and output of a bash script.

    Args:
        output_path: a file of the driver's on the sandbox's disk, so that what is written counts against it; removed.

    Raises:
        SandboxLost: the sandbox can't be set up, or was killed from outside.
    """
    descriptor = os.open(output_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = await start_bwrap(
            config,
            root,
            script,
            env=env,
            workdir=workdir,
            binds=binds,
            arguments=arguments,
            user=user,
            groups=groups,
            output_fd=descriptor,
        )
        try:
            exit_code = await process.wait(timeout_s)
            complaint = process.complaint()
        finally:
            await process.end()
        if complaint:
            raise SandboxLost(f"the sandbox could not be set up: {complaint}", where=str(root.path))
        output = OutputBuffer(OUTPUT_LIMIT)
        os.lseek(descriptor, 0, os.SEEK_SET)
        while block := os.read(descriptor, 1 << 20):
            output.feed(block)
        return exit_code, output
    finally:
        os.close(descriptor)
        output_path.unlink(missing_ok=True)
