"""Sandboxes with Apptainer (or Singularity), for clusters where users run neither daemons nor Podman.

    env.sandbox._target_=megatron_t1.environment.containers.apptainer.ApptainerSandbox
    env.sandbox.base=/images/ubuntu-24.04.sif

The image is read-only; what is written goes to an overlay directory of the sandbox. Apptainer builds no Dockerfiles:
their steps (those that bubblewrap follows) are taken in an instance before the agent starts. The agent's session is an
instance without a network; it is stopped with every process before the verifier's starts on the same overlay, with a
read-only copy of the tests. Written for Apptainer 1.2 and later; its tests run a stand-in of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers import archive
from megatron_t1.environment.containers.engine import Engine, end_process
from megatron_t1.environment.containers.session import Session, running
from megatron_t1.environment.image import CopyFiles, MakeDirectory, RunCommand
from megatron_t1.environment.planted import describe_planted, exposed
from megatron_t1.environment.protection import VERIFIER_DIR, verifier_environment, write_protected_tests
from megatron_t1.environment.sandbox.disk import FULL, has_room
from megatron_t1.environment.sandbox.inside import read_results
from megatron_t1.environment.sandbox.interface import (
    Change,
    CommandResult,
    Fetched,
    SandboxLost,
    VerifierRun,
)
from megatron_t1.environment.sandbox.output import OutputBuffer
from megatron_t1.environment.sandbox.own_files import OwnFiles, child_command
from megatron_t1.environment.sandbox.process import limits_script
from megatron_t1.environment.sandbox.root import remove_tree
from megatron_t1.environment.sandbox.scratch import ScratchDirectory, shared_base
from megatron_t1.environment.task import Files, Task
from megatron_t1.errors import T1Error

PROGRAMS = ("apptainer", "singularity")
VERIFIER_OUTPUT_LIMIT = 20_000
# Nothing of the user's: no home, working directory, environment or /tmp of the host, no capability, no network.
ISOLATION = (
    "--containall", "--cleanenv", "--no-home", "--no-mount", "home,cwd,tmp,hostfs,bind-paths", "--uts", "--fakeroot",
    "--no-privs", "--net", "--network", "none", "--hostname", "sandbox",
)  # fmt: skip
LIMITED = 'limits=$1; shift; eval "$limits"; exec "$@"'
WITHIN = 'cd -- "$1" 2>/dev/null || cd /; shift; exec "$@"'
LISTING = r"find / -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune -o -printf '%y %C@ %p\0'"


class ApptainerSandbox:
    """See `environment.sandbox.interface.Sandbox`.

    Args:
        config: `engine` names the program (default: apptainer, else singularity), `images` and `base` say which image
            (.sif, directory or docker:// address) FROM stands for.
        scratch_dir: below which overlays lie; a file system of this node, not a shared one.
    """

    def __init__(self, config: SandboxConfig, scratch_dir: str | Path | None = None, output_limit: int = 16_000):
        self._config, self._output_limit = config, output_limit
        self._engine = Engine(config.engine or next(filter(shutil.which, PROGRAMS), PROGRAMS[0]))
        self._base = shared_base(scratch_dir or config.scratch_dir, None)
        self._scratch: ScratchDirectory | None = None
        self._image, self._instance, self._workdir = "", "", "/"
        self._env: dict[str, str] = {}
        self._session: Session | None = None
        self._own = OwnFiles()
        self._initial: dict[str, tuple[str, str]] = {}

    async def start(self, task: Task) -> None:
        await self.stop()
        image = task.image
        try:
            self._scratch = ScratchDirectory(self._base, self._config.disk_mb, self._config.max_files)
            (self._scratch.disk / "overlay").mkdir()
        except OSError as error:
            raise SandboxLost(f"can't make an overlay: {error}", where=self._base) from error
        self._image, self._env, self._workdir = self._stand_in(image.base), dict(image.env), image.workdir
        self._own = OwnFiles()
        await self._begin()
        for step in image.steps:
            await self._follow(step, task)
        self._initial = await self._listing()
        self._session = Session(self._spawn, self._script, self._workdir, self._output_limit)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        return await running(self._session).run(command, timeout_s)

    async def execute(self, command: str, timeout_s: float) -> CommandResult:
        return await self.run(child_command(command), timeout_s)

    async def put_files(self, files: Files) -> None:
        running(self._session)
        await self._unpack(archive.pack(files))

    async def get_files(self, paths: Sequence[str], limit_bytes: int) -> Fetched:
        running(self._session)
        fetched = Fetched()
        for path in paths:
            try:
                fetched.files[path] = await self._read(path, limit_bytes)
            except ValueError as problem:
                fetched.problems[path] = str(problem)
        return fetched

    async def _read_own(self, path: str, limit_bytes: int) -> bytes:
        return await self._read(path, limit_bytes, follow="")

    async def _read(self, path: str, limit_bytes: int, follow: str = "h") -> bytes:
        """Raises ValueError, which says what else than a regular file of this size is there."""
        words = self._words("tar", "-C", "/", f"-c{follow}f", "-", "--", path.lstrip("/"))
        async with self._engine.open(*words) as tar:
            member, content = await archive.first_member(tar.stdout, limit_bytes)
        if not member.isreg():
            raise ValueError(archive.kind_of(member))
        if member.size > limit_bytes:
            raise ValueError(f"is larger than {limit_bytes} bytes")
        return content

    async def changes(self) -> list[Change]:
        """By names and change times, which GNU find tells."""
        running(self._session)
        return await self._changes()

    async def _changes(self) -> list[Change]:
        before, now = self._initial, await self._listing()
        found = [Change(path, "added") for path in now.keys() - before.keys()]
        found += [Change(path, "removed") for path in before.keys() - now.keys()]
        same = [path for path in now.keys() & before.keys() if now[path] != before[path] and now[path][0] != "d"]
        return sorted(found + [Change(path, "modified") for path in same])

    def guarantees(self) -> Mapping[str, str]:
        config = self._config
        return {
            "system": "Apptainer instance, read-only image under an overlay; changed programs are not noticed",
            "network": "none",
            "memory": f"{config.memory_mb} MB address space of each process; all together: the job's own limit",
            "processes": f"{config.max_processes} of this user (rlimit)",
            "cpu": f"{config.cpu_seconds} s of each process; how many processors: the job's own limit",
            "disk": f"{config.file_size_mb} MB of each file; all together watched: a full file system is untrusted",
            "calls": "no new privileges, no capability",
        }

    async def run_verifier(self, task: Task, timeout_s: float, names: tuple[str, ...]) -> VerifierRun:
        running(self._session)
        await self._end_instance()
        if not has_room(self._scratch.disk, self._config):
            return VerifierRun(None, "", False, doubt=FULL)
        tests, logs = self._scratch.path / "tests", self._scratch.disk / "logs"
        try:
            write_protected_tests(task, tests)
            remove_tree(logs)
            logs.mkdir()
        except OSError as error:
            raise SandboxLost(f"can't prepare the verifier: {error}", where=str(self._scratch.path)) from error
        env = verifier_environment(task, self._env)
        await self._begin("--bind", f"{tests}:/tests:ro", "--bind", f"{logs}:{VERIFIER_DIR}")
        # Looked at only now that nothing of the agent's can change it any more.
        surroundings = await asyncio.to_thread(exposed, task, env, self._workdir)
        planted = surroundings.planted(await self._changes()) if surroundings else []
        doubt = describe_planted(await self._own.others(planted, self._read_own))
        if doubt:
            await self._end_instance()
            return VerifierRun(None, "", False, doubt=doubt)
        words = ("/bin/bash", "--noprofile", "--norc", "/tests/test.sh")
        exit_code, output = await self._once(words, self._workdir, env, timeout_s)
        await self._end_instance()
        files, problems = read_results(logs, names)
        doubt = "" if has_room(self._scratch.disk, self._config) else FULL
        return VerifierRun(exit_code, output.text()[0], exit_code is None, files, problems, doubt)

    async def resume(self, files: Files) -> None:
        if self._scratch is None:
            raise SandboxLost("the sandbox was not started")
        await self._end_instance()
        await self._begin()
        if files:
            await self._unpack(archive.pack(self._own.place(files, self._workdir)))
        self._session = Session(self._spawn, self._script, self._workdir, self._output_limit)

    async def stop(self) -> None:
        try:
            with contextlib.suppress(SandboxLost):
                await self._end_instance()
        finally:
            scratch, self._scratch = self._scratch, None
            if scratch is not None:
                await asyncio.to_thread(scratch.remove)

    def _stand_in(self, image: str) -> str:
        mapped = (value for pattern, value in self._config.images.items() if fnmatch.fnmatchcase(image, pattern))
        name = next(mapped, self._config.base)
        if name:
            return name
        if not image:
            raise T1Error("no image for this task", where="env.sandbox.base", remedy="name an image (.sif) there")
        return f"docker://{image}"

    async def _begin(self, *binds: str) -> None:
        """A new instance on the sandbox's overlay."""
        self._instance = f"megatron-t1-{secrets.token_hex(8)}"
        overlay = str(self._scratch.disk / "overlay")
        words = ("instance", "start", *ISOLATION, "--overlay", overlay, *binds, self._image, self._instance)
        await self._engine.check(*words, doing="start an Apptainer instance", timeout_s=600.0)
        for kind in ("pid", "net"):
            inside = await self._engine.check(*self._words("readlink", f"/proc/self/ns/{kind}"), doing="look inside")
            if not inside or inside == os.readlink(f"/proc/self/ns/{kind}"):
                raise SandboxLost(
                    f"the instance shares the host's {kind} namespace",
                    where=self._engine.path,
                    remedy="apptainer.conf must allow it: 'allow pid ns', 'allow net users' or user namespaces",
                )

    async def _end_instance(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.end()
        instance, self._instance = self._instance, ""
        if instance:
            words = ("instance", "stop", "--force", "--timeout", "1", instance)
            await self._engine.check(*words, doing="stop an Apptainer instance")

    async def _follow(self, step: MakeDirectory | CopyFiles | RunCommand, task: Task) -> None:
        if isinstance(step, RunCommand):
            exit_code, output = await self._once(step.words, step.workdir, step.env, task.resources.build_timeout_s)
            if exit_code != 0:
                reason = "ran out of time" if exit_code is None else f"exit status {exit_code}"
                raise SandboxLost(
                    f"RUN {step.line[:200]!r}: {reason}: {output.text()[0][-500:].strip()}",
                    where=f"task {task.name}: environment/Dockerfile",
                    remedy="the sandbox has no network: prepare an image that holds what is installed here",
                )
            return
        folders = (step.path,) if isinstance(step, MakeDirectory) else step.directories
        links = {} if isinstance(step, MakeDirectory) else step.links
        files = {} if isinstance(step, MakeDirectory) else step.files
        if folders:
            await self._engine.check(*self._words("mkdir", "-p", "--", *folders), doing="make directories")
        for place, target in links.items():
            await self._engine.check(*self._words("ln", "-sfn", "--", target, place), doing="make a link")
        if files:
            await self._unpack(archive.pack(files))

    async def _unpack(self, data: bytes) -> None:
        words = self._words("tar", "-C", "/", "--no-same-owner", "-xpf", "-")
        await self._engine.put(*words, data=data, alive=self._words("true"), where=self._instance)

    def _words(self, *command: str, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """A call that runs a command in the instance, under the limits of each process."""
        variables = [word for name, value in (env or self._env).items() for word in ("--env", f"{name}={value}")]
        limits = limits_script(self._config, memory_is_bound=False)
        shell = ("/bin/bash", "--noprofile", "--norc", "-c", LIMITED, "bash", limits)
        return ("exec", "--cleanenv", "--no-home", *variables, f"instance://{self._instance}", *shell, *command)

    async def _once(
        self, command: Sequence[str], workdir: str, env: Mapping[str, str], timeout_s: float
    ) -> tuple[int | None, OutputBuffer]:
        """One command to its end; None: out of time. What it leaves behind ends with the instance."""
        words = ("/bin/bash", "-c", f"exec 2>&1; {WITHIN}", "bash", workdir, *command)
        output = OutputBuffer(VERIFIER_OUTPUT_LIMIT)
        process = await self._engine.spawn(*self._words(*words, env=env))
        try:
            async with asyncio.timeout(timeout_s):
                while block := await process.stdout.read(1 << 16):
                    output.feed(block)
                return await process.wait(), output
        except TimeoutError:
            return None, output
        finally:
            await end_process(process)

    async def _spawn(self, *words: str) -> asyncio.subprocess.Process:
        return await self._engine.spawn(*self._words(*words), stdin=b"")

    async def _script(self, text: str, *arguments: str) -> None:
        words = ("/bin/bash", "--noprofile", "--norc", "-c", text, "bash", *arguments)
        await self._engine.call(*self._words(*words), timeout_s=30.0)

    async def _listing(self) -> dict[str, tuple[str, str]]:
        done = await self._engine.call(*self._words("/bin/bash", "-c", f"{LISTING} 2>/dev/null; true"))
        rows = done.stdout.decode(errors="surrogateescape").split("\0")
        return {path: (kind, when) for kind, when, path in (row.split(" ", 2) for row in rows if row.count(" ") >= 2)}
