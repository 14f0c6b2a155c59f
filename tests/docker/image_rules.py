"""Our own rules for Dockerfiles, beside hadolint's: what makes an image rebuildable, small and harmless."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWN_PACKAGE = "/opt/megatron-t1"
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[^]]*\])?==[0-9][^*]*")
OPTIONS_WITH_VALUE = ("-c", "--constraint", "-i", "--index-url", "--extra-index-url")


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str
    line: int


def instructions(text: str) -> list[Instruction]:
    """A Dockerfile's instructions with continued lines joined, without comments."""
    found, words, start = [], [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not words):
            continue
        start = start or number
        words.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, value = " ".join(words).partition(" ")
            found.append(Instruction(name.upper(), value.strip(), start))
            words, start = [], 0
    return found


def base_image(steps: list[Instruction]) -> str:
    """What FROM names, with the defaults of the arguments before it filled in."""
    defaults = dict(step.value.split("=", 1) for step in steps if step.name == "ARG" and "=" in step.value)
    image = next(step.value.split()[0] for step in steps if step.name == "FROM")
    return re.sub(r"\$\{?(\w+)\}?", lambda match: defaults.get(match[1], ""), image)


def problems(path: Path) -> list[str]:
    """One line for each rule that a Dockerfile breaks, with the line it breaks it in."""
    steps = instructions(path.read_text())
    return [f"{path.name}:{line}: {problem}" for line, problem in _problems(steps, path.parent.parent)]


def _problems(steps: list[Instruction], root: Path) -> Iterator[tuple[int, str]]:
    image = base_image(steps)
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and (not tag or tag == "latest"):
        yield 1, f"the base image {image or 'without a default'} isn't pinned"
    users = [step for step in steps if step.name == "USER"]
    if not users or users[-1].value.split(":")[0] in ("root", "0"):
        yield steps[-1].line, "the image runs as root"
    if not any(step.name == "ENV" and "PYTHONNOUSERSITE=1" in step.value.split() for step in steps):
        yield steps[-1].line, "packages of a mounted home come before the image's: ENV PYTHONNOUSERSITE=1"
    for step in steps:
        if step.name == "ADD":
            yield step.line, "ADD fetches and unpacks unseen: COPY files, download with a checksum"
        if step.name == "COPY" and step.value.split()[0] in (".", "./"):
            yield step.line, "COPY of the whole context: name what is needed"
        if step.name == "ENV" and re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", step.value, re.IGNORECASE):
            yield step.line, "a secret in the environment stays in the image"
        if step.name == "RUN":
            for problem in _run_problems(step.value, root):
                yield step.line, problem


def _run_problems(command: str, root: Path) -> Iterator[str]:
    if re.search(r"(curl|wget)[^&;]*\|\s*(ba|z)?sh\b", command):
        yield "what was downloaded is run unseen"
    if re.search(r"\bsudo\b|chmod (-R )?0?777", command):
        yield "rights nobody needs"
    if re.search(r"apt-get (\S+ )*install", command):
        if "--no-install-recommends" not in command:
            yield "apt-get install without --no-install-recommends"
        if "rm -rf /var/lib/apt/lists" not in command:
            yield "the package lists stay in the layer"
        if "apt-get update" not in command:
            yield "apt-get install without an update in the same layer may find nothing"
    for part in re.split(r"&&|;", command):
        words = part.split()
        if "pip" in words and "install" in words:
            yield from _pip_problems(words[words.index("install") + 1 :], root)


def _pip_problems(words: list[str], root: Path) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in OPTIONS_WITH_VALUE:
            next(rest)
        elif word in ("-r", "--requirement"):
            yield from unpinned(root / next(rest).removeprefix(f"{OWN_PACKAGE}/"))
        elif not word.startswith("-") and word != OWN_PACKAGE and not PINNED.fullmatch(word.strip("\"'")):
            yield f"{word} isn't pinned"


def unpinned(path: Path) -> list[str]:
    """Lines of a requirements file that don't fix a version."""
    return [
        f"{path.name}: {line} isn't pinned"
        for line in map(str.strip, path.read_text().splitlines())
        if line and not line.startswith("#") and not PINNED.fullmatch(line)
    ]
