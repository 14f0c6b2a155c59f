"""What a task's test scripts say by their text alone: where they go, what they source and call, what pytest is given.

Nothing is run. Variables get the values that are written down in the scripts or in the verifier's environment; several
values give several readings of the text. What can't be told from text holds a "$" in the end.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_t1.environment.task import Files

TESTS = "/tests"
UNKNOWN = "$?"
_SHELL = (".sh", ".bash")
MAX_SCRIPT_BYTES = 256 << 10  # what is longer, or holds a NUL, is data
MAX_TEXT_BYTES = 8 << 20  # of all files together; shell scripts come first
MAX_READINGS = 8
MAX_DIRECTORIES = 64
MAX_PATH = 1024
ROUNDS = 4  # of values that name other variables
_INNER = r"\$\((?>[^()]+|\((?>[^()]+|\([^()]*\))*+\))*+\)|`[^`]*`"  # $(...), with two levels in it
_QUOTED = rf"\"(?>\\.|{_INNER}|[^\"\\])*+\"|'[^']*'"
_WORD = rf"(?:(?>{_QUOTED})[^\s;&|<>()\"'`]*|(?>{_INNER}|[^\s;&|<>()\"'`])++)"
_WORDS = re.compile(_WORD)
_COMMENT = re.compile(r"(\"(?:\\.|[^\"\\])*+\"|'[^']*')|(?:^|(?<=[\s;]))#.*")
_ASSIGNED = re.compile(rf"(?:^|[\s;&|(\"'`])([A-Za-z_]\w*)=(?!\()({_WORD})?", re.MULTILINE)
_LISTED = re.compile(r"\bfor\s+(\w+)\s+in\s+([^;\n]*)")
_READ = re.compile(r"\bread\b([^;|&\n<]*)")
_VARIABLE = re.compile(
    r"\$(?:\{(\w+)(?:\[[^\]\n]{0,64}\])?(?::?[-=]([^{}\n]{0,999})|([^{}\n]{0,999}))\}|([A-Za-z_]\w*|0))"
)
_SUBSTITUTION = re.compile(_INNER)
_DIRECTORY = re.compile(rf"(?:\b(?:cd|pushd)[ \t]|\s-C[ \t]|\s--chdir[ \t=])[ \t]*(?:-[LPe]+[ \t]+|--[ \t]+)*({_WORD})")
_CHANGE = re.compile(rf"\b(?:(?:cd|pushd)[ \t]+(?:-[LPe]+[ \t]+|--[ \t]+)*({_WORD})|popd\b)")
_SOURCED = re.compile(rf"(?:^|[\s;&|(){{\"'`])(?:source|\.)[ \t]+({_WORD})", re.MULTILINE)
_PROGRAM = re.compile(r"(?<![\w.+/-])(/?(?:[\w.+-]+/)*+(?<=bin/))[\w.+-]+")
_SEARCHED = re.compile(rf"\b(PATH|LD_LIBRARY_PATH)=({_WORD})")
_LOGIN = re.compile(
    r"\b(?:ba|da|z|k)?sh[ \t]+(?:-\w+[ \t]+)*(?:-\w*[il]\w*|--login)\b|(?:^|[\s;&|(])(?:su|sudo)\s", re.MULTILINE
)
_SEPARATOR = re.compile(r"[;&|\n(){}`]+")
_SHELLS = re.compile(r"([()])|[;&|\n{}`]+")  # the same, and where a subshell begins and ends
RUNS_PYTEST = re.compile(r"(?:^|[\s(/\"']|-m)(?:pytest|py\.test)(?=[\s;)\"']|$)")
NO_RUN = re.compile(r"\b(?:install|which|type|add)\b|command -v|--version|^\s*(?:echo|printf)\b")
# Options of pytest that a value follows.
_VALUED = {
    "-k", "-m", "-n", "-o", "-p", "-W", "-c", "-r", "--tb", "--ctrf", "--timeout", "--maxfail", "--junitxml",
    "--junit-xml", "--durations", "--color", "--capture", "--import-mode", "--basetemp", "--json-report-file", "--cov",
    "--override-ini", "--log-level", "--log-cli-level", "--log-file", "--verbosity", "--deselect", "--ignore",
    "--reruns", "--report-log", "--dist",
}  # fmt: skip
_PLACED = ("-c", "--config-file", "--rootdir", "--confcutdir")  # whose value is where pytest looks


@dataclass(frozen=True)
class Scripts:
    """What was found in all readings together; paths are absolute.

    Attributes:
        text: of all scripts as written, without comments.
        directories: what is changed to.
        lost: whether something is changed to that the text doesn't tell.
        sourced: files that run in the scripts' own shell.
        searched: directories put on PATH.
        called: directories of programs that are called by their path.
        libraries: directories put on LD_LIBRARY_PATH.
        login: whether a shell is started that reads its startup files.
        collected: directories and files, other than of the tests, in which pytest looks for tests and settings.
    """

    text: str
    directories: frozenset[str]
    lost: bool
    sourced: frozenset[str]
    searched: frozenset[str]
    called: frozenset[str]
    libraries: frozenset[str]
    login: bool
    collected: frozenset[str]


def texts(files: Files) -> dict[str, str]:
    """Test files other than Python's and data; a line that goes on in the next is one."""
    found, left = {}, MAX_TEXT_BYTES
    for name in sorted(files, key=lambda name: not name.endswith(_SHELL)):
        content = files[name][0]
        if not name.endswith(".py") and len(content) <= min(MAX_SCRIPT_BYTES, left) and b"\0" not in content:
            found[name] = content.decode(errors="replace").replace("\\\n", " ")
            left -= len(content)
    return found


def without_comments(script: str) -> str:
    return "\n".join(_COMMENT.sub(lambda match: match[1] or "", line) for line in script.splitlines())


def commands(text: str) -> list[str]:
    """The text cut where one simple command may end, whatever quotes say."""
    return _SEPARATOR.split(text)


def read_scripts(files: Files, env: Mapping[str, str], workdir: str) -> Scripts:
    """What the test scripts among a task's `files` say.

    Args:
        env: the verifier's environment; HOME is /root where it says nothing.
        workdir: where the verifier starts.
    """
    found = {name: without_comments(text) for name, text in texts(files).items()}
    scripts = [text for name, text in found.items() if _is_shells(name, files[name][0])]
    env = {"HOME": "/root", **env}
    values = _values(scripts, env, workdir)
    readings = [reading for script in scripts for reading in _readings(script, values, workdir)]
    directories, lost = _directories(readings, env["HOME"], workdir)
    lost = lost or any(name.endswith(_SHELL) and name not in found for name in files)
    bases = {workdir, *directories}

    def paths(words: Iterable[str]) -> frozenset[str]:
        told = {_home(word, env["HOME"]) for word in words if word and not _is_vague(word)}
        return frozenset(posixpath.normpath(posixpath.join(base, word)) for word in told for base in bases)

    def parts(variable: str) -> Iterator[str]:
        words = (word for reading in readings for name, word in _SEARCHED.findall(reading) if name == variable)
        return (part or "." for word in words for part in _plain(word, workdir).split(":"))

    sourced = paths(_plain(word, workdir) for reading in readings for word in _SOURCED.findall(reading))
    activated = {posixpath.dirname(file) for file in sourced if posixpath.basename(file).startswith("activate")}
    return Scripts(
        text="\n".join(found.values()),
        directories=frozenset(directories),
        lost=lost,
        sourced=sourced,
        searched=paths(parts("PATH")),
        called=paths(place for reading in readings for place in _PROGRAM.findall(reading)) | activated,
        libraries=paths(parts("LD_LIBRARY_PATH")),
        login=any(map(_LOGIN.search, readings)),
        collected=frozenset().union(*(_collected(reading, env["HOME"], workdir) for reading in readings)),
    )


def _is_shells(name: str, content: bytes) -> bool:
    if content.startswith(b"#!"):
        return re.search(rb"\b(?:ba|da|z|k)?sh\b", content[:100].partition(b"\n")[0]) is not None
    return name.endswith(_SHELL)


def _values(scripts: Sequence[str], env: Mapping[str, str], workdir: str) -> dict[str, list[str]]:
    """What each variable may hold."""
    values = {name: [value] for name, value in env.items()}
    for text in scripts:
        for name, word in _ASSIGNED.findall(text):
            found = values.setdefault(name, [])
            found.append(_without_itself(_plain(word, workdir), name, found[0] if found else ""))
        for name, words in _LISTED.findall(text):
            values.setdefault(name, []).extend(_plain(word, workdir) for word in _WORDS.findall(words))
        for name in (name for names in _READ.findall(text) for name in re.findall(r"(?<![-\w])[A-Za-z_]\w*", names)):
            values.setdefault(name, []).append(UNKNOWN)
    return {name: list(dict.fromkeys(found))[-MAX_READINGS:] for name, found in values.items()}


def _readings(script: str, values: Mapping[str, Sequence[str]], workdir: str) -> list[str]:
    """The script with its variables replaced: once for each value that one of them may have."""
    used = {match[1] or match[4] for match in _VARIABLE.finditer(script)}
    count = max((len(values[name]) for name in used if name in values), default=1)
    return list(dict.fromkeys(_reading(script, values, number, workdir) for number in range(count)))


def _without_itself(value: str, name: str, before: str) -> str:
    return _VARIABLE.sub(lambda match: before if name in (match[1], match[4]) else match[0], value)


def _reading(script: str, values: Mapping[str, Sequence[str]], number: int, workdir: str) -> str:
    def value(match: re.Match) -> str:
        name, default, operation = match[1] or match[4], match[2], match[3]
        if name in ("0", "BASH_SOURCE"):
            return TESTS if operation and "%" in operation else f"{TESTS}/test.sh"
        if name in ("PWD", "OLDPWD"):
            return workdir
        found = values.get(name) or ([default] if default is not None else [])
        return UNKNOWN if operation or not found else found[number % len(found)]

    text = script
    for _ in range(ROUNDS):
        replaced = _VARIABLE.sub(value, text)
        if replaced == text:
            break
        if len(replaced) > 4 * MAX_SCRIPT_BYTES:
            return _VARIABLE.sub(UNKNOWN, script)
        text = replaced
    return text


def _directories(readings: Sequence[str], home: str, workdir: str) -> tuple[set[str], bool]:
    """What is changed to, and whether some of it can't be told."""
    targets = dict.fromkeys(_plain(word, workdir) for reading in readings for word in _DIRECTORY.findall(reading))
    told = [_home(target, home) for target in targets if target not in ("", "-") and not _is_vague(target)]
    absolute = list(dict.fromkeys(posixpath.normpath(target) for target in told if target.startswith("/")))
    found = set(absolute[:MAX_DIRECTORIES])
    if len(absolute) > MAX_DIRECTORIES:
        return found, True
    for target in told:
        if not target.startswith("/"):
            found |= {posixpath.normpath(posixpath.join(base, target)) for base in (workdir, *found)}
        if len(found) > MAX_DIRECTORIES:
            return found, True
    return found, any(map(_is_vague, targets))


def _collected(text: str, home: str, workdir: str) -> Iterator[str]:
    """What pytest is pointed to outside of the tests."""
    here, before, outer = workdir, workdir, []
    for command in filter(None, _SHELLS.split(_SUBSTITUTION.sub(lambda match: _substituted(match[0], workdir), text))):
        if command == "(":
            outer.append((here, before))
        elif command == ")":
            here, before = outer.pop() if outer else (here, before)
        if change := _CHANGE.search(command):
            target = _home(_plain(change[1] or "-", workdir), home)
            lost = _is_vague(target) or len(here) > MAX_PATH
            moved = before if target == "-" else workdir if lost else posixpath.normpath(posixpath.join(here, target))
            here, before = moved, here
        run = RUNS_PYTEST.search(command)
        if run and not NO_RUN.search(command):
            for target in _targets(command[run.end() :]) or ["."]:
                place = here if _is_vague(target) else posixpath.normpath(posixpath.join(here, _home(target, home)))
                if not is_in(place, TESTS):
                    yield place


def _targets(arguments: str) -> list[str]:
    """What pytest is told to look at."""
    found = []
    words = (_plain(match[0], "") for match in _WORDS.finditer(arguments.split("<")[0].split(">")[0]))
    for word in words:
        name, equals, value = word.partition("=")
        if name in _PLACED:
            found.append(value if equals else next(words, ""))
        elif word in _VALUED:
            next(words, "")
        elif word and word != "pytest" and not word.startswith("-") and not word.isdigit():
            found.append(word.partition("::")[0])
    return found


def _plain(word: str, workdir: str) -> str:
    """A word without its quotes, and with what its $(...) most likely are."""
    text = _SUBSTITUTION.sub(lambda match: _substituted(match[0], workdir), word)
    return text.replace('"', "").replace("'", "")


def _substituted(command: str, workdir: str) -> str:
    if re.search(r"BASH_SOURCE|\$\{?0|/tests/test\.sh|\bmktemp\b", command):
        return TESTS  # or a new directory, which nobody has written to
    return workdir if re.fullmatch(r"(?:\$\(|`)\s*pwd(?:\s+-[LP])?\s*(?:\)|`)", command) else UNKNOWN


def _home(target: str, home: str) -> str:
    return home + target[1:] if target == "~" or target.startswith("~/") else target


def _is_vague(target: str) -> bool:
    return any(sign in target for sign in "$*?[{")


def is_in(path: str, folder: str) -> bool:
    return path == folder or folder == "/" or path.startswith(f"{folder}/")
