"""What the agent left where the verifier's programs and modules are looked for: for every backend, by paths alone.

Whatever the verifier imports, loads or runs by name has to come from the protected system or from the tests. The
backends protect the system; what remains are directories that an agent may write to and that a task's own settings put
on PATH or on Python's import path: PYTHONPATH, and the working directory, which `python -m`, `python -c` and a script
on standard input search before anything else. Whether a test.sh starts Python like that can't be told from its text
(variables, other scripts), so any mention of Python counts.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_t1.environment.sandbox.interface import Change
from megatron_t1.environment.task import DEFAULT_WORKDIR, Task
from megatron_t1.errors import T1Error

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/tests")  # looked after by the backends
OPENING = {"link", "closed", "other", ""}  # kinds of entries that may stand for a directory whose content isn't listed
_IMPORTABLE = (".py", ".pyc", ".so", ".pyd")
_METADATA = (".dist-info", ".egg-info", ".egg")
_STARTUP = {"sitecustomize", "usercustomize"}
_PYTEST = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup"}
# Modules of the standard library that nothing imports by itself, whose names programs like to have.
_UNUSED = {"test", "tests", "this", "antigravity", "idlelib", "turtledemo", "__main__"}
_PYTHON = re.compile(r"(?<![\w.-])(?:python|pypy|coverage|ipython|tox|nox|py(?=\s))[\w.]*", re.IGNORECASE)
_COMMENT = re.compile(r"(?:^|\s)#(?!!).*|^#!.*")
_CHANGES_DIRECTORY = re.compile(r"(?:\b(?:cd|pushd)|\s-C)\s+(?:--\s+)?[\"']?([\w./][^\s;&|\"')]*)")
_WORD = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class Exposed:
    """Directories outside of the system that the verifier looks into.

    Attributes:
        imports: where modules are found before those of the system.
        sites: those of them that Python knows from its start, so that sitecustomize.py counts too.
        path: of PATH.
        workdir: where the verifier starts; programs in it are the agent's to change.
        words: in the task's scripts.
    """

    imports: frozenset[str]
    sites: frozenset[str]
    path: frozenset[str]
    workdir: str
    words: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.imports or self.path)

    def planted(
        self, changes: Iterable[Change], programs: Iterable[str] = (), modules: Iterable[str] = ()
    ) -> list[str]:
        """Paths of changes that take the place of a program or module, or that Python or pytest loads by itself.

        Args:
            programs, modules: names that the system has; of modules those of Python and pytest are known.
        """
        changes = list(changes)
        parents = {folder for change in changes if change.kind != "removed" for folder in _parents(change.path)}
        shadowed = ({*sys.stdlib_module_names, *_PYTEST, *modules} | _STARTUP) - _UNUSED
        commands = {*programs, *self.words}
        return [
            change.path
            for change in changes
            if self._moves_a_place(change, parents)
            or any(self._is_imported(change, place, shadowed, parents) for place in self.imports)
            or any(self._is_run(change, place, commands, set(programs)) for place in self.path)
        ]

    def _moves_a_place(self, change: Change, parents: set[str]) -> bool:
        """A directory that is looked into, or one above it, became a link, or one whose content can't be seen."""
        if change.kind == "removed" or change.path in parents:
            return False
        places = self.imports | self.path
        above = any(place == change.path or place.startswith(f"{change.path}/") for place in places)
        return above and (change.entry in OPENING or change.entry == "file")

    def _is_imported(self, change: Change, place: str, shadowed: set[str], parents: set[str]) -> bool:
        inner = _below(change.path, place)
        if not inner or change.kind == "removed":
            return False
        first, _, rest = inner.partition("/")
        hidden = not rest and change.entry in OPENING and change.path not in parents
        if first.endswith(_METADATA):
            return hidden or posixpath.basename(inner) == "entry_points.txt"
        if place in self.sites and (first == "pyvenv.cfg" or first.endswith(".pth")):
            return True
        name = first.partition(".")[0]
        if name not in shadowed or (name in _STARTUP and place not in self.sites):
            return False
        if change.kind != "added":
            return change.entry in ("link", "closed")
        if not rest:
            return first.endswith(_IMPORTABLE) or (hidden and "." not in first)
        if "/" in rest:
            return False
        return rest.partition(".")[0] == "__init__" and (rest.endswith(_IMPORTABLE) or change.entry in OPENING)

    def _is_run(self, change: Change, place: str, commands: set[str], programs: set[str]) -> bool:
        inner = _below(change.path, place)
        virtual = posixpath.dirname(place) if posixpath.basename(place) in ("bin", "sbin") else ""
        if inner and "/" not in inner:
            if _is_in(place, self.workdir):
                return change.kind != "removed" and inner in programs
            return inner in commands or change.kind != "added"
        if not virtual or virtual == "/" or _is_in(place, self.workdir):
            return False
        inner = _below(change.path, virtual)
        if not inner or "/__pycache__/" in change.path or not (inner == "pyvenv.cfg" or inner.startswith("lib")):
            return False
        return (
            change.kind != "added"
            or change.entry in ("link", "closed")
            or inner.endswith((".pth", "pyvenv.cfg", "entry_points.txt"))
            or posixpath.basename(inner).partition(".")[0] in _STARTUP
        )


def exposed(task: Task, env: Mapping[str, str], workdir: str = "") -> Exposed:
    """What of the verifier's search paths lies outside of the system.

    Args:
        env: the verifier's environment.
        workdir: where the verifier starts; "": the image's working directory.
    """
    scripts = _scripts(task)
    text = "\n".join(_COMMENT.sub("", line) for script in scripts for line in script.splitlines())
    try:
        workdir = workdir or task.image.workdir
    except T1Error:  # a Dockerfile that only a container engine can follow
        workdir = task.workdir or DEFAULT_WORKDIR
    sites = {_plain(entry, workdir) for entry in env.get("PYTHONPATH", "").split(":") if entry}
    imports = set(sites)
    if _PYTHON.search(text) or "PYTHONPATH" in env or any("PYTHONPATH" in script for script in scripts):
        imports |= {workdir, *(_plain(place, workdir) for place in _CHANGES_DIRECTORY.findall(text))}
    path = {_plain(entry, workdir) for entry in env.get("PATH", "").split(":") if "PATH" in env}
    return Exposed(
        frozenset(place for place in imports if not _is_system(place)),
        frozenset(place for place in sites if not _is_system(place)),
        frozenset(place for place in path if not _is_system(place)),
        workdir,
        frozenset(_WORD.findall(text)),
    )


def describe_planted(paths: list[str]) -> str:
    """One line for a verdict's reason; "" for no paths."""
    if not paths:
        return ""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"the agent left {', '.join(paths[:3])}{more}, which takes the place of a program or of a part of Python or "
        "pytest when the tests run"
    )


def _scripts(task: Task) -> list[str]:
    """The task's test files other than Python's, as text."""
    return [
        content.decode(errors="replace") for name, (content, _) in task.test_files().items() if not name.endswith(".py")
    ]


def _plain(entry: str, workdir: str) -> str:
    """A directory of a search path; an empty or relative one means the working directory."""
    path = posixpath.normpath(posixpath.join("/", workdir, entry))
    return f"/{path.lstrip('/')}"


def _is_system(place: str) -> bool:
    return any(_is_in(place, folder) for folder in SYSTEM)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or folder == "/" or path.startswith(f"{folder}/")


def _below(path: str, place: str) -> str:
    """The part of a path below a directory; "" where it isn't."""
    prefix = f"{place.rstrip('/')}/"
    return path.removeprefix(prefix) if path.startswith(prefix) else ""


def _parents(path: str) -> Iterable[str]:
    while (path := posixpath.dirname(path)) not in ("/", ""):
        yield path
