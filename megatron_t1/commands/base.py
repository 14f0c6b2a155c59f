"""`t1 tasks base` and `t1 tasks preflight`: what sandboxes need of a machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.commands.configuration import command_config, print_config
from megatron_t1.config.schema import EnvConfig, SandboxConfig
from megatron_t1.config.validate import check
from megatron_t1.environment.sandbox.make_base import DEBIAN_PACKAGES, SUITE, make_base
from megatron_t1.errors import T1Error

COMMAND, ANSWER, TIMEOUT_S = "echo $((6 * 7))", "42", 30.0


def preflight(invocation: Invocation) -> int:
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config)
    check(config)
    if config.env.sandbox._target_ == SandboxConfig._target_:
        from megatron_t1.environment.sandbox.preflight import check_sandbox

        bounds = asyncio.run(check_sandbox(config.env.sandbox, config.env.sandbox.scratch_dir or None))
    else:
        bounds = asyncio.run(_bounds(config.env))
    for name, how in bounds.items():
        print(f"{name:10} {how}")
    return 0


async def _bounds(env: EnvConfig) -> Mapping[str, str]:
    """Run one command in a sandbox of the configured class; what bounds it. Raises T1Error where that fails."""
    from megatron_t1.environment.task import Task, TaskContent
    from megatron_t1.rollout.pool import sandbox_maker

    sandbox = sandbox_maker(env)()
    try:
        await sandbox.start(Task("preflight", "", content=TaskContent()))
        result = await sandbox.run(COMMAND, TIMEOUT_S)
        if result.exit_code != 0 or result.output.strip() != ANSWER:
            raise T1Error(
                f"a trivial command failed (status {result.exit_code}): {result.output.strip()[:300]}",
                where=f"env.sandbox._target_={env.sandbox._target_}",
            )
        return sandbox.guarantees()
    finally:
        await sandbox.stop()


def base(invocation: Invocation) -> int:
    parser = Parser("t1 tasks base", add_help=False)
    parser.add_argument("out")
    parser.add_argument("--from", dest="source", default="")
    parser.add_argument("--suite", default=SUITE)
    parser.add_argument("--mirror", default="")
    parser.add_argument("--packages", default=DEBIAN_PACKAGES)
    parser.add_argument("--pip", nargs="+", default=[])
    parser.add_argument("--host-uid", type=int, default=SandboxConfig.host_uid)
    options = parser.parse_args(list(invocation.arguments))
    inventory = make_base(
        options.out,
        SandboxConfig(host_uid=options.host_uid),
        source=options.source,
        suite=options.suite,
        mirror=options.mirror,
        packages=options.packages,
        pip=options.pip,
    )
    print(f"base: {options.out}, {len(inventory.apt)} Debian and {len(inventory.python)} Python packages")
    print(f"use it with env.sandbox.base={options.out}, or for some images with env.sandbox.images")
    return 0
