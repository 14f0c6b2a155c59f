"""What a path on the command line means: a run, its rollouts, a directory of records, a shard, or one record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_t1.audit.books import PHASE_OF, Books, keeps_books, read_books
from megatron_t1.audit.findings import Finding, Kind
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.paths import Counters, number_of, numbered
from megatron_t1.phase import PhaseResult
from megatron_t1.trajectory.exchange import log_names
from megatron_t1.trajectory.record import Trajectory, load
from megatron_t1.trajectory.store import SHARD_SUFFIX, SUFFIX, RolloutStore

KINDS = tuple(PHASE_OF)


@dataclass(frozen=True)
class Target:
    """Records that lie together, with their exchange logs beside them; or a run itself, where its books are wrong.

    Attributes:
        label: as the report calls it.
        directory: of records and logs.
        file: the only file meant; None: all of the directory.
        run: configuration of the run it belongs to; None: of no run, or it can't be read.
        kind: "rollouts", "evaluations" or "" outside a run.
        root: of the run that it belongs to; None: of no run.
        result: of the phase that wrote the records; None: none that is finished, or nobody says.
        is_over: whether no more records are to come, even where there is none.
        problems: what is known to be wrong before a record is read.
    """

    label: str
    directory: Path
    file: Path | None = None
    run: Config | None = None
    kind: str = ""
    root: Path | None = None
    result: PhaseResult | None = None
    is_over: bool = False
    problems: tuple[Finding, ...] = ()

    def files(self) -> list[Path]:
        """What is read: records, shards and logs."""
        logs = [self.directory / name for name in log_names(self.directory)]
        records = [self.file] if self.file is not None else sorted(self.directory.glob(f"*{SUFFIX}"))
        return [*records, *logs]

    @property
    def holds_records(self) -> bool:
        """False of a run itself."""
        return self.root is None or self.directory.resolve() != self.root

    @property
    def is_sealed(self) -> bool:
        return self.is_over or any(path.name.endswith(SHARD_SUFFIX) for path in self.files())

    @cached_property
    def _survey(self) -> tuple[dict[str, str], dict[str, T1Error]]:
        if self.file is None:
            return RolloutStore(self.directory).survey()
        if self.file.name.endswith(SHARD_SUFFIX):
            return RolloutStore(self.directory).survey(self.file.name)
        return {}, {}

    def unreadable(self) -> list[Finding]:
        """Of each file that doesn't even say which records it holds."""
        return [
            Finding(Kind.UNREADABLE, f"{name}: {' '.join(str(error.problem).split())}")
            for name, error in self._survey[1].items()
        ]

    def records(self) -> Iterator[tuple[str, Trajectory | T1Error]]:
        """(id, record) of each; an error instead of a record that can't be read or was changed since it was written."""
        if self.file is not None and not self.file.name.endswith(SHARD_SUFFIX):
            yield self.file.name.removesuffix(SUFFIX), _tried(lambda: load(self.file, verify=True))
            return
        store = RolloutStore(self.directory)
        for name, place in self._survey[0].items():
            yield name, _tried(lambda name=name, place=place: store.load_from(place, name, verify=True))

    @property
    def context_size(self) -> int:
        return 1 if self.run is None else self.run.layout.context

    @property
    def policy(self) -> int | None:
        """Version of the policy that sampled the records; None outside a run."""
        if self.run is None or not self.kind:
            return None
        number = number_of(self.directory.resolve())
        if number is None or self.kind == "evaluations":
            return number
        return Counters(number, self.run.loop.warmup_iterations).policy

    def expected(self) -> dict[str, Any]:
        """Fields of the sampling contract that the run's configuration fixes; empty outside a run."""
        if self.run is None or not self.kind:
            return {}
        options = self.run.rollout if self.kind == "rollouts" else self.run.eval
        return {
            "temperature": options.temperature,
            "top_p": self.run.rollout.top_p,
            "chat_format": self.run.model.chat_format,
            "model_dtype": self.run.model.dtype,
        }


def find_targets(path: str | Path) -> list[Target]:
    """The targets that `path` names.

    Raises:
        IncompleteError: nothing is there to audit.
    """
    path = Path(path)
    if path.is_file():
        return [_target(path.parent, path)]
    if not path.is_dir():
        raise IncompleteError("no such file or directory", where=str(path))
    if keeps_books(path) or any((path / kind).is_dir() for kind in KINDS):
        targets = _of_run(path, KINDS)
    elif path.resolve().name in KINDS and numbered(path):
        targets = _of_run(path.resolve().parent, (path.resolve().name,))
    else:
        target = _target(path)
        targets = [target] if target.result is not None or any(path.glob(f"*{SUFFIX}")) else []
    if not targets:
        raise IncompleteError(
            "there are no records", where=str(path), remedy="name a run, a directory of records, a shard or a record"
        )
    return targets


def find_all(paths: Iterable[str | Path]) -> list[Target]:
    """The targets that several paths name, each once; a file of a directory that is audited as a whole isn't again."""
    found: dict[tuple[Path, Path | None], Target] = {}
    for path in paths:
        for target in find_targets(path):
            key = target.directory.resolve(), target.file and target.file.resolve()
            found.setdefault(key, target)
    whole = {directory for directory, file in found if file is None}
    return [target for (directory, file), target in found.items() if file is None or directory not in whole]


def _of_run(root: Path, kinds: tuple[str, ...]) -> list[Target]:
    """A target for each directory of records that is there or should be, and first the run if its books are wrong."""
    books = read_books(root)
    targets = []
    for kind in kinds:
        expected = {root / kind / directory.name for directory in books.results if directory.parent.name == kind}
        for directory in sorted(expected | set(numbered(root / kind)), key=number_of):
            has_records = any(directory.glob(f"*{SUFFIX}"))
            # Nothing but logs: an episode's first turns, unless nobody can say that the phase isn't over.
            lost = not has_records and not books.has_manifest and bool(log_names(directory))
            if has_records or lost or directory in expected:
                targets.append(_in_run(directory, books, kind, is_over=lost))
    if books.problems and (targets or books.has_manifest or _has_steps(root)):
        targets.insert(0, Target(str(root), root, root=books.root, problems=tuple(books.problems)))
    return targets


def _has_steps(root: Path) -> bool:
    """Whether a phase that writes records was started; a fine-tuning alone has no manifest."""
    return any((step / phase).is_dir() for step in numbered(root / "phases") for phase in PHASE_OF.values())


def _target(directory: Path, file: Path | None = None) -> Target:
    """One directory of records, or one file of it, with the run that it belongs to by where it lies."""
    where = directory.resolve()
    kind, root = where.parent.name, where.parent.parent
    if kind in KINDS and number_of(where) is not None and (keeps_books(root) or (root / "config.yaml").is_file()):
        books = read_books(root)
        problems = tuple(finding for finding in books.problems if finding.detail.startswith("config.yaml"))
        return _in_run(directory, books, kind, file, problems=problems)
    return Target(str(file or directory), directory, file)


def _in_run(
    directory: Path,
    books: Books,
    kind: str,
    file: Path | None = None,
    *,
    is_over: bool = False,
    problems: tuple[Finding, ...] = (),
) -> Target:
    result = books.results.get(directory.resolve()) if file is None else None
    return Target(
        label=str(file or directory),
        directory=directory,
        file=file,
        run=books.config,
        kind=kind if books.config is not None else "",
        root=books.root,
        result=result,
        is_over=is_over or result is not None,
        problems=problems,
    )


def _tried(read) -> Trajectory | T1Error:
    try:
        return read()
    except T1Error as error:
        return error
    except OSError as error:
        return IncompleteError(f"can't be read: {error.strerror or error}")
