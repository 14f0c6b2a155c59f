"""environment/Dockerfile as a list of steps that a sandbox without a container engine can follow.

Understood: FROM, ARG, ENV, WORKDIR, COPY, ADD of local files, USER, SHELL, RUN. FROM is not pulled: a base system
stands in for it (sandbox.base). Everything else is refused by name, because an ignored instruction would quietly make
another task of it.
"""

from __future__ import annotations

import io
import json
import os
import platform
import posixpath
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_t1.errors import T1Error

UNDERSTOOD = ("FROM", "ARG", "ENV", "WORKDIR", "COPY", "ADD", "USER", "SHELL", "RUN")
SHELL = ("/bin/sh", "-c")  # of RUN, unless SHELL says otherwise
ROOT_USER = "0"
HARMLESS = ("COMMENT", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")  # nothing before the agent

_NAME = re.compile(r"[A-Za-z_]\w*")


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
    """Attributes: words: what is executed; shell_form: whether the last is a shell's line; user: as USER names it."""

    words: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    shell_form: bool = True
    user: str = ROOT_USER

    @property
    def line(self) -> str:
        return self.words[-1] if self.shell_form else shlex.join(self.words)


Step = MakeDirectory | CopyFiles | RunCommand


@dataclass(frozen=True)
class Image:
    """Attributes: base: the image that FROM names; user: of the agent and the verifier, as USER names it."""

    workdir: str
    env: Mapping[str, str]
    steps: tuple[Step, ...]
    base: str = ""
    user: str = ROOT_USER


def load_image(environment_dir: Path, *, where: str) -> Image:
    """Read environment/Dockerfile.

    Raises:
        T1Error: there is none, or it asks for something that this backend can't do; all such lines are listed.
    """
    path, instructions = require_dockerfile(environment_dir, where=where)
    builder = _Builder(environment_dir)
    for instruction in instructions:
        builder.follow(instruction)
    if not builder.base and not builder.problems:
        builder.problems.append("there is no FROM")
    if builder.problems:
        raise T1Error("; ".join(builder.problems), where=f"{where}: {path}", remedy="use only " + ", ".join(UNDERSTOOD))
    return Image(builder.workdir, builder.env, tuple(builder.steps), builder.base, builder.user)


def require_dockerfile(environment_dir: Path, *, where: str) -> tuple[Path, list[dict]]:
    """environment/Dockerfile and its instructions, whatever they are.

    Raises:
        T1Error: there is none, or it can't be parsed.
    """
    path = environment_dir / "Dockerfile"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(
            f"can't read the Dockerfile: {error}", where=f"{where}: {path}", remedy="add environment/Dockerfile"
        ) from error
    return path, parse_dockerfile(text, path)


def parse_dockerfile(text: str, path: Path) -> list[dict]:
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
        self.arguments: dict[str, str] = {}
        self.steps: list[Step] = []
        self.problems: list[str] = []
        self.base, self.user, self.shell = "", ROOT_USER, SHELL

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
        words = [word for word in self._expand(value).split() if not word.startswith("--platform")]
        if self.base:
            raise ValueError("FROM: more than one build stage is not supported")
        if not words or (len(words) != 1 and (len(words) != 3 or words[1].upper() != "AS")):
            raise ValueError(f"FROM: {value!r} is not one image")
        self.base, self.arguments = words[0], {}  # an ARG before FROM is FROM's alone

    def _arg(self, value: str) -> None:
        for word in shlex.split(value):
            name, _, default = word.partition("=")
            if not _NAME.fullmatch(name):
                raise ValueError(f"ARG: {word!r} is not NAME or NAME=default")
            self.arguments[name] = self._expand(default) or _platform_arguments().get(name, "")

    def _user(self, value: str) -> None:
        self.user = self._expand(value)
        if not re.fullmatch(r"[\w.-]+(:[\w.-]+)?", self.user):
            raise ValueError(f"USER: {value!r} is not a user, or user:group")

    def _shell(self, value: str) -> None:
        words = _json_words(value)
        if not words:
            raise ValueError(f"SHELL: {value!r} is not a JSON list of words")
        self.shell = tuple(words)

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
            if not equals or not _NAME.fullmatch(name):
                raise ValueError(f"ENV: {word!r} is not NAME=value")
            self.env[name] = self._expand(content)

    def _run(self, value: str) -> None:
        if value.startswith("--"):
            raise ValueError(f"RUN: option {value.split()[0]} is not supported")
        if value.startswith("<<"):
            raise ValueError("RUN: here-documents are not supported")
        words = _json_words(value) if value.startswith("[") else None
        env = {**self.arguments, **self.env}
        self.steps.append(
            RunCommand(tuple(words or (*self.shell, value)), self.workdir, env, shell_form=not words, user=self.user)
        )

    def _add(self, value: str) -> None:
        if "://" in value or re.search(r"\.(tar(\.\w+)?|tgz|txz|tbz2?)(\s|\"|$)", value):
            raise ValueError("ADD: only local plain files are supported")
        self._copy(value)

    def _copy(self, value: str) -> None:
        words = _json_words(value) if value.startswith("[") else shlex.split(value)
        if words is None:
            raise ValueError(f"COPY: {value!r} is not a JSON list of words")
        mode = None
        while words and words[0].startswith("--"):
            option, _, content = words.pop(0).partition("=")
            if option == "--chmod":
                mode = int(content, 8)
            elif option not in ("--chown", "--link"):  # there is one owner of files in the sandbox
                raise ValueError(f"COPY: option {option} is not supported")
        if len(words) < 2:
            raise ValueError("COPY: needs a source and a destination")
        *sources, destination = (self._expand(word) for word in words)
        if _ignores_files(self.context):
            raise ValueError("COPY: environment/.dockerignore is not supported")
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
            lambda match: self._value(match[1] or match[3]) or match[2] or "",
            text,
        )

    def _value(self, name: str) -> str:
        return self.env.get(name, self.arguments.get(name, ""))


def _platform_arguments() -> dict[str, str]:
    """What BuildKit sets when it is declared with ARG."""
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    names = {"OS": "linux", "ARCH": architecture, "PLATFORM": f"linux/{architecture}"}
    return {f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in names.items()}


def _json_words(text: str) -> list[str] | None:
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _ignores_files(context: Path) -> bool:
    try:
        lines = (context / ".dockerignore").read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() and not line.startswith("#") for line in lines)


def _unquote(text: str) -> str:
    words = shlex.split(text)
    if len(words) != 1:
        raise ValueError(f"WORKDIR: {text!r} is not one path")
    return words[0]
