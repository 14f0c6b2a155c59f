"""RUN lines that ask a package index for something the base system already has.

A sandbox has no network, so `apt-get install python3-pip` would fail however well the base was prepared. Such commands
are found in a shell line by splitting it at its operators, checked against what the base has, and replaced by `:` (do
nothing); one that asks for anything else is refused. Commands in forms that aren't understood here stay as they are:
the real program then runs, and can succeed without an index.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Callable, Iterator

from megatron_t1.environment.sandbox.base import Inventory, python_name

_APT = {"apt-get", "apt", "aptitude"}
_APT_NOTHING = {"update", "upgrade", "dist-upgrade", "clean", "autoclean", "autoremove"}  # about the index alone
_APT_VALUES = {"-o", "--option", "-t", "--target-release", "-c", "--config-file"}
_PIP = re.compile(r"pip(\d(\.\d+)?)?|uv")
_PIP_FLAGS = {
    "--no-cache-dir", "--break-system-packages", "--no-input", "--quiet", "-q", "--upgrade", "-U", "--user", "--system",
    "--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore", "--no-compile",
    "--no-deps", "--prefer-binary", "--pre",
}  # fmt: skip
_PIP_VALUES = {
    "-i",
    "--index-url",
    "--extra-index-url",
    "--timeout",
    "--default-timeout",
    "--retries",
    "--trusted-host",
}
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "sudo", "time"}
_OPERATOR = re.compile(r"&&|\|\||[;&|\n()]")


class PackagesMissing(ValueError):
    """A command asks for packages that the base doesn't have; the message names command and packages."""


def satisfied(line: str, inventory: Inventory) -> str:
    """The shell line without what the base already satisfies.

    Raises:
        PackagesMissing: it asks for more.
    """
    kept, end = [], 0
    for start, stop in _commands(line):
        text = line[start:stop]
        words = _words(text)
        lacking = None if words is None else _lacking(words, inventory)
        if lacking is None:
            continue
        if lacking:
            raise PackagesMissing(f"{text.strip()!r}: the base has no {', '.join(lacking)}")
        prefix = len(text) - len(text.lstrip())
        suffix = len(text) - len(text.rstrip())
        kept += [line[end : start + prefix], *_prefix(text), ":", text[len(text) - suffix :]]
        end = stop
    return "".join([*kept, line[end:]])


def _commands(line: str) -> Iterator[tuple[int, int]]:
    """Spans of what stands between operators outside quotes; none at all where a here-document makes that unsure."""
    if "<<" in line:
        return
    start = position = 0
    quote = ""
    while position < len(line):
        character = line[position]
        if character == "\\" and quote != "'":
            position += 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"`":
            quote = character
        elif operator := _OPERATOR.match(line, position):
            redirects = character == "&" and ">" in (line[position - 1 : position], line[position + 1 : position + 2])
            if not redirects:
                yield start, position
                start = operator.end()
            position = operator.end()
            continue
        position += 1
    yield start, len(line)


def _words(command: str) -> list[str] | None:
    """The words of a simple command without keywords and assignments before it; None: it can't be read this way."""
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError:
        return None
    while words and (words[0] in _KEYWORDS or re.match(r"[A-Za-z_]\w*=", words[0])):
        words.pop(0)
    return [word for word in words if not re.fullmatch(r"\d?>+(&\d|/dev/null)|&>/dev/null", word)]


def _prefix(command: str) -> list[str]:
    """Shell keywords that have to stay before the replacement."""
    found = []
    for word in command.split():
        if word not in _KEYWORDS - {"sudo", "time"}:
            break
        found.append(f"{word} ")
    return found


def _lacking(words: list[str], inventory: Inventory) -> list[str] | None:
    """Packages that the command asks for and the base lacks; None: it is no such command, or one not understood."""
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if program in _APT:
        return _apt_lacking(words[1:], inventory)
    if re.fullmatch(r"python[\d.]*", program) and words[1:3] == ["-m", "pip"]:
        program, words = "pip", words[2:]
    if program == "uv" and words[1:2] == ["pip"]:
        words = words[1:]
    return _pip_lacking(words[1:], inventory) if _PIP.fullmatch(program) else None


def _apt_lacking(words: list[str], inventory: Inventory) -> list[str] | None:
    names = _operands(words, _APT_VALUES, lambda option: True)
    if not names:
        return None
    if names[0] in _APT_NOTHING:
        return []
    if names[0] not in ("install", "reinstall"):
        return None
    return [name for name in names[1:] if not _has_debian(name, inventory)]


def _has_debian(asked: str, inventory: Inventory) -> bool:
    name, _, version = asked.partition("=")
    have = inventory.apt.get(name.partition("/")[0].partition(":")[0])
    return have is not None and (not version or fnmatch.fnmatchcase(have, version))


def _pip_lacking(words: list[str], inventory: Inventory) -> list[str] | None:
    known = _operands(words, _PIP_VALUES, lambda option: option in _PIP_FLAGS)
    if not known or known[0] != "install" or len(known) == 1:
        return None
    lacking = []
    for asked in known[1:]:
        has = _has_python(asked, inventory)
        if has is None:
            return None  # a path, an address: the real program decides
        lacking += [] if has else [asked]
    return lacking


def _has_python(asked: str, inventory: Inventory) -> bool | None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(asked)
    except InvalidRequirement:
        return None
    have = inventory.python.get(python_name(requirement.name))
    return have is not None and requirement.url is None and requirement.specifier.contains(have, prereleases=True)


def _operands(words: list[str], with_value: set[str], known: Callable[[str], bool]) -> list[str] | None:
    """Words that are no options; None: an option that isn't known."""
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word in with_value:
            rest = rest[1:]
        elif word.startswith("-"):
            if not known(word) and word.partition("=")[0] not in with_value:
                return None
        else:
            found.append(word)
    return found
