"""The image that a task's containers start from: built once from environment/Dockerfile, by the engine itself.

FROM may be mapped to another image (`env.sandbox.images`, `env.sandbox.base`), which is how a machine without a
registry builds. A base directory that `t1 tasks base` wrote is imported, and package commands that it already satisfies
are left out, as bubblewrap does.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers.engine import IMAGE_LABEL, WORDS, Engine, plain_limits
from megatron_t1.environment.containers.tampering import FACTS_SCRIPT, ImageFacts
from megatron_t1.environment.digest import task_digest
from megatron_t1.environment.dockerfile_words import has_here_document, here_documents_end
from megatron_t1.environment.image import parse_dockerfile
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.packages import PackagesMissing, satisfied
from megatron_t1.environment.sandbox.base import DESCRIPTION, ROOT, Inventory, load_base
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error

DOCKERFILE = Path("environment/Dockerfile")
REPOSITORY = "localhost/megatron-t1"  # of what is built and imported here; never pushed or pulled
IMPORT_TIMEOUT_S = 1800.0
BUILD_ATTEMPTS = 3
RACES = ("layer not known", "image not known")  # Podman's words for layers that another process removes meanwhile
_DOES_SOMETHING = re.compile(r"[^\s:&;]")
_FROM = re.compile(r"(?i)^(?P<options>(?:--\S+\s+)*)(?P<image>\S+)(?P<rest>.*)$", re.DOTALL)


@dataclass(frozen=True)
class TaskImage:
    """Attributes: reference: what containers start from; workdir, env, user: the image's; facts: of its system."""

    reference: str
    workdir: str
    env: dict[str, str]
    user: str
    facts: ImageFacts

    def real(self, path: str) -> str:
        """The path with the links of the image's working directory followed."""
        inner = path.removeprefix(self.workdir)
        known = self.facts.workdir and inner != path and inner[:1] in ("", "/")
        return f"{self.facts.workdir.rstrip('/')}{inner}" or "/" if known else path


async def task_image(engine: Engine, config: SandboxConfig, task: Task, scratch: Path) -> TaskImage:
    """Build the task's image, or find it built.

    Args:
        scratch: an existing directory of this sandbox alone.

    Raises:
        T1Error: the Dockerfile or what FROM is mapped to can't be read.
        SandboxLost: the engine can't build it, with the engine's words.
    """
    if task.directory is None:
        folder = scratch / "task"
        if not folder.exists():
            write_task(task, folder)
        context = folder / "environment"
    else:
        context = task.environment_dir
    if (context / "Dockerfile").exists():
        reference = await _built(engine, config, task, context, scratch)
    else:
        reference = (await stand_in(engine, config, task.docker_image)).reference
    return await _described(engine, reference)


@dataclass(frozen=True)
class StandIn:
    """What FROM stands for here: an image, and what is known to be installed in it (None: nothing is known)."""

    reference: str
    inventory: Inventory | None = None


async def stand_in(engine: Engine, config: SandboxConfig, image: str) -> StandIn:
    """The first pattern of env.sandbox.images that fits, else env.sandbox.base, else the image itself.

    Raises:
        T1Error: a base directory is none.
        SandboxLost: the engine can't import it.
    """
    mapped = (value for pattern, value in config.images.items() if fnmatch.fnmatchcase(image, pattern))
    name = next(mapped, config.base) or image
    if not name:
        raise T1Error(
            "no image: the task has neither environment/Dockerfile nor environment.docker_image",
            where="env.sandbox.base",
            remedy="name an image there",
        )
    directory = Path(name)
    if not directory.is_absolute() and not (directory / DESCRIPTION).exists():
        return StandIn(name)
    base = load_base(name)
    written = (directory / DESCRIPTION).stat().st_mtime_ns  # base.json is the last that is written of a base
    digest = hashlib.sha256(f"{directory.resolve()} {written}".encode()).hexdigest()
    reference = f"{REPOSITORY}/base:{digest[:24]}"
    if not await _exists(engine, reference):
        await engine.once(reference, lambda: import_root(engine, directory / ROOT, reference))
    return StandIn(reference, base.inventory)


async def import_root(engine: Engine, root: Path, reference: str) -> None:
    """A directory with a file system as an image, all of it owned by the container's root. Raises SandboxLost."""
    pack = ("tar", "-C", str(root), "--numeric-owner", "--owner=0", "--group=0", "-c", ".")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    packing = subprocess.Popen(pack, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.DEVNULL)
    os.close(writing)
    try:
        done = await engine.call("import", "-", reference, stdin=reading, timeout_s=IMPORT_TIMEOUT_S)
    finally:
        os.close(reading)
        packing.kill()
        await asyncio.to_thread(packing.wait)
    if done.exit_code != 0:
        raise engine.lost(f"import {root}", done.stderr)


def mapped_dockerfile(text: str, stand_ins: dict[str, StandIn], *, make_workdirs: bool = False) -> str:
    """The Dockerfile with every FROM replaced by its stand-in, without package commands that this one satisfies.

    Args:
        make_workdirs: add a RUN between two WORKDIR, without which Podman makes only the last directory.
    """
    lines, inventory, pending = [], None, False
    for instruction in _instructions(text):
        name, value, content = instruction["instruction"].upper(), instruction["value"], instruction["content"]
        if name == "FROM" and (match := _FROM.match(value)) and match["image"] in stand_ins:
            found = stand_ins[match["image"]]
            inventory = found.inventory
            content = f"FROM {match['options']}{found.reference}{match['rest']}\n"
        elif name == "FROM":
            inventory = None
        elif name == "RUN" and inventory is not None:
            content = _without_packages(value, inventory, content)
        if name == "WORKDIR" and pending and make_workdirs:
            lines.append("RUN :\n")
        pending = name == "WORKDIR" or pending and name not in ("RUN", "COPY", "ADD")
        lines.append(content if not content or content.endswith("\n") else f"{content}\n")
    return "".join(lines)


def _instructions(text: str) -> list[dict]:
    """A Dockerfile's instructions, each with its here-documents: what stands in those is no instruction."""
    lines = text.splitlines(keepends=True)
    bodies: dict[int, str] = {}
    inside: set[int] = set()
    known = 0
    while True:
        found = [entry for entry in parse_dockerfile("".join(lines), DOCKERFILE) if entry["startline"] not in inside]
        opening = (entry for entry in found if entry["startline"] >= known and _opens_here_document(entry))
        entry = next(opening, None)
        if entry is None:
            return [{**entry, "content": entry["content"] + bodies.get(entry["startline"], "")} for entry in found]
        first = entry["endline"] + 1
        known = here_documents_end(entry["value"], lines, first)
        bodies[entry["startline"]] = "".join(lines[first:known])
        inside |= {*range(first, known)}
        lines[first:known] = ["#\n"] * (known - first)


def _opens_here_document(entry: dict) -> bool:
    return entry["instruction"].upper() in ("RUN", "COPY", "ADD") and has_here_document(entry["value"])


def _without_packages(command: str, inventory: Inventory, content: str) -> str:
    if command.startswith(("[", "--")) or "<<" in command:
        return content
    try:
        rest = satisfied(command, inventory)
    except PackagesMissing:
        return content  # the build may have a network
    if rest == command:
        return content
    return f"RUN {rest}" if _DOES_SOMETHING.search(rest) else ""


def bases_of(text: str) -> list[str]:
    """Images that a Dockerfile starts from; names of its own stages are none."""
    stages: set[str] = set()
    found = []
    for instruction in _instructions(text):
        if instruction["instruction"].upper() == "FROM" and (match := _FROM.match(instruction["value"])):
            if match["image"] not in stages and match["image"] != "scratch":
                found.append(match["image"])
            if named := re.search(r"(?i)\bas\s+(\S+)", match["rest"]):
                stages.add(named[1])
    return found


async def _built(engine: Engine, config: SandboxConfig, task: Task, context: Path, scratch: Path) -> str:
    text = _read(context / "Dockerfile")
    stand_ins = {image: await stand_in(engine, config, image) for image in bases_of(text)}
    text = mapped_dockerfile(text, stand_ins, make_workdirs=engine.is_podman)
    try:
        content = await asyncio.to_thread(task_digest, context)
    except OSError as error:
        raise T1Error(f"can't read the task's environment: {error}", where=f"task {task.name}") from error
    digest = hashlib.sha256(f"{content}\0{text}".encode()).hexdigest()
    reference = f"{REPOSITORY}/task:{digest[:24]}"
    if not await _exists(engine, reference):
        dockerfile = scratch / "Dockerfile"
        dockerfile.write_text(text)
        await engine.once(reference, lambda: _build(engine, config, task, context, dockerfile, reference))
    return reference


async def _build(
    engine: Engine, config: SandboxConfig, task: Task, context: Path, dockerfile: Path, reference: str
) -> None:
    options = ["--label", f"{IMAGE_LABEL}={task.name}", "--tag", reference, "--file", str(dockerfile.resolve())]
    options += plain_limits({})
    if config.build_network:
        options += ["--network", config.build_network]
    if engine.is_podman:
        options += ["--format", "docker"]  # OCI's format has no SHELL
    limit = task.resources.build_timeout_s
    for _ in range(BUILD_ATTEMPTS):
        async with engine.building():
            done = await engine.call("build", *options, str(context.resolve()), timeout_s=limit)
        if done.exit_code == 0 or not any(sign in done.stderr for sign in RACES):
            break
    if done.exit_code != 0:
        words = f"{done.text}\n{done.stderr}".strip()[-WORDS:]
        raise SandboxLost(
            f"the image can't be built: {words}",
            where=f"task {task.name}: {context / 'Dockerfile'}",
            remedy="build it by hand to see more; env.sandbox.images maps FROM, build_network sets a network",
        )


async def _exists(engine: Engine, reference: str) -> bool:
    return (await engine.call("image", "inspect", "--format", "{{.Id}}", reference)).exit_code == 0


async def _described(engine: Engine, reference: str) -> TaskImage:
    shown = await engine.check("image", "inspect", reference, doing=f"find image {reference}")
    try:
        found = json.loads(shown)[0]
        identity, config = found["Id"], found.get("Config") or {}
        env = dict(entry.split("=", 1) for entry in config.get("Env") or ())
    except (ValueError, LookupError, TypeError) as error:
        raise SandboxLost(
            f"the engine's description of {reference} can't be read: {error}", where=engine.path
        ) from error
    facts = engine.facts.get(identity)
    if facts is None:
        options = (
            "--rm",
            "--pull",
            "never",
            "--network",
            "none",
            "--entrypoint",
            "/bin/bash",
            *engine.run_options(),
            *plain_limits({}),
        )
        done = await engine.call("run", *options, reference, "--noprofile", "--norc", "-c", FACTS_SCRIPT)
        if done.exit_code != 0:
            raise engine.lost(f"run bash in image {reference}", done.stderr)
        facts = engine.facts[identity] = ImageFacts.parse(done.stdout)
    return TaskImage(reference, config.get("WorkingDir") or "/", env, config.get("User") or "", facts)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(f"can't read the Dockerfile: {error}", where=str(path)) from error
