"""Control groups: limits for all processes of a sandbox together, where this driver may write them.

Version 1 (a hierarchy for each controller) and version 2 (one tree, controllers enabled from above) are both used as
they are found. The groups are made below the driver's own, so whatever bounds the driver bounds its sandboxes too.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.errors import T1Error

CONTROLLERS = ("memory", "pids", "cpu")
OPTIONAL = ("memory.swap.max",)  # kernels without swap accounting have none
PERIOD_US = 100_000  # of the cpu bandwidth
REMOVE_TIMEOUT_S = 5.0
LIST = "cgroups"  # in a sandbox's directory: the groups that go with it


@dataclass(frozen=True)
class Parents:
    """Where groups can be made.

    Attributes:
        of: controller -> directory that takes new groups with this controller.
        version: controller -> 1 or 2.
        missing: controller -> why it can't be used.
    """

    of: dict[str, Path] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


class ControlGroups:
    """The groups of one sandbox, one for each hierarchy in use.

    Args:
        name: of the new groups.
        memory_bytes: what its processes, and a tmpfs they fill, may hold together.
        cpus: processors' worth of time; 0: no limit.
    """

    def __init__(self, parents: Parents, name: str, *, memory_bytes: int, max_processes: int, cpus: float):
        self.paths = group_paths(parents, name)
        self.bounds_memory = "memory" in parents.of
        try:
            for group in self.paths:
                group.mkdir()
            for controller, parent in parents.of.items():
                limits = _limits(controller, parents.version[controller], memory_bytes, max_processes, cpus)
                _write(parent / name, limits)
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Put a process, and all it will start, under the limits. Raises OSError."""
        for group in self.paths:
            (group / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Its processes must be dead; the kernel lets go of them a moment later than their parent sees them end."""
        remove_groups(self.paths)
        self.paths = []


def group_paths(parents: Parents, name: str) -> list[Path]:
    """The groups that a sandbox of this name has."""
    return list(dict.fromkeys(parent / name for parent in parents.of.values()))


def remove_groups(paths: list[Path]) -> None:
    """Remove groups; a busy one is tried again for a while. Raises OSError."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    for path in paths:
        while True:
            try:
                path.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)


def find_parents(config: SandboxConfig) -> Parents:
    """Where this driver can make groups: below env.sandbox.cgroup, or below its own.

    Raises:
        T1Error: env.sandbox.cgroup is given and can't be used.
    """
    if config.cgroup == "off":
        return Parents(missing=dict.fromkeys(CONTROLLERS, "env.sandbox.cgroup=off"))
    found = _find(config.cgroup)
    if config.cgroup and found.missing:
        raise T1Error(
            "; ".join(f"no {name} groups: {why}" for name, why in found.missing.items()),
            where=f"env.sandbox.cgroup={config.cgroup}",
            remedy="give a cgroup v2 directory that is delegated to this user with memory, pids and cpu, or none",
        )
    return found


@cache
def _find(explicit: str) -> Parents:
    """Tried once in a process, by making a group."""
    found = Parents()
    hierarchies = {} if explicit else _version_1()
    unified = Path(explicit) if explicit else _version_2()
    for controller in CONTROLLERS:
        if controller in hierarchies:
            parent, version, problem = hierarchies[controller], 1, ""
        elif unified is not None:
            parent, version, problem = unified, 2, _enable(unified, controller)
        else:
            parent, version, problem = None, 0, "no cgroup file system is mounted"
        problem = problem or _try(parent, controller, version)
        if problem:
            found.missing[controller] = problem
        else:
            found.of[controller], found.version[controller] = parent, version
    return found


def _limits(controller: str, version: int, memory_bytes: int, max_processes: int, cpus: float) -> list[tuple[str, str]]:
    quota = str(int(cpus * PERIOD_US)) if cpus > 0 else ("-1" if version == 1 else "max")
    if controller == "memory":
        if version == 1:
            return [("memory.limit_in_bytes", str(memory_bytes))]
        return [("memory.max", str(memory_bytes)), ("memory.swap.max", "0")]
    if controller == "pids":
        return [("pids.max", str(max_processes))]
    if version == 1:
        return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", quota)]
    return [("cpu.max", f"{quota} {PERIOD_US}")]


def _write(group: Path, settings: list[tuple[str, str]]) -> None:
    for file, value in settings:
        if file not in OPTIONAL or (group / file).exists():
            (group / file).write_text(value)


def _version_1() -> dict[str, Path]:
    """Controller -> the driver's own group in its hierarchy."""
    own = {name: path for names, path in _own_groups() for name in names.split(",") if name}
    found = {}
    for point, root, kind, options in _mounts():
        if kind == "cgroup":
            for controller in CONTROLLERS:
                if controller in options.split(",") and controller in own:
                    found[controller] = _below(point, root, own[controller])
    return found


def _version_2() -> Path | None:
    own = [path for names, path in _own_groups() if names == ""]
    for point, root, kind, _ in _mounts():
        if kind == "cgroup2" and own:
            return _below(point, root, own[0])
    return None


def _own_groups() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [(names, path) for _, names, path in (line.split(":", 2) for line in lines)]


def _mounts() -> list[tuple[str, str, str, str]]:
    """Mount point, root of the mount, kind and super options, from mountinfo."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            words, (kind, _, options) = left.split(), right.split(maxsplit=2)
            found.append((words[4], words[3], kind, options))
    return found


def _below(point: str, root: str, own: str) -> Path:
    """Where a group lies, given that the mount at `point` shows the hierarchy from `root` on (a container's view)."""
    relative = own.removeprefix(root) if root != "/" and own.startswith(root) else own
    return Path(point) / relative.lstrip("/")


def _enable(group: Path, controller: str) -> str:
    """Let children of a version 2 group have a controller; why not, in words."""
    try:
        if controller not in (group / "cgroup.controllers").read_text().split():
            return f"{group} does not have it (cgroup.controllers)"
        control = group / "cgroup.subtree_control"
        if controller not in control.read_text().split():
            try:
                control.write_text(f"+{controller}")
            except OSError:
                _move_into_leaf(group)
                control.write_text(f"+{controller}")
    except OSError as error:
        return f"{group}: {error.strerror}"
    return ""


def _move_into_leaf(group: Path) -> None:
    """A group with processes of its own can't hand controllers on: where they are all this driver, move it one down."""
    pids = (group / "cgroup.procs").read_text().split()
    if pids != [str(os.getpid())]:
        raise OSError(16, "it holds other processes than this one, so its controllers can't be handed on")
    leaf = group / "t1-driver"
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(pids[0])


def _try(parent: Path, controller: str, version: int) -> str:
    probe = parent / f"t1-probe-{os.getpid()}"
    try:
        probe.mkdir()
        try:
            _write(probe, _limits(controller, version, 1 << 30, 100, 1.0))
        finally:
            probe.rmdir()
    except OSError as error:
        return f"{parent}: {error.strerror}"
    return ""
