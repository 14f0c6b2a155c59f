"""Does this machine run sandboxes? One trivial command, and what is missing in words."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.base import load_base
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.sandbox.process import find_bwrap
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.errors import T1Error

PROGRAMS = ("bash", "python3")
_USER_NAMESPACES = (
    (
        "/proc/sys/user/max_user_namespaces",
        "0",
        "user namespaces are switched off; as root: sysctl -w user.max_user_namespaces=15000",
    ),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "unprivileged user namespaces are switched off; as root: sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor forbids user namespaces; as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


async def check_sandbox(
    config: SandboxConfig | None = None, scratch_dir: str | Path | None = None
) -> Mapping[str, str]:
    """Run one command in a sandbox; what bounds sandboxes on this machine (`Sandbox.guarantees`).

    Raises:
        T1Error: bubblewrap, a program of the base system or a kernel setting is missing; the remedy says which.
    """
    find_bwrap()
    problems, config = [], config or SandboxConfig()
    for name in PROGRAMS if load_base(config.base).host else ():
        if not any(os.access(f"{folder}/{name}", os.X_OK) for folder in ("/usr/bin", "/usr/local/bin", "/bin")):
            problems.append(f"{name} is missing below /usr, which is the sandbox's system; apt-get install {name}")
    sandbox = BubblewrapSandbox(config, scratch_dir or tempfile.gettempdir())
    try:
        await sandbox.start(Task("preflight", "", content=TaskContent()))
        result = await sandbox.run("echo $((6 * 7))", timeout_s=30.0)
        if result.exit_code != 0 or result.output != "42\n":
            problems.append(f"a trivial command failed (status {result.exit_code}): {result.output.strip()[:300]}")
    except SandboxLost as error:
        problems += [error.problem, error.remedy] if error.remedy else [error.problem]
        problems += [remedy for path, value, remedy in _USER_NAMESPACES if _read(path) == value]
        if not shutil.which("setpriv") and os.geteuid() == 0:
            problems.append("setpriv (util-linux) is missing")
    finally:
        await sandbox.stop()
    if problems:
        raise T1Error(
            "this machine can't run sandboxes: " + "; ".join(problems),
            where=find_bwrap(),
            remedy="mend what is listed, or choose another env.sandbox._target_",
        )
    return sandbox.guarantees()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
