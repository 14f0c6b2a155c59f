"""The command line of Podman or Docker, which agree in everything used here: one object for both.

Commands are lists of words, never shell strings. What the driver makes carries labels, so that a later driver can tell
and remove what a killed one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

from megatron_t1.environment.containers.tampering import ImageFacts
from megatron_t1.environment.sandbox.interface import FileRefused, SandboxLost
from megatron_t1.errors import T1Error

ENGINES = ("podman", "docker")
CALL_TIMEOUT_S = 120.0
IMAGE_LABEL = "megatron-t1.image"  # its value: the task that an image was built for
DRIVER_LABEL = "megatron-t1.driver"  # on what lives as long as an episode; its value: see `driver_identity`
WORDS = 500  # characters of an engine's complaint that are kept


@dataclass(frozen=True)
class Completed:
    """What one call of the engine came to. `exit_code` is None when it ran out of time and was killed."""

    exit_code: int | None
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace").strip()


class Engine:
    """Podman or Docker on this machine.

    Args:
        program: "podman", "docker", a path to one of them, or "" for the first that is installed.
        runtime: OCI runtime for containers (runc, crun, runsc, kata, ...); "": the engine's own choice.

    Raises:
        T1Error: the program is not installed.
    """

    def __init__(self, program: str = "", runtime: str = ""):
        candidates = (program,) if program else ENGINES
        found = next((path for name in candidates if (path := shutil.which(name))), None)
        if found is None:
            raise T1Error(
                f"no container engine: {' and '.join(candidates)} not found",
                where="env.sandbox.engine",
                remedy="install Podman or Docker, or choose another env.sandbox._target_",
            )
        # `shutil.which` may answer relative to this process' directory, which isn't the engine's.
        self.path, self.name, self.runtime = os.path.abspath(found), Path(found).name, runtime
        # Podman's monitor leaves a file in its directory when a container runs out of memory.
        self._place = tempfile.TemporaryDirectory(prefix="t1-engine-")
        self._storage: str | None = None
        self._cgroups: bool | None = None
        self.cleaned = False  # whether what dead drivers left was looked for
        self.facts: dict[str, ImageFacts] = {}  # of images, by id
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._builds: dict[str, asyncio.Task[None]] = {}

    @property
    def is_podman(self) -> bool:
        return "podman" in self.name

    def words(self, *arguments: str) -> list[str]:
        """The command line of one call."""
        choice = ["--runtime", self.runtime] if self.runtime and self.is_podman else []
        return [self.path, *choice, *arguments]

    def run_options(self) -> list[str]:
        """Options of `run` and `create` that the choice of runtime needs."""
        return ["--runtime", self.runtime] if self.runtime and not self.is_podman else []

    async def call(
        self,
        *arguments: str,
        stdin: bytes | int | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        limit: int = 64 << 20,
    ) -> Completed:
        """One call, fed with bytes or from a descriptor; at most `limit` bytes of its output are kept, more ends it."""
        async with self.open(*arguments, stdin=stdin) as process:
            feeding = asyncio.ensure_future(_feed(process, stdin))
            complaint = asyncio.ensure_future(_read(process.stderr, 1 << 20))
            try:
                async with asyncio.timeout(timeout_s):
                    output = await _read(process.stdout, limit)
                    if len(output) == limit:
                        return Completed(None, output, f"more than {limit} bytes of output")
                    error = await complaint
                    await feeding
                    exit_code = await process.wait()
            except TimeoutError:
                return Completed(None, b"", f"no answer within {timeout_s:g} s")
            finally:
                feeding.cancel()
                complaint.cancel()
        return Completed(exit_code, output, error.decode(errors="replace").strip())

    async def check(self, *arguments: str, doing: str, **options) -> str:
        """A call that must succeed; returns its output as text.

        Raises:
            SandboxLost: it failed; with the engine's own words.
        """
        done = await self.call(*arguments, **options)
        if done.exit_code != 0:
            raise self.lost(doing, done.stderr)
        return done.text

    async def put(self, *arguments: str, data: bytes, alive: Sequence[str], where: str) -> None:
        """A call that unpacks an archive in a sandbox.

        Args:
            alive: a call that succeeds while the sandbox lives.

        Raises:
            FileRefused: it failed, and the sandbox lives.
            SandboxLost: the sandbox is gone.
        """
        done = await self.call(*arguments, stdin=data)
        if done.exit_code != 0:
            await self.check(*alive, doing="put files into the sandbox")
            raise FileRefused(f"can't write files: {done.stderr.strip()[-200:]}", where=where)

    def lost(self, doing: str, words: str) -> SandboxLost:
        return SandboxLost(f"can't {doing}: {words[-WORDS:]}", where=self.path, remedy=_remedy(words))

    @contextlib.asynccontextmanager
    async def open(
        self, *arguments: str, stdin: bytes | int | None = None
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """A call as a process with pipes; it is dead afterwards."""
        process = await self.spawn(*arguments, stdin=stdin)
        try:
            yield process
        finally:
            await end_process(process)

    async def spawn(self, *arguments: str, stdin: bytes | int | None = None) -> asyncio.subprocess.Process:
        """A call as a process: what `stdin` may be is bytes (a pipe, to be written by the caller) or a descriptor.

        Raises:
            SandboxLost: the program can't be started.
        """
        pipe = asyncio.subprocess.PIPE
        source = asyncio.subprocess.DEVNULL if stdin is None else stdin if isinstance(stdin, int) else pipe
        try:
            return await asyncio.create_subprocess_exec(
                *self.words(*arguments),
                stdin=source,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,  # Ctrl-C is for the driver, which then ends its containers in order
                cwd=self._place.name,
            )
        except OSError as error:
            raise SandboxLost(f"can't start {self.name}: {error}", where=self.path) from error

    async def once(self, key: str, work) -> None:
        """`await work()` once for all sandboxes of this process that ask for `key` at the same time."""
        task = self._builds.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = self._builds[key] = asyncio.ensure_future(work())
        try:
            await asyncio.shield(task)
        finally:
            if task.done():
                self._builds.pop(key, None)

    @contextlib.asynccontextmanager
    async def building(self) -> AsyncIterator[None]:
        """One build at a time: those of Podman get in each other's way."""
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            yield

    @cached_property
    def driver(self) -> str:
        """Which process this is, unlike any other of this machine."""
        return driver_identity(os.getpid())

    def labels(self) -> list[str]:
        """Options that mark what an episode makes."""
        return ["--label", f"{DRIVER_LABEL}={self.driver}"]

    async def remove_abandoned(self) -> int:
        """Remove containers and volumes of drivers that are dead, and images of episodes; returns how many."""
        removed = 0
        for kind, listing, remove in (
            ("container", ("ps", "-a"), ("rm", "-f", "-v")),
            ("volume", ("volume", "ls"), ("volume", "rm", "-f")),
            ("image", ("images",), ("rmi", "-f")),
        ):
            name = {"container": "{{.ID}}", "volume": "{{.Name}}", "image": "{{.ID}}"}[kind]
            found = await self.call(*listing, "--filter", f"label={DRIVER_LABEL}", "--format", name)
            for identity in dict.fromkeys(found.text.split()) if found.exit_code == 0 else ():
                shown = await self.call(kind, "inspect", identity)
                if shown.exit_code == 0 and _is_abandoned(_label(shown.text)):
                    removed += (await self.call(*remove, identity)).exit_code == 0
        return removed

    async def prune_images(self, older_than_h: int) -> None:
        """Remove images built for tasks so many hours ago that no container uses. They are built again when needed."""
        filters = ("--filter", f"label={IMAGE_LABEL}", "--filter", f"until={older_than_h}h")
        await self.call("image", "prune", "-a", "-f", *filters)

    async def storage(self) -> str:
        """Directory of the engine's images and containers; "" where it can't be seen from here. Asked once."""
        if self._storage is not None:
            return self._storage
        form = "{{.Store.GraphRoot}}" if self.is_podman else "{{.DockerRootDir}}"
        done = await self.call("info", "--format", form)
        self._storage = done.text if done.exit_code == 0 and os.path.isdir(done.text) else ""
        return self._storage

    async def has_cgroups(self) -> bool:
        """Whether limits of a whole container are enforced: not for rootless Podman on cgroups v1. Asked once."""
        if self._cgroups is None:
            self._cgroups = not self.is_podman or _enforces_limits((await self.call("info", "--format", "json")).text)
        return self._cgroups


def plain_limits(wanted: dict[str, int]) -> list[str]:
    """`--ulimit` options: never above what this process may have (an engine that raises a limit without the right to
    can't start anything). Engines have defaults for nofile and nproc, so both are
    always stated."""
    own = {
        "nofile": resource.RLIMIT_NOFILE,
        "nproc": resource.RLIMIT_NPROC,
        "fsize": resource.RLIMIT_FSIZE,
        "cpu": resource.RLIMIT_CPU,
        "as": resource.RLIMIT_AS,
        "core": resource.RLIMIT_CORE,
    }
    options = []
    for name, value in {"nofile": 1 << 16, "nproc": 1 << 14, "core": 0, **wanted}.items():
        hard = resource.getrlimit(own[name])[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        options += ["--ulimit", f"{name}={value}:{value}"]
    return options


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill it where it still runs, and close its pipes."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                process.pid, signal.SIGKILL
            )  # process.kill() would look for its end first, and lose the exit status
    # asyncio waits for the ends of a process's pipes, which what it started may hold open for ever, and its Process has
    # no call to close them; closing the whole transport would look for the process's end first, like kill().
    for descriptor in (0, 1, 2):
        if pipe := process._transport.get_pipe_transport(descriptor):
            pipe.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 10.0)


def driver_identity(pid: int) -> str:
    """Boot, process id namespace, process id and start time; "" for the last where there is no such process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{pid}:{_start_time(pid)}"


def _is_abandoned(driver: str) -> bool:
    parts = driver.split(":")
    if len(parts) != 4 or not parts[2].isdigit():
        return False
    now = driver_identity(int(parts[2])).split(":")
    if parts[0] != now[0]:
        return True  # the machine was started again since
    return parts[1] == now[1] and parts[3] != now[3]


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _enforces_limits(info: str) -> bool:
    try:
        host = json.loads(info)["host"]
        return not host["security"]["rootless"] or host["cgroupVersion"] == "v2"
    except (ValueError, KeyError, TypeError):
        return False


def _label(shown: str) -> str:
    try:
        entry = json.loads(shown)[0]
        labels = entry.get("Labels") or (entry.get("Config") or {}).get("Labels") or {}
        return str(labels.get(DRIVER_LABEL, ""))
    except (ValueError, KeyError, IndexError, AttributeError):
        return ""


async def _feed(process: asyncio.subprocess.Process, data: bytes | int | None) -> None:
    if not isinstance(data, bytes):
        return
    with contextlib.suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    data = bytearray()
    while len(data) <= limit and (block := await stream.read(1 << 16)):
        data += block
    return bytes(data[:limit])


_REMEDIES: Sequence[tuple[str, str]] = (
    ("error setting rlimit", "this machine forbids raising limits: see docs/backends.md for containers.conf"),
    ("cgroups in hybrid mode", "choose another runtime: env.sandbox.runtime=runc"),
    ("Cannot connect to the Docker daemon", "start the Docker daemon, or env.sandbox.engine=podman"),
    ("permission denied while trying to connect", "the user must be allowed to use Docker"),
    ("image not known", "the image is not on this machine: pull it, or map it with env.sandbox.bases"),
    ("no such image", "the image is not on this machine: pull it, or map it with env.sandbox.bases"),
    ("No such image", "the image is not on this machine: pull it, or map it with env.sandbox.bases"),
)


def _remedy(words: str) -> str:
    return next((remedy for sign, remedy in _REMEDIES if sign in words), "")
