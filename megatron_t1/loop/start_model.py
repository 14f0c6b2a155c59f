"""The model a run starts from is bound to the run: training goes on only from the very files it was started with.

Later phases read it again: the critic takes its first weights from it, exports its settings, everybody its tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_t1 import atomic

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")  # weights, settings, tokenizer
TRUSTED_FROM_BYTES = 1 << 30  # a larger file is hashed again only when its size or modification time has changed
HASHING_THREADS = 8


def describe(model_dir: Path, known: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """File name -> {"size", "mtime_ns", "sha256"} of a Hugging Face directory; empty where no config.json lies.

    Args:
        known: an earlier description, from which digests of large untouched files are taken.
    """
    if not (model_dir / "config.json").is_file() and not known:
        return {}
    known = known or {}

    def described(path: Path) -> dict[str, Any]:
        status = path.stat()
        facts = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        before = known.get(path.name, {})
        untouched = all(before.get(name) == value for name, value in facts.items())
        if untouched and status.st_size >= TRUSTED_FROM_BYTES:
            return {**facts, "sha256": before.get("sha256", "")}
        return {**facts, "sha256": atomic.sha256_file(path)}

    paths = sorted({path for pattern in PATTERNS for path in model_dir.glob(pattern) if path.is_file()})
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip([path.name for path in paths], pool.map(described, paths), strict=True))


def differences(model_dir: Path, recorded: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each file that is missing, was added or has another content than recorded; none where none is."""
    if not recorded:
        return []
    now = describe(model_dir, recorded)
    problems = []
    for name in sorted(recorded.keys() | now.keys()):
        if name not in now:
            problems.append(f"{name} is missing")
        elif name not in recorded:
            problems.append(f"{name} was added")
        elif now[name]["sha256"] != recorded[name].get("sha256"):
            before, found = str(recorded[name].get("sha256"))[:16], now[name]["sha256"][:16]
            problems.append(f"{name} has the SHA-256 {found}..., the run was started with {before}...")
    return problems
