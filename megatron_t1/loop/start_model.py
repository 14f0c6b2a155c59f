"""The model a run starts from is bound to the run: training goes on only from the very files it was started with.

Later phases read it again: the critic takes its first weights from it, exports its settings, everybody its tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.paths import MODEL_PATTERNS

TRUSTED_FROM_BYTES = 1 << 30  # a larger file is hashed again only when its size or modification time has changed
HASHING_THREADS = 8
LARGE_BYTES = 16 << 30  # to be read: longer than a user waits without being told


def describe(
    model_dir: Path,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    before_file: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """File name -> {"size", "mtime_ns", "sha256"} of a Hugging Face directory; empty where no config.json lies.

    Args:
        known: an earlier description, from which digests of large untouched files are taken.
        say: told once where much is to be read.
        before_file: called before each file is read; what it raises ends the reading.
    """
    if not (model_dir / "config.json").is_file() and not known:
        return {}
    known = known or {}

    def trusted(path: Path, facts: dict[str, Any]) -> bool:
        before = known.get(path.name, {})
        return facts["size"] >= TRUSTED_FROM_BYTES and all(before.get(name) == value for name, value in facts.items())

    def digest(path: Path) -> str:
        if trusted(path, found[path]):
            return known[path.name].get("sha256", "")
        before_file()
        return atomic.sha256_file(path)

    paths = sorted({path for pattern in MODEL_PATTERNS for path in model_dir.glob(pattern) if path.is_file()})
    found = {path: _facts(path) for path in paths}
    to_read = sum(facts["size"] for path, facts in found.items() if not trusted(path, facts))
    if to_read >= LARGE_BYTES:
        say(f"reading the start model, which the run is bound to: {to_read / 2**30:.0f} GiB in {model_dir}")
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return {
            path.name: {**found[path], "sha256": sha256}
            for path, sha256 in zip(paths, pool.map(digest, paths), strict=True)
        }


def _facts(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def differences(model_dir: Path, recorded: Mapping[str, Mapping[str, Any]], **reading: Any) -> list[str]:
    """A line for each file that is missing, was added or has another content than recorded; none where none is.

    Args:
        reading: `say` and `before_file` of `describe`.
    """
    if not recorded:
        return []
    now = describe(model_dir, recorded, **reading)
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
