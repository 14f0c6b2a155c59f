"""`t1 tasks base` and `t1 tasks preflight`: what bubblewrap sandboxes need of a machine."""

from __future__ import annotations

import asyncio

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.commands.configuration import command_config, print_config
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.make_base import DEBIAN_PACKAGES, SUITE, make_base


def preflight(invocation: Invocation) -> int:
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config)
    from megatron_t1.environment.sandbox.preflight import check_sandbox

    bounds = asyncio.run(check_sandbox(config.env.sandbox, config.env.sandbox.scratch_dir or None))
    for name, how in bounds.items():
        print(f"{name:10} {how}")
    return 0


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
