"""What a phase tells the loop: one result file, written last and atomically.

A phase that exits 0 without a result has failed. It lists every file the phase wrote, with the digest computed by the
process that wrote it, while it did. The loop compares names, sizes and the digests of small files, so that it never
reads terabytes; the phase that reads the large ones compares theirs first (`require_recorded`).
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1 import atomic, sealed
from megatron_t1.errors import IncompleteError
from megatron_t1.paths import RunPaths, within

RESULT_FILE = "result.json"
RESULT_VERSION = 2
SMALL_BYTES = 1 << 20  # files whose digests the loop itself compares: markers, settings, summaries
HASHING_THREADS = 8


@dataclass
class WrittenFile:
    path: str  # relative to the run directory
    size: int
    sha256: str = ""


@dataclass
class PhaseResult:
    phase: str  # rollout | critic | actor | export | evaluation | sft
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)  # flat, "group/name": value
    timings_s: dict[str, float] = field(default_factory=dict)
    outputs: list[WrittenFile] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    version: int = RESULT_VERSION

    def write(self, directory: Path) -> None:
        """Numbers that aren't finite, which JSON doesn't have, become null, as in metrics.jsonl."""
        sealed.write(directory / RESULT_FILE, _without_nan(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> PhaseResult:
        path = directory / RESULT_FILE
        try:
            raw = sealed.read(path)
            if raw["version"] != RESULT_VERSION:
                raise ValueError(f"it has format version {raw['version']!r}, this program knows {RESULT_VERSION}")
            outputs = [WrittenFile(**item) for item in raw.pop("outputs")]
            for numbers in (raw.get("metrics", {}), raw.get("timings_s", {})):
                numbers.update({name: math.nan for name, value in numbers.items() if value is None})
            return cls(**raw, outputs=outputs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise IncompleteError(
                f"no readable phase result: {error}",
                where=str(path),
                remedy="run the phase again; its inputs are intact",
            ) from error


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def missing_outputs(result: PhaseResult, run_dir: Path, *, digests: bool = False) -> list[str]:
    """What is wrong with a phase's outputs: absent, of another size, or of another content; one line each.

    Args:
        digests: compare the content of all files, not only of those up to SMALL_BYTES.
    """
    return _differences(result.outputs, run_dir, up_to=None if digests else SMALL_BYTES)


def require_recorded(
    paths: RunPaths, iteration: int, phase: str, directory: Path, *, part: int = 0, parts: int = 1
) -> None:
    """Compare what a phase is about to read with what its maker recorded: every byte, by SHA-256.

    Args:
        iteration, phase: of the maker, whose result lists the files.
        directory: below the run directory; its tensor files must be exactly the recorded ones.
        part, parts: hash every `parts`-th file only, where several processes share the work.

    Raises:
        IncompleteError: a file is missing, was changed or added; names it with the expected and the found value.
    """
    result = PhaseResult.read(paths.phase(iteration, phase))
    prefix = f"{within(directory, paths.root)}/"
    recorded = sorted((file for file in result.outputs if file.path.startswith(prefix)), key=lambda file: file.path)
    known = {file.path for file in recorded}
    wrong = _differences(recorded[part::parts], paths.root, up_to=None)
    wrong += [
        f"{prefix}{path.name}: not among the files that were recorded"
        for path in sorted(directory.glob("*.safetensors"))
        if f"{prefix}{path.name}" not in known
    ]
    if not recorded:
        wrong.append(f"{prefix}: no file was recorded")
    if wrong:
        raise IncompleteError(
            f"what the {phase} phase of iteration {iteration} wrote has changed since: {summarised(wrong)}",
            where=str(directory),
            remedy=f"restore the files from a copy; or delete the directory and run {phase} of iteration {iteration} "
            "again, as long as no other finished step has read it",
        )


def summarised(problems: list[str], shown: int = 5) -> str:
    return "; ".join(problems[:shown]) + (f"; and {len(problems) - shown} more" if len(problems) > shown else "")


def _differences(files: list[WrittenFile], run_dir: Path, *, up_to: int | None) -> list[str]:
    """One line for each file that isn't as recorded; contents are compared up to this size in bytes, None: all."""

    def difference(file: WrittenFile) -> str:
        path = run_dir / file.path
        try:
            size = path.stat().st_size
            if size != file.size:
                return f"{file.path}: {size} bytes, expected {file.size}"
            if not file.sha256 or (up_to is not None and size > up_to):
                return ""
            found = atomic.sha256_file(path)
        except OSError as error:
            return f"{file.path}: missing" if isinstance(error, FileNotFoundError) else f"{file.path}: {error.strerror}"
        if found != file.sha256:
            return f"{file.path}: its SHA-256 is {found[:16]}..., expected {file.sha256[:16]}..."
        return ""

    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        return [line for line in pool.map(difference, files) if line]
