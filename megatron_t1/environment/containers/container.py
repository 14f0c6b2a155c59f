"""Sandboxes in containers of Podman or Docker on this machine, for tasks that need their own image.

    env.sandbox._target_=megatron_t1.environment.containers.container.ContainerSandbox

The agent plays in one container without a network. For the verifier its processes are killed, what it left is
committed, and a new container starts from that, with a read-only copy of the tests and an empty directory for results.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers import archive
from megatron_t1.environment.containers.engine import Engine, end_process, plain_limits
from megatron_t1.environment.containers.image import TaskImage, task_image
from megatron_t1.environment.containers.session import Session, running
from megatron_t1.environment.containers.tampering import CHANGED, describe, parse_diff, suspicious
from megatron_t1.environment.planted import describe_planted, exposed
from megatron_t1.environment.protection import VERIFIER_DIR, verifier_environment, write_protected_tests
from megatron_t1.environment.sandbox.disk import FULL, has_room
from megatron_t1.environment.sandbox.interface import (
    RESULT_LIMIT_BYTES,
    Change,
    CommandResult,
    Fetched,
    SandboxLost,
    VerifierRun,
)
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.own_files import OwnFiles, child_command
from megatron_t1.environment.sandbox.scratch import ScratchDirectory, shared_base
from megatron_t1.environment.task import Files, Task

RESULTS_LIMIT_BYTES = 64 << 20  # of everything in the verifier's directory
VERIFIER_OUTPUT_LIMIT = 20_000
KEEP_IMAGES_H = 168  # images of tasks that nobody used for so long are removed; ours
OPEN_FILES = 1 << 16  # descriptors of each process in the container
# Of the capabilities that both engines give to root. (Podman gives what is added by name to other users too.)
DROPPED = ("AUDIT_WRITE", "MKNOD", "NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETPCAP", "SYS_CHROOT")
# The first process takes over and buries what lost its parent. It waits for what never comes, without another process:
# it has to outlive a full process table, and signals from inside.
FIRST_PROCESS = (
    "mkfifo /dev/shm/.t1 && exec 3<>/dev/shm/.t1 && rm -f /dev/shm/.t1 || exit 1; "
    "trap '' HUP INT QUIT TERM USR1 USR2 PIPE ALRM; while :; do read -r -u 3 _; done"
)
VERIFIER_PROCESS = 'exec 2>&1; cd -- "$1" 2>/dev/null || cd /; /bin/bash --noprofile --norc /tests/test.sh; exit $?'
PRIVATE = "/run/t1-verifier"  # a tmpfs of the verifier's container
KINDS = {"A": "added", "C": "modified", "D": "removed"}
LINKS = 40


class ContainerSandbox:
    """See `environment.sandbox.interface.Sandbox`.

    Args:
        config: limits; `engine` and `runtime` choose the program, `images` and `base` what FROM stands for.
        scratch_dir: below which the protected copies of tests lie, see `BubblewrapSandbox`.
        output_limit: bytes of one command's output that are kept.
    """

    builds_dockerfiles = True  # with everything that the engine understands

    def __init__(self, config: SandboxConfig, scratch_dir: str | Path | None = None, output_limit: int = 16_000):
        self._config, self._output_limit = config, output_limit
        self._engine = shared_engine(config.engine, config.runtime)
        self._base = shared_base(scratch_dir or config.scratch_dir, None)
        self._scratch: ScratchDirectory | None = None
        self._name, self._verified, self._has_cgroups = "", False, True
        self._image: TaskImage | None = None
        self._workdir = "/"
        self._session: Session | None = None
        self._own = OwnFiles()
        self._initial: frozenset[tuple[str, str]] = frozenset()

    async def start(self, task: Task) -> None:
        await self._remove()
        await self._engine.once("abandoned", lambda: _clean_once(self._engine))
        try:
            self._scratch = ScratchDirectory(self._base, 64, 10_000)
        except OSError as error:
            raise SandboxLost(f"can't make a scratch directory: {error}", where=self._base) from error
        self._image = await task_image(self._engine, self._config, task, self._scratch.path)
        self._workdir = task.workdir or self._image.workdir
        self._name = f"megatron-t1-{secrets.token_hex(8)}"
        options = await self._options(self._name, {**task.env})
        await self._engine.check(
            "run", "--detach", *options, self._image.reference, "-c", FIRST_PROCESS, doing="start a container"
        )
        if task.workdir:
            await self._engine.check(
                "exec", "--user", "0", self._name, "mkdir", "-p", task.workdir, doing="make workdir"
            )
        self._initial, self._own = frozenset(await self._diff()), OwnFiles()
        self._session = Session(self._exec, self._script, self._workdir, self._output_limit)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        return await running(self._session).run(command, timeout_s)

    async def execute(self, command: str, timeout_s: float) -> CommandResult:
        return await self.run(child_command(command), timeout_s)

    async def put_files(self, files: Files) -> None:
        running(self._session)
        await self._put(files)

    async def _put(self, files: Files) -> None:
        alive = ("container", "inspect", self._name)
        where = f"container {self._name}"
        await self._engine.put("cp", "-", f"{self._name}:/", data=archive.pack(files), alive=alive, where=where)

    async def get_files(self, paths: Sequence[str], limit_bytes: int) -> Fetched:
        running(self._session)
        fetched = Fetched()
        for path in paths:
            try:
                fetched.files[path] = await self._read(path, limit_bytes)
            except ValueError as problem:
                fetched.problems[path] = str(problem)
        return fetched

    async def changes(self) -> list[Change]:
        """As the engine tells it: of a removed directory only itself is listed."""
        running(self._session)
        entries = [entry for entry in await self._diff() if entry not in self._initial]
        changed = [path for kind, path in entries if kind == CHANGED]
        folders = {path for path in changed if await self._is_directory(path)}
        return sorted(Change(path, KINDS[kind]) for kind, path in entries if path not in folders)

    def guarantees(self) -> Mapping[str, str]:
        """After `start`, which asks the engine what it enforces."""
        name, config = self._engine.name, self._config
        together = f"all processes together (control group, by {name})"
        bound = together if self._has_cgroups else "of each process (rlimit): rootless Podman on cgroups v1"
        cpus = f"{config.cpus:g} processors, {together}; " if config.cpus and self._has_cgroups else ""
        return {
            "system": f"{name} container, {config.runtime or 'default'} runtime, private root file system",
            "network": "none",
            "memory": f"{config.memory_mb} MB, {bound}",
            "processes": f"{config.max_processes}, {bound}",
            "cpu": f"{cpus}{config.cpu_seconds} s of each process",
            "disk": f"{config.file_size_mb} MB of each file; verdicts are untrusted above {config.disk_mb} MB together",
            "calls": f"{name}'s seccomp filter, no new privileges, no capability " + ", ".join(DROPPED),
        }

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        await self._end_session()
        doubt = await self._doubt(task)
        if doubt:
            return VerifierRun(None, "", False, doubt=doubt)
        tests = self._scratch.path / "tests"
        try:
            write_protected_tests(task, tests)
        except OSError as error:
            raise SandboxLost(f"can't write the tests: {error}", where=str(tests)) from error
        check, name = self._engine.check, f"{self._name}-verifier"
        left, self._verified = f"{self._name}:left", True
        await check("commit", self._name, left, doing="keep what the agent left")
        await check("volume", "create", *self._engine.labels(), name, doing="make a volume")
        env = {**self._verifier_env(task), "PYTHONPYCACHEPREFIX": f"{PRIVATE}/cache"}
        options = await self._options(name, env)
        options += ["--volume", f"{tests}:/tests:ro,Z", "--volume", f"{name}:{VERIFIER_DIR}:nocopy"]
        options += ["--tmpfs", f"{PRIVATE}:size=64m,mode=1777"]
        words = (left, "-c", VERIFIER_PROCESS, "sh", self._workdir)
        await check("create", *options, *words, doing="make the verifier's container")
        whole = archive.open_directory(0o777)
        await check("cp", "-", f"{name}:{VERIFIER_DIR}", stdin=whole, doing="open the verifier's directory")
        output = OutputBuffer(VERIFIER_OUTPUT_LIMIT)
        exit_code = await self._attach(name, output, timeout_s)
        files, problems = await self._results(name, names)
        doubt = FULL if not await self._has_room() else ""
        return VerifierRun(exit_code, output.text()[0], exit_code is None, files, problems, doubt)

    async def resume(self, files: Files) -> None:
        """In the agent's own container, as it was before the verifier: what that changed is gone with its container."""
        if not self._name:
            raise SandboxLost("the sandbox was not started")
        if self._session is not None:
            await self._end_session()
        if self._verified:
            await self._remove_verifier()
        if files:
            await self._put(self._own.place(files, self._workdir))
        await self._engine.check("start", self._name, doing="start the agent's container again")
        self._session = Session(self._exec, self._script, self._workdir, self._output_limit)

    async def stop(self) -> None:
        await self._remove()

    async def _options(self, name: str, env: Mapping[str, str]) -> list[str]:
        """Options of `run` and `create` that bound a container."""
        config = self._config
        limits = {"nofile": OPEN_FILES, "fsize": config.file_size_mb << 20, "cpu": config.cpu_seconds}
        options = ["--name", name, "--hostname", "sandbox", "--network", "none", "--pull", "never", "--no-healthcheck"]
        options += [*self._engine.run_options(), *self._engine.labels(), "--log-driver", "none", "--stop-timeout", "0"]
        options += ["--security-opt", "no-new-privileges"]
        options += [f"--cap-drop={capability}" for capability in DROPPED]
        options += ["--shm-size", "64m", "--entrypoint", "/bin/bash", "--workdir", "/"]
        self._has_cgroups = await self._engine.has_cgroups()
        if self._has_cgroups:
            memory = f"{config.memory_mb}m"
            options += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(config.max_processes)]
            options += ["--cpus", f"{config.cpus:g}"] if config.cpus else []
        else:
            limits |= {"as": config.memory_mb << 20, "nproc": config.max_processes}
        options += plain_limits(limits)
        for variable, value in env.items():
            options += ["--env", f"{variable}={value}"]
        return options

    async def _exec(self, *words: str) -> asyncio.subprocess.Process:
        return await self._engine.spawn("exec", "--interactive", self._name, *words, stdin=b"")

    async def _script(self, text: str, *arguments: str) -> None:
        words = ("/bin/bash", "--noprofile", "--norc", "-c", text, "bash", *arguments)
        await self._engine.call("exec", "--user", "0", self._name, *words, timeout_s=30.0)

    async def _diff(self) -> list[tuple[str, str]]:
        return parse_diff(await self._engine.check("diff", self._name, doing="see what changed"))

    async def _is_directory(self, path: str) -> bool:
        try:
            await self._read(path, 0)
        except ValueError as problem:
            return str(problem) == archive.DIRECTORY
        return False

    async def _read_own(self, path: str, limit_bytes: int) -> bytes:
        return await self._read(path, limit_bytes, links=0)

    async def _read(self, path: str, limit_bytes: int, links: int = LINKS) -> bytes:
        """Raises ValueError, which says what else than a regular file of this size is there."""
        for _ in range(links + 1):
            async with self._engine.open("cp", f"{self._name}:{path}", "-") as process:
                member, content = await archive.first_member(process.stdout, limit_bytes)
            if not member.issym():
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), member.linkname))
        if not member.isreg():
            raise ValueError(archive.kind_of(member))
        if member.size > limit_bytes:
            raise ValueError(f"is larger than {limit_bytes} bytes")
        return content

    async def _end_session(self) -> None:
        """Every process of the agent dies; its files stay."""
        session, self._session = self._session, None
        if session is None:
            raise SandboxLost("the sandbox has no session to verify")
        await session.end()
        done = await self._engine.call("kill", self._name)
        words = ("container", "inspect", "--format", "{{.State.Running}}", self._name)
        if done.exit_code != 0 and await self._engine.check(*words, doing="end the agent's container") != "false":
            raise self._engine.lost(
                "end the agent's container", done.stderr
            )  # it may have ended by itself, out of memory

    def _verifier_env(self, task: Task) -> dict[str, str]:
        return verifier_environment(task, {**self._image.env, **task.env})

    async def _doubt(self, task: Task) -> str:
        """Why a verifier could not be trusted on what the agent left; "" where there is no reason."""
        shown = await self._engine.check(
            "container", "inspect", "--size", "--format", "{{.SizeRw}}", self._name, doing="measure what was written"
        )
        if shown.isdigit() and int(shown) > self._config.disk_mb << 20:
            return f"the agent left {int(shown) >> 20} MB, more than env.sandbox.disk_mb={self._config.disk_mb}"
        if not await self._has_room():
            return FULL
        changed = [entry for entry in await self._diff() if entry not in self._initial]
        found = suspicious(changed, self._image.facts, self._workdir)
        found = [entry for entry in found if entry[0] != CHANGED or not await self._is_directory(entry[1])]
        others = await self._own.others([path for _, path in found], self._read_own)
        found = [entry for entry in found if entry[1] in others]
        if found:
            return describe(found)
        facts, changes = self._image.facts, (Change(path, KINDS[kind]) for kind, path in changed)
        env, real = self._verifier_env(task), self._image.real
        surroundings = await asyncio.to_thread(exposed, task, env, self._workdir, real)
        planted = surroundings.planted(changes, facts.programs, facts.modules)
        return describe_planted(await self._own.others(planted, self._read_own))

    async def _has_room(self) -> bool:
        storage = await self._engine.storage()
        return not storage or has_room(Path(storage), self._config)

    async def _attach(self, name: str, output: OutputBuffer, timeout_s: float) -> int | None:
        """Start a container and collect its output to the end. None: out of time, and killed."""
        process = await self._engine.spawn("start", "--attach", name)
        try:
            async with asyncio.timeout(timeout_s):
                while block := await process.stdout.read(1 << 16):
                    output.feed(block)
                exit_code = await process.wait()
        except TimeoutError:
            await self._engine.check("kill", name, doing="end the verifier's container")
            return None
        finally:
            await end_process(process)
        if exit_code == 125:
            words = (await process.stderr.read(4096)).decode(errors="replace").strip()
            raise self._engine.lost("start the verifier's container", words)
        return exit_code

    async def _results(self, name: str, names: tuple[str, ...]) -> tuple[dict[str, bytes], dict[str, str]]:
        done = await self._engine.call("cp", f"{name}:{VERIFIER_DIR}", "-", limit=RESULTS_LIMIT_BYTES)
        if done.exit_code != 0:
            return {}, dict.fromkeys(names, f"can't be read: {done.stderr[-200:]}")
        try:
            return archive.regular_files(done.stdout, names, RESULT_LIMIT_BYTES)
        except ValueError as error:
            return {}, dict.fromkeys(names, str(error))

    async def _remove(self) -> None:
        session, self._session = self._session, None
        (name, verified), (self._name, self._verified) = (self._name, self._verified), ("", False)
        try:
            if session is not None:
                await session.end()
            if name:
                await self._engine.call("rm", "-f", "-v", name)
            if name and verified:
                await self._remove_verifier(name)
        finally:
            scratch, self._scratch = self._scratch, None
            if scratch is not None:
                await asyncio.to_thread(scratch.remove)

    async def _remove_verifier(self, name: str = "") -> None:
        name, self._verified = name or self._name, False
        await self._engine.call("rm", "-f", "-v", f"{name}-verifier")
        await self._engine.call("volume", "rm", "-f", f"{name}-verifier")
        await self._engine.call("rmi", "-f", f"{name}:left")


@cache
def shared_engine(program: str, runtime: str) -> Engine:
    """One object for all sandboxes of this process, so that an image is built once. Raises T1Error."""
    return Engine(program, runtime)


async def _clean_once(engine: Engine) -> None:
    if not engine.cleaned:
        engine.cleaned = True
        with contextlib.suppress(SandboxLost):
            await engine.remove_abandoned()
            await engine.prune_images(KEEP_IMAGES_H)
