"""What a phase tells the loop: one result file, written last and atomically.

A phase that exits 0 without a result has failed. The loop never reads tensors; it compares the names, sizes and
digests listed here (computed by the processes that wrote the files, while they wrote them).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.errors import IncompleteError

RESULT_FILE = "result.json"
RESULT_VERSION = 1


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
        atomic.write_json(directory / RESULT_FILE, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> PhaseResult:
        path = directory / RESULT_FILE
        try:
            raw = json.loads(path.read_text())
            outputs = [WrittenFile(**item) for item in raw.pop("outputs")]
            return cls(**raw, outputs=outputs)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise IncompleteError(
                f"no readable phase result: {error}",
                where=str(path),
                remedy="run the phase again; its inputs are intact",
            ) from error


def missing_outputs(result: PhaseResult, run_dir: Path, *, digests: bool = False) -> list[str]:
    """Names of outputs that are absent, of another size, or (on request) of another content."""
    wrong = []
    for file in result.outputs:
        path = run_dir / file.path
        if not path.is_file():
            wrong.append(f"{file.path}: missing")
        elif path.stat().st_size != file.size:
            wrong.append(f"{file.path}: {path.stat().st_size} bytes, expected {file.size}")
        elif digests and file.sha256 and atomic.sha256_file(path) != file.sha256:
            wrong.append(f"{file.path}: content differs from its digest")
    return wrong
