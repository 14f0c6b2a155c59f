"""What a run's own books say should be there: its manifest, and the results of the phases that wrote records.

Checkpoints and exports aren't looked at: they are retired as a training goes on, and hold no records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from megatron_t1.audit.findings import Finding, Kind
from megatron_t1.config.compose import load_run_config
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths, number_of, numbered
from megatron_t1.phase import RESULT_FILE, PhaseResult, WrittenFile
from megatron_t1.regular import require_regular, sha256_regular

PHASE_OF = {"rollouts": "rollout", "evaluations": "evaluation"}  # kind of records -> the phase that writes them
BOOKS = ("manifest.json", "phases")  # what only a run has


@dataclass
class Books:
    """Made by `read_books`.

    Attributes:
        config: None where there is none, or it can't be read.
        has_manifest: whether a readable manifest says which steps are finished.
        results: result of the phase that wrote each directory of records, by the directory's kind and number.
        problems: what is wrong with the books themselves.
    """

    root: Path
    config: Config | None = None
    has_manifest: bool = False
    results: dict[tuple[str, int], PhaseResult] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)


def keeps_books(directory: Path) -> bool:
    """Whether a directory is a run, by what lies in it; also one that has lost a part of it."""
    return any((directory / name).exists() for name in BOOKS)


def read_books(root: Path) -> Books:
    """The books of a run; what is missing or can't be read becomes a finding."""
    paths = RunPaths.of(root)
    books = Books(paths.root)
    kept = keeps_books(paths.root)
    if paths.config.exists():
        try:
            require_regular(paths.config)
            books.config = load_run_config(paths.root)
        except (T1Error, OSError) as error:
            books.problems.append(_unreadable(paths.config.name, error))
    elif kept:
        books.problems.append(Finding(Kind.RECORDED, "config.yaml: missing"))
    finished: dict[tuple[int, str], str] = {}
    gone: set[Path] = set()  # records that were deleted by policy
    if paths.manifest.exists():
        try:
            require_regular(paths.manifest)
            manifest = Manifest.read_exactly(paths.manifest)
            finished = {step.key: step.result_sha256 for step in manifest.finished}
            gone = {path for name in manifest.retired if not (path := paths.root / name).exists()}
            books.has_manifest = True
        except (T1Error, OSError, RecursionError) as error:
            books.problems.append(_unreadable(paths.manifest.name, error))
    elif kept:
        books.problems.append(Finding(Kind.RECORDED, "manifest.json: missing"))
    for (iteration, phase), digest in sorted(finished.items()):
        books.problems += _result_problem(paths, paths.phase(iteration, phase) / RESULT_FILE, digest)
    try:
        phases = numbered(paths.root / "phases")
    except OSError as error:
        books.problems.append(_unreadable("phases", error))
        phases = []
    for directory in phases:
        for kind, phase in PHASE_OF.items():
            path = directory / phase / RESULT_FILE
            try:
                if not path.exists():
                    continue
                require_regular(path)
                result, records = _read_result(paths, path, kind)
                set_aside = _set_aside(paths.root, records)
            except (T1Error, OSError, AttributeError, RecursionError) as error:
                books.problems.append(_unreadable(str(path.relative_to(paths.root)), error))
                continue
            if records in gone:
                continue
            if (number_of(directory), phase) in finished or not set_aside:
                books.results[kind, number_of(records)] = result
    return books


def _result_problem(paths: RunPaths, path: Path, digest: str) -> list[Finding]:
    """Whether the result of a finished step is the one that the manifest names."""
    name = path.relative_to(paths.root)
    try:
        if not path.exists():
            return [Finding(Kind.RECORDED, f"{name}: missing, and manifest.json says that the step is finished")]
        if sha256_regular(path) == digest:
            return []
    except OSError as error:
        return [Finding(Kind.UNREADABLE, f"{name}: {error.strerror}")]
    return [Finding(Kind.RECORDED, f"{name}: its SHA-256 is not the one in manifest.json")]


def _read_result(paths: RunPaths, path: Path, kind: str) -> tuple[PhaseResult, Path]:
    """A phase's result, and the directory whose files it lists."""
    result = PhaseResult.read(path.parent)
    parents = {PurePosixPath(file.path).parent for file in result.outputs if _is_typed(file)}
    if not all(map(_is_typed, result.outputs)) or len(parents) != 1:
        raise IncompleteError("its outputs are no files of one directory", where=str(path))
    (parent,) = parents
    if len(parent.parts) != 2 or parent.parts[0] != kind or number_of(parent) is None:
        raise IncompleteError(f"its outputs lie in {parent}, expected {kind}/iter_NNNN", where=str(path))
    return result, paths.root / parent


def _is_typed(file: WrittenFile) -> bool:
    return isinstance(file.path, str) and type(file.size) is int and isinstance(file.sha256, str)


def _set_aside(root: Path, records: Path) -> bool:
    """Whether a start under another configuration has moved these records away, with no step finished."""
    return not records.exists() and any(root.glob(f"superseded_*/{records.relative_to(root)}"))


def _unreadable(name: str, error: Exception) -> Finding:
    problem = f"{type(error).__name__}: {error}"
    if isinstance(error, T1Error):
        problem = error.problem
    elif isinstance(error, OSError):
        problem = error.strerror or problem
    return Finding(Kind.UNREADABLE, f"{name}: {' '.join(problem.split())}")
