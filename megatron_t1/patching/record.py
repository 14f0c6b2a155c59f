"""What was done to a checkout: `.t1-patches.json` in its root, with the original of every file that was changed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.tree import Tree

RECORD = ".t1-patches.json"
FORMAT = 1


@dataclass(frozen=True)
class AppliedPatch:
    """A patch that was applied.

    Attributes:
        name, digest: of its declaration; the digest is the SHA-256 of its patch.toml.
        files: those it changed.
    """

    name: str
    digest: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class PatchedFile:
    """A file as it was before all patches, and after them."""

    original: bytes
    patched: bytes


@dataclass(frozen=True)
class Record:
    """Everything needed to take patches back.

    Attributes:
        patches: in the order they were applied.
        files: by path relative to the root; every file that some patch changed.
    """

    patches: tuple[AppliedPatch, ...] = ()
    files: Mapping[str, PatchedFile] = field(default_factory=dict)

    def names(self) -> set[str]:
        return {patch.name for patch in self.patches}

    def encode(self) -> bytes | None:
        """The record file's content; None when nothing is applied and there is to be no file."""
        if not self.patches:
            return None
        content = {
            "format": FORMAT,
            "change": uuid.uuid4().hex,  # no two records are equal: the journal knows by it which one stands
            "about": "written by `t1 patch`; `t1 patch revert` needs it to bring the files back byte for byte",
            "patches": [vars(patch) | {"files": list(patch.files)} for patch in self.patches],
            "files": {
                name: {
                    "original_sha256": sha256(file.original),
                    "original_zlib_base64": pack(file.original),
                    "patched_sha256": sha256(file.patched),
                    "patched_zlib_base64": pack(file.patched),
                }
                for name, file in sorted(self.files.items())
            },
        }
        return (json.dumps(content, indent=2) + "\n").encode()


def read_record(tree: Tree) -> Record:
    """The record of a checkout; an empty one where there is none.

    Raises:
        PatchError: it is damaged, or of a later format.
    """
    if not tree.has(RECORD):
        return Record()
    try:
        return _decode(json.loads(tree.read(RECORD)))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, binascii.Error) as error:
        raise PatchError(
            f"the record of applied patches is damaged: {type(error).__name__}: {error}",
            where=str(tree.root / RECORD),
            remedy="bring the patched files back with git, then delete the record",
        ) from error


def _decode(content: dict[str, Any]) -> Record:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
    patches = tuple(AppliedPatch(p["name"], p["digest"], tuple(p["files"])) for p in content["patches"])
    files = {}
    for name, entry in content["files"].items():
        versions = {}
        for kind in ("original", "patched"):
            versions[kind] = unpack(entry[f"{kind}_zlib_base64"])
            if sha256(versions[kind]) != entry[f"{kind}_sha256"]:
                raise ValueError(f"the {kind} {name} doesn't have its checksum")
        files[name] = PatchedFile(**versions)
    return Record(patches, files)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))
