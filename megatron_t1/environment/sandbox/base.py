"""Base systems: what a Dockerfile's FROM stands for where no container engine pulls images.

A base is a directory with `root/`, a file system owned by the user that sandboxes run as, and `base.json`, which says
what is installed in it. `t1 tasks base` writes one. Without any, this host's own /usr is the base.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.errors import T1Error

ROOT, DESCRIPTION = "root", "base.json"
FORMAT = 1
PYTHON_FOLDERS = (
    "usr/lib/python3/dist-packages",
    "usr/lib/python3*/site-packages",
    "usr/local/lib/python3*/dist-packages",
    "usr/local/lib/python3*/site-packages",
)
# Name of a module that is imported first in a `try:`, so that it need not be there.
OPTIONAL_IMPORT = (
    r"^[ \t]*try:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*[ \t]+(?:import|from)[ \t]+([A-Za-z_]\w*)(?=[ \t.,\n])"
)
_NO_PROGRAMS = {"tests", "test", "testing", "__pycache__"}  # folders of packages that nobody imports
PROGRAM_FOLDERS = tuple(f"{place}/{name}" for place in ("usr", "usr/local", ".") for name in ("bin", "sbin"))


@dataclass(frozen=True)
class Inventory:
    """What a base has: lower-case package name -> version ("" where it is only provided by another one)."""

    apt: Mapping[str, str] = field(default_factory=dict)
    python: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Base:
    """Attributes: root: the file system; inventory: what is installed in it; host: whether it is this host's own."""

    root: Path
    inventory: Inventory
    name: str = ""

    @property
    def host(self) -> bool:
        return self.root == Path("/")


def base_for(image: str, config: SandboxConfig) -> Base:
    """What stands in for an image: the first pattern of env.sandbox.images that fits its name, else env.sandbox.base.

    Raises:
        T1Error: what is named there is no base.
    """
    for pattern, directory in config.images.items():
        if fnmatch.fnmatchcase(image, pattern):
            return load_base(directory)
    return load_base(config.base)


@cache
def load_base(directory: str) -> Base:
    """Read once in a process; "": this host.

    Raises:
        T1Error: the directory is no base, or its path can't be mounted.
    """
    if not directory:
        return Base(Path("/"), scan(Path("/")), "this host's /usr")
    path = Path(directory).resolve()
    try:
        description = json.loads((path / DESCRIPTION).read_text())
        inventory = Inventory(dict(description["apt"]), dict(description["python"]))
        if description["format"] != FORMAT or not (path / ROOT / "usr").is_dir():
            raise ValueError(f"format {description['format']!r}, expected {FORMAT}, with {ROOT}/usr")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise T1Error(
            f"this is no base system: {error}", where=str(path), remedy="make one with: t1 tasks base DIRECTORY"
        ) from error
    if re.search(r"[,:\\]", str(path)):
        raise T1Error("a base's path can't hold ',', ':' or '\\'", where=str(path), remedy="move it")
    return Base(path / ROOT, inventory, path.name)


def scan(root: Path) -> Inventory:
    """What is installed below `root`, from dpkg's status file and the metadata of Python packages."""
    return Inventory(_debian_packages(root / "var/lib/dpkg/status"), _python_packages(root))


def _debian_packages(status: Path) -> dict[str, str]:
    try:
        text = status.read_text(errors="replace")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.M))
        if fields.get("Status", "").endswith(" installed"):
            found[fields.get("Package", "")] = fields.get("Version", "")
            for provided in fields.get("Provides", "").split(","):
                if name := provided.split("(")[0].strip():
                    found.setdefault(name, "")
    return found


def _python_packages(root: Path) -> dict[str, str]:
    folders = [str(folder) for pattern in PYTHON_FOLDERS for folder in sorted(root.glob(pattern))]
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions(path=folders) if folders else ():
        if package.name:
            found.setdefault(python_name(package.name), package.version)
    return found


def python_name(name: str) -> str:
    """The normal form of a Python package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write_description(directory: Path, made_from: str) -> Inventory:
    """Scan `directory`/root and write base.json, complete or not at all."""
    inventory = scan(directory / ROOT)
    text = json.dumps(
        {"format": FORMAT, "made_from": made_from, "apt": dict(inventory.apt), "python": dict(inventory.python)},
        indent=1,
    )
    temporary = directory / f"{DESCRIPTION}.new"
    temporary.write_text(text + "\n")
    os.replace(temporary, directory / DESCRIPTION)
    return inventory


@cache
def programs_of(root: Path) -> frozenset[str]:
    """Names of the programs in the usual directories of a file system that doesn't change."""
    return frozenset(name for folder in PROGRAM_FOLDERS for name in _names(root / folder))


@cache
def modules_of(root: Path) -> frozenset[str]:
    """Top-level names that Python can import from packages installed in a file system that doesn't change, and those
    that these packages import where somebody has them (pandas: pyarrow)."""
    folders = [folder for pattern in PYTHON_FOLDERS for folder in root.glob(pattern)]
    found = {name.partition(".")[0] for folder in folders for name in _names(folder)}
    return frozenset(found.union(*map(_optional_imports, folders)))


def _optional_imports(folder: Path) -> set[str]:
    wanted, found = re.compile(OPTIONAL_IMPORT.encode(), re.MULTILINE), set()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NO_PROGRAMS]
        for name in files:
            with contextlib.suppress(OSError):
                if name.endswith(".py"):
                    found |= {module.decode() for module in wanted.findall(Path(place, name).read_bytes())}
    return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
