"""environment/Dockerfile as a list of steps that a sandbox without a container engine can follow.

Understood: FROM, WORKDIR, COPY, ADD of local files, ENV, RUN. FROM is not pulled: the sandbox's own base system stands
in for it. Everything else is refused by name, because an ignored instruction would quietly make another task of it.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_t1.errors import T1Error

UNDERSTOOD = ("FROM", "WORKDIR", "COPY", "ADD", "ENV", "RUN")
HARMLESS = ("COMMENT", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")  # nothing before the agent


@dataclass(frozen=True)
class MakeDirectory:
    path: str  # absolute, in the sandbox


@dataclass(frozen=True)
class CopyFiles:
    """Files written as they are: absolute path -> (content, permission bits)."""

    files: Mapping[str, tuple[bytes, int]]
    links: Mapping[str, str] = field(default_factory=dict)  # absolute path -> target of a symbolic link
    directories: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunCommand:
    command: str
    workdir: str
    env: Mapping[str, str]


Step = MakeDirectory | CopyFiles | RunCommand


@dataclass(frozen=True)
class Image:
    workdir: str
    env: Mapping[str, str]
    steps: tuple[Step, ...]


def load_image(environment_dir: Path, *, where: str) -> Image:
    """Read environment/Dockerfile.

    Raises:
        T1Error: there is none, or it asks for something that this backend can't do; all such lines are listed.
    """
    path = environment_dir / "Dockerfile"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(
            f"can't read the Dockerfile: {error}", where=f"{where}: {path}", remedy="add environment/Dockerfile"
        ) from error
    builder = _Builder(environment_dir)
    for instruction in _parse(text, path):
        builder.follow(instruction)
    if builder.problems:
        raise T1Error("; ".join(builder.problems), where=f"{where}: {path}", remedy="use only " + ", ".join(UNDERSTOOD))
    return Image(builder.workdir, builder.env, tuple(builder.steps))


def _parse(text: str, path: Path) -> list[dict]:
    from dockerfile_parse import DockerfileParser

    try:
        return DockerfileParser(fileobj=io.BytesIO(text.encode())).structure
    except Exception as error:
        raise T1Error(
            f"can't parse the Dockerfile: {error}", where=str(path), remedy="check it with docker build"
        ) from error


class _Builder:
    def __init__(self, context: Path):
        self.context = context
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.steps: list[Step] = []
        self.problems: list[str] = []
        self._stages = 0

    def follow(self, instruction: dict) -> None:
        name, value, line = (
            instruction["instruction"].upper(),
            instruction["value"].strip(),
            instruction["startline"] + 1,
        )
        handler = getattr(self, f"_{name.lower()}", None) if name in UNDERSTOOD else None
        try:
            if handler:
                handler(value)
            elif name not in HARMLESS:
                raise ValueError(f"{name} is not supported")
        except (ValueError, OSError) as error:
            self.problems.append(f"line {line}: {error}")

    def _from(self, value: str) -> None:
        self._stages += 1
        if self._stages > 1:
            raise ValueError("FROM: more than one build stage is not supported")

    def _workdir(self, value: str) -> None:
        self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._expand(_unquote(value))))
        self.steps.append(MakeDirectory(self.workdir))

    def _env(self, value: str) -> None:
        first = value.split(None, 1)
        if first and "=" not in first[0]:  # the old form: ENV NAME value with spaces
            self.env[first[0]] = self._expand(first[1]) if len(first) > 1 else ""
            return
        for word in shlex.split(value):
            name, equals, content = word.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"ENV: {word!r} is not NAME=value")
            self.env[name] = self._expand(content)

    def _run(self, value: str) -> None:
        if value.startswith("--"):
            raise ValueError(f"RUN: option {value.split()[0]} is not supported")
        command = value
        if value.startswith("["):
            try:
                command = shlex.join(json.loads(value))
            except (ValueError, TypeError) as error:
                raise ValueError(f"RUN: {value!r} is not a JSON list of words") from error
        self.steps.append(RunCommand(command, self.workdir, dict(self.env)))

    def _add(self, value: str) -> None:
        if "://" in value or re.search(r"\.(tar(\.\w+)?|tgz|txz|tbz2?)(\s|\"|$)", value):
            raise ValueError("ADD: only local plain files are supported")
        self._copy(value)

    def _copy(self, value: str) -> None:
        words = json.loads(value) if value.startswith("[") else shlex.split(value)
        mode = None
        while words and words[0].startswith("--"):
            option, _, content = words.pop(0).partition("=")
            if option == "--chmod":
                mode = int(content, 8)
            elif option != "--chown":  # there is one user in the sandbox
                raise ValueError(f"COPY: option {option} is not supported")
        if len(words) < 2:
            raise ValueError("COPY: needs a source and a destination")
        *sources, destination = (self._expand(word) for word in words)
        into_directory = destination.endswith("/") or destination in (".", "..") or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.workdir, destination))
        files: dict[str, tuple[bytes, int]] = {}
        links: dict[str, str] = {}
        directories: list[str] = []
        for source in self._sources(sources):
            if source.is_dir() and not source.is_symlink():
                directories.append(target)
                self._copy_tree(source, target, files, links, directories)
            else:
                path = posixpath.join(target, source.name) if into_directory else target
                files[path] = (source.read_bytes(), stat.S_IMODE(source.stat().st_mode))
        if mode is not None:
            files = {path: (content, mode) for path, (content, _) in files.items()}
        self.steps.append(CopyFiles(files, links, tuple(directories)))

    def _sources(self, patterns: list[str]) -> list[Path]:
        context = self.context.resolve()
        found = []
        for pattern in patterns:
            relative = posixpath.normpath(pattern.lstrip("/"))
            matches = sorted(context.glob(relative)) if any(c in relative for c in "*?[") else [context / relative]
            matches = [match for match in matches if os.path.lexists(match)]
            if not matches:
                raise ValueError(f"COPY: {pattern} does not exist in environment/")
            for match in matches:
                if not match.resolve().is_relative_to(context):
                    raise ValueError(f"COPY: {pattern} lies outside environment/")
            found += matches
        return found

    def _copy_tree(self, source: Path, target: str, files: dict, links: dict, directories: list[str]) -> None:
        for folder, names, leaves in os.walk(source):
            base = posixpath.normpath(posixpath.join(target, Path(folder).relative_to(source).as_posix()))
            for name in sorted(names + leaves):
                path, inside = Path(folder, name), posixpath.join(base, name)
                if path.is_symlink():
                    links[inside] = os.readlink(path)
                elif path.is_dir():
                    directories.append(inside)
                elif path.is_file():
                    files[inside] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))

    def _expand(self, text: str) -> str:
        return re.sub(
            r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))",
            lambda match: self.env.get(match[1] or match[3]) or match[2] or "",
            text,
        )


def _unquote(text: str) -> str:
    words = shlex.split(text)
    if len(words) != 1:
        raise ValueError(f"WORKDIR: {text!r} is not one path")
    return words[0]
