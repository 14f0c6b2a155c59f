"""What bounds a bubblewrap sandbox on this machine, in words: for the preflight and for a rollout's result."""

from __future__ import annotations

import platform

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.cgroup import find_parents
from megatron_t1.environment.sandbox.root import PrivateRoot
from megatron_t1.environment.sandbox.scratch import ScratchDirectory
from megatron_t1.environment.sandbox.seccomp import filter_program


def guarantees(
    config: SandboxConfig, scratch: ScratchDirectory | None = None, root: PrivateRoot | None = None
) -> dict[str, str]:
    """Name of what is bounded -> how; disk and system are known once a sandbox was started.

    Raises:
        T1Error: env.sandbox.cgroup can't be used.
    """
    parents = find_parents(config)

    def grouped(controller: str, limit: str, otherwise: str) -> str:
        if controller in parents.of:
            return f"{limit} together, cgroup v{parents.version[controller]} below {parents.of[controller]}"
        return f"{otherwise} (no cgroup: {parents.missing[controller]})"

    found = {
        "memory": grouped(
            "memory", f"{config.memory_mb} MB", f"{config.memory_mb} MB address space of each process, RLIMIT_AS"
        ),
        "processes": grouped(
            "pids",
            f"{config.max_processes}",
            f"{config.max_processes} of the sandbox's user (of its user namespace since Linux 5.14), RLIMIT_NPROC",
        ),
        "cpu": grouped("cpu", f"{config.cpus:g} processors", f"{config.cpu_seconds} s of each process, RLIMIT_CPU"),
        "calls": "seccomp filter" if filter_program() else f"no seccomp filter for {platform.machine()}",
        "network": "none: a network namespace with only its own loopback",
    }
    if scratch is not None:
        bound = f"{config.disk_mb} MB, {config.max_files} files, a tmpfs of its own"
        found["disk"] = bound if scratch.bounded else "shared with other sandboxes and watched: full means untrusted"
    if root is not None:
        found["system"] = root.description
    return found
