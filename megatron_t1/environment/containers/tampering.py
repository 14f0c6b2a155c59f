"""What an agent changed in its container that the verifier would run on.

A container's whole root belongs to the agent, its interpreter and programs included. The verifier starts in a new
container on what the agent left, with nothing of its processes; what remains is files. Files that the image brought to
system directories must be as they were, and nothing new may take their place. An agent may add programs and packages of
its own; what this module names makes the verdict untrusted, so that tampering gains nothing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_t1.environment.sandbox.base import OPTIONAL_IMPORT

ADDED, CHANGED, REMOVED = "A", "C", "D"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
UNUSED = ("/usr/share/doc", "/usr/share/man", "/usr/share/info", "/usr/share/locale")
LOADER = ("/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.cache")
_STARTUP = re.compile(r"(?:.*\.pth|(?:site|user)customize\.py|entry_points\.txt)")
# What programs load code from, or are told by which code to load; and what links of /usr lead to (ImageFacts.settings).
_SETTINGS = re.compile(
    r"/etc/(?:python[\d.]*|perl|alternatives|crypto-policies|(?:ssl|pki/tls)/openssl\.(?:cnf|d))(?:/.*)?"
)
_DATA = ("/etc/ssl/certs", "/etc/ssl/private", "/etc/pki/ca-trust", "/etc/environment", "/etc/localtime", "/etc/X11")

# Prints, NUL-ended: "workdir PATH" without links, "path DIRECTORY", "program NAME", and of the python that the tests
# would find: "python DIRECTORY", "module NAME" (there, or looked for by what is there); and "setting PATH" for what
# links of /usr lead to in /etc. To be run in the untouched image.
FACTS_SCRIPT = r"""
builtin printf 'workdir %s\0' "$(builtin pwd -P)"
IFS=:
for folder in $PATH; do
    builtin printf 'path %s\0' "$folder"
    for file in "$folder"/*; do [ -x "$file" ] && [ ! -d "$file" ] && builtin printf 'program %s\0' "${file##*/}"; done
done
python3 -I -c '
import os, re, sys
optional = re.compile(br"OPTIONAL_IMPORT", re.M)
for folder in filter(os.path.isdir, sys.path):
    print("python " + folder, end="\0")
    for name in os.listdir(folder):
        print("module " + name.split(".")[0], end="\0")
    if not folder.endswith("-packages"):
        continue
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("tests", "test", "testing")]
        for name in files:
            if name.endswith(".py"):
                for module in optional.findall(open(os.path.join(place, name), "rb").read()):
                    print("module " + module.decode(), end="\0")
' 2>/dev/null
shopt -s globstar nullglob
for file in /usr/lib/{*,python*/*,ssl/*,jvm/*/conf/**}; do
    [ -L "$file" ] && target=$(readlink -m "$file") && [ "${target#/etc/}" != "$target" ] &&
        builtin printf 'setting %s\0' "$target"
done
exit 0
""".replace("OPTIONAL_IMPORT", OPTIONAL_IMPORT)


@dataclass(frozen=True)
class ImageFacts:
    """What an untouched image would run.

    Attributes:
        path: directories of PATH.
        programs: names of executables in them.
        python: directories that its python3 imports from.
        modules: top-level names there.
        settings: what links of /usr lead to in /etc.
        workdir: its working directory, without links.
    """

    path: tuple[str, ...] = ()
    programs: frozenset[str] = frozenset()
    python: tuple[str, ...] = ()
    modules: frozenset[str] = frozenset()
    settings: tuple[str, ...] = ()
    workdir: str = ""

    @classmethod
    def parse(cls, output: bytes) -> ImageFacts:
        """From the output of FACTS_SCRIPT."""
        found: dict[str, list[str]] = {
            name: [] for name in ("workdir", "path", "program", "python", "module", "setting")
        }
        for line in output.decode(errors="replace").split("\0"):
            kind, _, value = line.partition(" ")
            if value:
                found.setdefault(kind, []).append(value)
        path, python = dict.fromkeys(found["path"]), dict.fromkeys(found["python"])
        settings = tuple(place for place in found["setting"] if not _inside(place, _DATA))
        programs, modules = frozenset(found["program"]), frozenset(found["module"])
        return cls(tuple(path), programs, tuple(python), modules, settings, "".join(found["workdir"][:1]))


def parse_diff(text: str) -> list[tuple[str, str]]:
    """`diff` of an engine as (kind, path); a changed directory whose content is listed too is left out."""
    entries = [(line[0], line[2:]) for line in text.splitlines() if line[:2] in ("A ", "C ", "D ")]
    parents = {posixpath.dirname(path) for _, path in entries}
    return [(kind, path) for kind, path in entries if kind != CHANGED or path not in parents]


def suspicious(entries: Iterable[tuple[str, str]], facts: ImageFacts, workdir: str) -> list[tuple[str, str]]:
    """Those entries of `parse_diff` that bear on what the verifier runs.

    A changed entry may still be a directory whose own permissions or times changed: the caller looks.

    Args:
        workdir: the task's; a program or package directory inside it is the agent's to change.
    """
    own = tuple(folder for folder in (*facts.path, *facts.python) if workdir == "/" or not _inside(folder, (workdir,)))
    system = (*SYSTEM, *own)
    found = []
    for kind, path in entries:
        folder, name = posixpath.split(path)
        if "/__pycache__" in path or _inside(path, UNUSED):
            continue  # the verifier's Python reads no compiled files that lie there
        if _inside(path, LOADER) or _SETTINGS.fullmatch(path) or _inside(path, facts.settings):
            found.append((kind, path))
        elif kind != ADDED and _inside(path, system):
            found.append((kind, path))
        elif kind == ADDED and folder in own and folder in facts.path and name in facts.programs:
            found.append((kind, path))
        elif kind == ADDED and _inside(path, tuple(set(own) & set(facts.python))):
            shadows = folder in facts.python and name.split(".")[0] in facts.modules
            if shadows or _STARTUP.fullmatch(name):
                found.append((kind, path))
    return found


def describe(entries: Sequence[tuple[str, str]]) -> str:
    """One line for a verdict's reason."""
    words = {ADDED: "added", CHANGED: "changed", REMOVED: "removed"}
    shown = ", ".join(f"{path} ({words[kind]})" for kind, path in entries[:5])
    more = f" and {len(entries) - 5} more" if len(entries) > 5 else ""
    return f"the agent changed what the verifier runs on: {shown}{more}"


def _inside(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
