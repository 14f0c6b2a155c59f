"""environment/Dockerfile as a list of steps that a sandbox without a container engine can follow.

Understood: FROM, ARG, ENV, WORKDIR, COPY, ADD of local files, USER, SHELL, RUN. FROM is not pulled: a base system
stands in for it (sandbox.base). Everything else is refused by name, because an ignored instruction would quietly make
another task of it.
"""

from __future__ import annotations

import io
import json
import platform
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_t1.environment.build_context import BuildContext
from megatron_t1.environment.dockerfile_words import expanded, has_here_document, split_words
from megatron_t1.environment.exec_limits import too_large
from megatron_t1.environment.tree import Reader
from megatron_t1.errors import T1Error

UNDERSTOOD = ("FROM", "ARG", "ENV", "WORKDIR", "COPY", "ADD", "USER", "SHELL", "RUN")
SHELL = ("/bin/sh", "-c")  # of RUN, unless SHELL says otherwise
ROOT_USER = "0"
MAX_ID = 2**31 - 1  # of a user or group, as for docker
PATH_MAX = 4096  # Linux' limit, with the NUL at the end
MAX_DOCKERFILE_BYTES, MAX_INSTRUCTIONS, MAX_VARIABLES = 256 << 10, 2000, 1000
SHOWN_PROBLEMS, SHOWN_CHARACTERS = 20, 300
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of an image that states none
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
    if len(instructions) > MAX_INSTRUCTIONS:
        builder.problems.append(f"more than {MAX_INSTRUCTIONS} instructions and comments")
        instructions = []
    for instruction in instructions:
        builder.follow(instruction)
    if not builder.base and not builder.problems:
        builder.problems.append("there is no FROM")
    if builder.problems:
        shown = "; ".join(builder.problems[:SHOWN_PROBLEMS])
        raise T1Error(shown, where=f"{where}: {path}", remedy="use only " + ", ".join(UNDERSTOOD))
    return Image(builder.workdir, builder.env, tuple(builder.steps), builder.base, builder.user)


def require_dockerfile(environment_dir: Path, *, where: str) -> tuple[Path, list[dict]]:
    """environment/Dockerfile and its instructions, whatever they are.

    Raises:
        T1Error: there is none, or it can't be parsed.
    """
    path = environment_dir / "Dockerfile"
    try:
        text = Reader(MAX_DOCKERFILE_BYTES).read(path)[0].decode()
        if "\0" in text:
            raise ValueError("it holds a NUL character")
    except FileNotFoundError as error:
        raise T1Error(
            "there is no Dockerfile", where=f"{where}: {path}", remedy="add environment/Dockerfile"
        ) from error
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise T1Error(
            f"can't read the Dockerfile: {said}", where=f"{where}: {path}", remedy="make it a plain text file"
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
        self.context = BuildContext(context)
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.global_arguments: dict[str, str] = {}  # of ARG before FROM
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
            if name == "COMMENT" and re.fullmatch(r"(?i)escape\s*=\s*`", value):
                self.problems.append(f"line {line}: another escape character than \\ is not supported")
            if handler and not value:
                raise ValueError("says nothing")
            if name in ("RUN", "COPY", "ADD") and has_here_document(value):
                raise ValueError("here-documents are not supported")
            if handler:
                handler(value)
            elif name not in HARMLESS:
                self.problems.append(f"line {line}: {name[:40]} is not supported")
        except OSError as error:
            self.problems.append(f"line {line}: {name}: {error.strerror or error} ({error.filename or value[:80]})")
        except ValueError as error:
            self.problems.append(f"line {line}: {name}: {str(error)[:SHOWN_CHARACTERS]}")

    def _from(self, value: str) -> None:
        words = [self._expand(word) for word in value.split() if not word.startswith("--platform")]
        if self.base:
            raise ValueError("more than one build stage is not supported")
        if not words or not words[0] or (len(words) != 1 and (len(words) != 3 or words[1].upper() != "AS")):
            raise ValueError(f"{value!r} is not one image")
        self.base, self.global_arguments, self.arguments = words[0], self.arguments, {}

    def _arg(self, value: str) -> None:
        found: dict[str, str | None] = {}
        for word in split_words(value):
            name, equals, default = word.partition("=")
            if not _NAME.fullmatch(name):
                raise ValueError(f"{word!r} is not NAME or NAME=default")
            inherited = self.global_arguments.get(name, _platform_arguments().get(name))
            found[name] = self._expand(default) if equals else inherited
        self.arguments.update({name: content for name, content in found.items() if content is not None})
        if len(self.arguments) > MAX_VARIABLES:
            raise ValueError(f"more than {MAX_VARIABLES} arguments")

    def _user(self, value: str) -> None:
        user = self._expand(value)
        if not re.fullmatch(r"[\w.-]+(:[\w.-]+)?", user):
            raise ValueError(f"{value!r} is not a user, or user:group")
        if any(re.fullmatch("[0-9]+", part) and (len(part) > 10 or int(part) > MAX_ID) for part in user.split(":")):
            raise ValueError(f"{user[:80]!r}: a user's or group's number is at most {MAX_ID}")
        self.user = user

    def _shell(self, value: str) -> None:
        words = _json_words(value)
        if not words:
            raise ValueError(f"{value!r} is not a JSON list of words")
        self.shell = tuple(words)

    def _workdir(self, value: str) -> None:
        self.workdir = self._path(self._expand(value))
        self.steps.append(MakeDirectory(self.workdir))

    def _env(self, value: str) -> None:
        first = value.split(None, 1)
        if "=" not in first[0]:  # the old form: ENV NAME value with spaces
            if len(first) == 1:
                raise ValueError(f"{value!r} has no value")
            words = ["=".join(first)]
        else:
            words = split_words(value)
        found = {}
        for word in words:
            name, equals, content = word.partition("=")
            if not equals or not _NAME.fullmatch(name):
                raise ValueError(f"{word!r} is not NAME=value")
            found[name] = self._expand(content)  # by what held before this line
        env = self.env | found
        if len(env) > MAX_VARIABLES:
            raise ValueError(f"more than {MAX_VARIABLES} variables")
        if problem := too_large((), env):
            raise ValueError(problem)
        self.env = env

    def _run(self, value: str) -> None:
        if value.startswith("--"):
            raise ValueError(f"option {value.split()[0]} is not supported")
        words = _json_words(value) if value.startswith("[") else None
        env = {**self.arguments, **self.env}
        step = RunCommand(tuple(words or (*self.shell, value)), self.workdir, env, shell_form=not words, user=self.user)
        if problem := too_large(step.words, env):
            raise ValueError(problem)
        self.steps.append(step)

    def _add(self, value: str) -> None:
        if "://" in value or re.search(r"\.(tar(\.\w+)?|tgz|txz|tbz2?)(\s|\"|$)", value):
            raise ValueError("only local plain files are supported")
        self._copy(value)

    def _copy(self, value: str) -> None:
        words = _json_words(value) if value.startswith("[") else value.split()
        if words is None:
            raise ValueError(f"{value!r} is not a JSON list of words")
        mode = None
        while words and words[0].startswith("--"):
            option, _, content = words.pop(0).partition("=")
            if option == "--chmod":
                content = self._expand(content)
                if not re.fullmatch("[0-7]{1,4}", content):
                    raise ValueError(f"--chmod={content[:80]} is not an octal number, at most 7777")
                mode = int(content, 8)
            elif option not in ("--chown", "--link"):  # there is one owner of files in the sandbox
                raise ValueError(f"option {option} is not supported")
        if len(words) < 2:
            raise ValueError("needs a source and a destination")
        *sources, destination = (self._expand(word) for word in words)
        if self.context.ignores_files():
            raise ValueError("environment/.dockerignore is not supported")
        into_directory = destination.endswith("/") or destination in (".", "..") or len(sources) > 1
        files, links, directories = self.context.collect(sources, self._path(destination), into_directory)
        if mode is not None:
            files = {path: (content, mode) for path, (content, _) in files.items()}
        self.steps.append(CopyFiles(files, links, directories))

    def _path(self, name: str) -> str:
        path = posixpath.normpath(posixpath.join(self.workdir, name))
        if len(path.encode()) >= PATH_MAX:
            raise ValueError(f"{path[:80]}... is longer than a path can be ({PATH_MAX})")
        return path

    def _expand(self, text: str) -> str:
        return expanded(text, self._value)

    def _value(self, name: str) -> str | None:
        base = {"PATH": DEFAULT_PATH} if self.base else _platform_arguments()
        return self.env.get(name, self.arguments.get(name, base.get(name)))


def _platform_arguments() -> dict[str, str]:
    """What BuildKit sets when it is declared with ARG."""
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    names = {"OS": "linux", "ARCH": architecture, "PLATFORM": f"linux/{architecture}"}
    return {f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in names.items()}


def _json_words(text: str) -> list[str] | None:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    texts = isinstance(words, list) and all(isinstance(word, str) and _is_passable(word) for word in words)
    return words if texts else None


def _is_passable(word: str) -> bool:
    """Whether a program can be given it: JSON's escapes also write NUL and halves of characters."""
    return not re.search("[\0\ud800-\udfff]", word)
