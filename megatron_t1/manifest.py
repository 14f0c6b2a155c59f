"""The one file that says what of a run is finished. Versioned, replaced atomically.

A step is in it only after its result and outputs were checked. `loop.manifest` says which options it binds a run to.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from megatron_t1 import atomic
from megatron_t1.errors import IncompleteError
from megatron_t1.phase import RESULT_FILE, PhaseResult

MANIFEST_VERSION = 1
Key = tuple[int, str]  # (iteration, phase)


@dataclass
class FinishedStep:
    iteration: int
    phase: str
    result_sha256: str  # of the phase's result.json
    launch: str  # id of the launch that made it
    inputs: dict[str, str]  # "<iteration>/<phase>" of every predecessor -> its result's SHA-256
    seconds: float  # of the whole launch, shared by the phases in it
    attempts: int
    output_files: int
    output_bytes: int
    finished_at: float  # seconds since the epoch

    @classmethod
    def of(
        cls, result: PhaseResult, directory: Path, *, launch: str, inputs: dict[str, str], seconds: float, attempts: int
    ) -> FinishedStep:
        """A step that is finished now, whose result lies in `directory`."""
        return cls(
            iteration=result.iteration,
            phase=result.phase,
            result_sha256=atomic.sha256_file(directory / RESULT_FILE),
            launch=launch,
            inputs=inputs,
            seconds=seconds,
            attempts=attempts,
            output_files=len(result.outputs),
            output_bytes=sum(file.size for file in result.outputs),
            finished_at=time.time(),
        )

    @property
    def key(self) -> Key:
        return self.iteration, self.phase


@dataclass
class Manifest:
    config: dict[str, Any]  # flat, resolved
    config_sha256: str
    seed: int
    created_at: float
    finished: list[FinishedStep] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)  # one for each start of the loop that differed
    start_model: dict[str, dict[str, Any]] = field(default_factory=dict)  # files of model.path (loop.start_model)
    version: int = MANIFEST_VERSION

    @property
    def keys(self) -> set[Key]:
        return {step.key for step in self.finished}

    def find(self, key: Key) -> FinishedStep | None:
        return next((step for step in self.finished if step.key == key), None)

    def write(self, path: Path) -> None:
        atomic.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises:
        IncompleteError: absent, damaged, or written by another version of the format.
        """
        try:
            raw = json.loads(path.read_text())
            version = raw["version"]
            if version != MANIFEST_VERSION:
                raise IncompleteError(
                    f"the manifest has format version {version!r}, this program knows {MANIFEST_VERSION}",
                    where=str(path),
                    remedy="go on with the version of megatron-t1 that wrote it, or start another run directory",
                )
            manifest = _typed(cls(**raw))
            if not all(isinstance(facts, dict) for facts in manifest.start_model.values()):
                raise TypeError("start_model doesn't describe files")
            manifest.finished = [_typed(FinishedStep(**step)) for step in manifest.finished]
            return manifest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IncompleteError(
                f"no readable manifest: {type(error).__name__}: {error}",
                where=str(path),
                remedy="restore the file from a copy; without it nothing says which steps are finished",
            ) from error


def _typed(value: Any) -> Any:
    """The dataclass instance `value`, or TypeError when a field isn't of its declared type."""
    for name, hint in get_type_hints(type(value)).items():
        kind, found = get_origin(hint) or hint, getattr(value, name)
        accepted = (int, float) if kind is float else kind
        if not isinstance(found, accepted) or isinstance(found, bool):
            raise TypeError(f"{name} is {found!r}, not {kind.__name__}")
    return value
