"""The one file that says what of a run is finished. Versioned, sealed by a digest of itself, replaced atomically.

A step is in it only after its result and outputs were checked. `loop.manifest` says which options it binds a run to.
The manifest before the newest stays beside it: when the newest is damaged, a run goes on from there, and what it lacks
is taken from the results of the phases themselves (`loop.runner`).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from megatron_t1 import atomic, sealed
from megatron_t1.errors import IncompleteError, warn
from megatron_t1.paths import number_of
from megatron_t1.phase import RESULT_FILE, PhaseResult

MANIFEST_VERSION = 2
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
    # Where the training stands by it: the tasks' positions in the run's sequence and the policy that played them, or
    # a role's version, optimizer steps and learning rate (`loop.position`).
    position: dict[str, Any] = field(default_factory=dict)
    contract: str = ""  # of a rollout or evaluation: a key of `Manifest.contracts`

    @classmethod
    def of(
        cls,
        result: PhaseResult,
        directory: Path,
        *,
        launch: str,
        inputs: dict[str, str],
        seconds: float,
        attempts: int,
        position: dict[str, Any] | None = None,
        contract: str = "",
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
            position=position or {},
            contract=contract,
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
    contracts: dict[str, Any] = field(default_factory=dict)  # SHA-256 -> sampling contract of finished rollouts
    retired: list[str] = field(default_factory=list)  # directories that were deleted by policy (loop.storage)
    tasks_sha256: str = ""  # of tasks.json, once a rollout has been played by it
    jobs: dict[str, Any] = field(default_factory=dict)  # the last line of the list of Slurm jobs (loop.job_list)
    version: int = MANIFEST_VERSION

    @property
    def keys(self) -> set[Key]:
        return {step.key for step in self.finished}

    @property
    def settled(self) -> set[Key]:
        """Finished steps, and evaluations that can't be made up for: the policies' exports were deleted by policy."""
        warmup = self.config.get("loop.warmup_iterations", 0)
        gone = {number_of(name) for name in self.retired if name.startswith("hf/")} - {None}
        return self.keys | {(policy + warmup, "evaluation") for policy in gone}

    def find(self, key: Key) -> FinishedStep | None:
        return next((step for step in self.finished if step.key == key), None)

    def write(self, path: Path) -> None:
        """Replace the manifest in `path`; the one that was there stays as its predecessor, unless it is damaged."""
        with contextlib.suppress(IncompleteError):
            self.read_exactly(path)
            _keep(path)
        sealed.write(path, asdict(self))

    def write_anew(self, path: Path) -> None:
        """As `write`, leaving no predecessor to go back to: what was finished by it isn't any more."""
        predecessor(path).unlink(missing_ok=True)
        sealed.write(path, asdict(self))

    @classmethod
    def exists(cls, path: Path) -> bool:
        """Whether a manifest lies in `path`, or the predecessor of one that was lost."""
        return path.exists() or predecessor(path).exists()

    @classmethod
    def read_exactly(cls, path: Path) -> Manifest:
        """The manifest in `path`. Raises IncompleteError: absent, damaged, or of another version of the format."""
        try:
            raw = sealed.read(path)
            if raw["version"] != MANIFEST_VERSION:
                raise OtherVersion(
                    f"the manifest has format version {raw['version']!r}, this program knows {MANIFEST_VERSION}",
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

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in `path`; where that is damaged or lost, its predecessor, which is said on stderr.

        Raises:
            IncompleteError: absent or damaged, as is its predecessor; or written by another version of the format.
        """
        try:
            return cls.read_exactly(path)
        except OtherVersion:
            raise
        except IncompleteError as damaged:
            try:
                found = cls.read_exactly(predecessor(path))
            except IncompleteError:
                raise damaged from None
            warn(f"warning: {damaged.problem} ({path}); going on from {predecessor(path).name}")
            return found


class OtherVersion(IncompleteError):
    """Written by another version of the format: newer or older, but not damaged."""


def predecessor(path: Path) -> Path:
    """Where the manifest before the one in `path` lies."""
    return path.with_suffix(".previous.json")


def _keep(path: Path) -> None:
    """Make what lies in `path` the predecessor, by one rename; the file itself stays where it is."""
    link = path.with_name(f".{predecessor(path).name}.{os.getpid()}{atomic.TEMPORARY_SUFFIX}")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links
        atomic.write_bytes(predecessor(path), path.read_bytes())
        return
    os.replace(link, predecessor(path))
    link.unlink(missing_ok=True)  # rename leaves both names where they were one file already


def _typed(value: Any) -> Any:
    """The dataclass instance `value`, or TypeError when a field isn't of its declared type."""
    for name, hint in get_type_hints(type(value)).items():
        kind, found = get_origin(hint) or hint, getattr(value, name)
        accepted = (int, float) if kind is float else kind
        if not isinstance(found, accepted) or isinstance(found, bool):
            raise TypeError(f"{name} is {found!r}, not {kind.__name__}")
    return value
