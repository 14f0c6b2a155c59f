"""What a patch is: patches/NAME/patch.toml, read and checked. The format is described in patches/README.md."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from megatron_t1.patching.errors import DeclarationError
from megatron_t1.resources import resource_dir

DECLARATION = "patch.toml"
SIGNS = ("call", "assigns", "parameter", "fingerprint")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OPERATIONS = ("insert", "replace", "add_parameter", "add_argument", "wrap")


@dataclass(frozen=True)
class Place:
    """Which statements or expressions of a target are meant; keys narrow each other."""

    says: str
    fingerprints: tuple[str, ...] = ()
    call: str = ""
    argument: int | str | None = None
    returns: bool = False
    binds: str = ""
    assigns: str = ""
    outermost: bool = False  # the statement of the target's own body around it
    count: int = 1  # 0: one or more


@dataclass(frozen=True)
class Edit:
    """One operation at one place of one file; exactly one of the operations is set."""

    file: str
    target: str
    insert: str = ""
    replace: bool = False
    add_parameter: str = ""
    add_argument: str = ""
    wrap: str = ""
    lines: str = ""
    parameters: tuple[str, ...] = ()
    place: Place | None = None
    capture: dict[str, str] = dataclasses.field(default_factory=dict)
    present: tuple[tuple[str, str], ...] = ()
    strengthens: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Variant:
    """The edits for one shape of the source."""

    versions: SpecifierSet
    range: str  # the same, as written
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Patch:
    """One folder of patches/."""

    name: str
    title: str
    why: str
    upstream: str
    drop: str
    variants: tuple[Variant, ...]
    requires: tuple[str, ...]
    digest: str  # SHA-256 of patch.toml

    @property
    def versions(self) -> str:
        return " or ".join(variant.range for variant in self.variants)

    def variants_for(self, version: Version | None) -> list[Variant]:
        """The variants to try, in order.

        A pre-release (a snapshot of main) may still look like the release before it; a tree without a version may be
        any. There, every variant is a candidate and the places decide.
        """
        if version is None:
            return list(self.variants)
        fitting = [variant for variant in self.variants if Version(version.base_version) in variant.versions]
        if version.is_prerelease and version.minor:
            before = Version(f"{version.major}.{version.minor - 1}.99")
            fitting += [variant for variant in self.variants if before in variant.versions and variant not in fitting]
        return fitting


def load_patches(directory: str | Path | None = None) -> dict[str, Patch]:
    """All patches of a directory (default: those shipped), by name, each after what it requires.

    Raises:
        DeclarationError: a file is malformed, or patches require each other in a circle.
    """
    root = resource_dir("patches") if directory is None else Path(directory)
    found = {path.parent.name: load_patch(path) for path in sorted(root.glob(f"*/{DECLARATION}"))}
    if not found:
        raise DeclarationError(f"no patches in {root}", where=f"{root}/NAME/{DECLARATION}")
    ordered: dict[str, Patch] = {}

    def add(name: str, asked_by: tuple[str, ...]) -> None:
        if name in asked_by:
            raise DeclarationError(f"patches require each other: {' -> '.join((*asked_by, name))}", where=str(root))
        if name not in found:
            raise DeclarationError(f"{asked_by[-1]} requires {name}, which isn't there", where=str(root))
        for required in found[name].requires:
            add(required, (*asked_by, name))
        ordered.setdefault(name, found[name])

    for name in found:
        add(name, ())
    return ordered


def load_patch(path: str | Path) -> Patch:
    """Read one patch.toml.

    Raises:
        DeclarationError: what is wrong, and where.
    """
    path = Path(path)
    data = path.read_bytes()
    reader = _Reader(path)
    try:
        content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise reader.error(str(error)) from error
    if not _NAME.fullmatch(path.parent.name):
        raise reader.error(f"the folder name {path.parent.name!r} isn't lower_case_with_underscores")
    reader.keys(content, {"title", "why", "upstream", "drop", "variants"}, {"requires"}, "")
    variants = tuple(reader.variant(table, f"variants[{i}]") for i, table in enumerate(content["variants"]))
    if not variants:
        raise reader.error("no variants")
    return Patch(
        name=path.parent.name,
        **{key: reader.text(content, key, "") for key in ("title", "why", "upstream", "drop")},
        variants=variants,
        requires=tuple(content.get("requires", ())),
        digest=hashlib.sha256(data).hexdigest(),
    )


@dataclass(frozen=True)
class _Reader:
    path: Path

    def error(self, problem: str, where: str = "") -> DeclarationError:
        return DeclarationError(problem, where=f"{self.path}{f': {where}' if where else ''}")

    def keys(self, table: Any, needed: set[str], allowed: set[str], where: str) -> None:
        if not isinstance(table, dict):
            raise self.error("a table is expected", where)
        if missing := needed - set(table):
            raise self.error(f"missing: {', '.join(sorted(missing))}", where)
        if unknown := set(table) - needed - allowed:
            raise self.error(f"unknown: {', '.join(sorted(unknown))}", where)

    def text(self, table: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} isn't text", where)
        return value.strip() if key != "lines" else value

    def variant(self, table: Any, where: str) -> Variant:
        self.keys(table, {"versions", "edits"}, set(), where)
        try:
            versions = SpecifierSet(table["versions"])
        except InvalidSpecifier as error:
            raise self.error(str(error), where) from error
        edits = tuple(self.edit(edit, f"{where}.edits[{i}]") for i, edit in enumerate(table["edits"]))
        return Variant(versions, table["versions"], edits)

    def edit(self, table: Any, where: str) -> Edit:
        others = {field.name for field in dataclasses.fields(Edit)} - {"file", "target"}
        self.keys(table, {"file", "target"}, others, where)
        operations = [key for key in _OPERATIONS if table.get(key)]
        if len(operations) != 1:
            raise self.error(f"one operation of {', '.join(_OPERATIONS)} is expected", where)
        operation, file = operations[0], PurePosixPath(self.text(table, "file", where))
        if file.is_absolute() or ".." in file.parts or not file.parts:
            raise self.error(f"file {file} isn't a path inside the checkout", where)
        place = self.place(table["place"], f"{where}.place") if "place" in table else None
        at = table.get("insert", "")
        if operation == "insert" and at not in ("start", "end", "before", "after"):
            raise self.error(f"insert={at!r}: start, end, before or after", where)
        if (place is None) != (operation == "add_parameter" or at in ("start", "end")):
            raise self.error(f"{operation} {at} needs {'parameters, not a place' if place else 'a place'}", where)
        if place is None and "parameters" not in table:
            raise self.error("parameters says which ones the target must have (none: [])", where)
        if (operation in ("insert", "replace")) != bool(table.get("lines")):
            raise self.error("lines go with insert and replace, and with nothing else", where)
        if operation == "wrap" and "$expression" not in table["wrap"]:
            raise self.error("wrap has no $expression", where)
        if operation == "add_argument" and not (place and place.call):
            raise self.error("add_argument needs place.call", where)
        if operation in ("add_parameter", "add_argument") and not re.fullmatch(r"\w+\s*=.+", table[operation]):
            raise self.error(f"{operation} isn't name=value", where)
        present = tuple(self.sign(sign, f"{where}.present") for sign in table.get("present", ()))
        if table.get("capture") and not (place and place.fingerprints):
            raise self.error("capture needs place.fingerprints", where)
        return Edit(
            **{
                **table,
                "file": str(file),
                "place": place,
                "present": present,
                "parameters": tuple(table.get("parameters", ())),
            }
        )

    def place(self, table: Any, where: str) -> Place:
        self.keys(table, {"says"}, {field.name for field in dataclasses.fields(Place)} - {"says"}, where)
        if set(table) <= {"says", "count", "outermost"}:
            raise self.error("it names nothing", where)
        if "argument" in table and "call" not in table:
            raise self.error("argument needs call", where)
        for fingerprint in table.get("fingerprints", ()):
            if not re.fullmatch(r"[0-9a-f]{16}", fingerprint):
                raise self.error(f"{fingerprint!r} isn't a fingerprint (16 hexadecimal digits)", where)
        return Place(**{**table, "fingerprints": tuple(table.get("fingerprints", ()))})

    def sign(self, table: Any, where: str) -> tuple[str, str]:
        if not isinstance(table, dict) or len(table) != 1 or next(iter(table)) not in SIGNS:
            raise self.error(f"a sign is one of {', '.join(SIGNS)}", where)
        return next(iter(table.items()))
