"""What a path on the command line means: a run, its rollouts, a directory of records, a shard, or one record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_t1.audit.books import PHASE_OF, Books, keeps_books, read_books
from megatron_t1.audit.findings import Finding, Kind
from megatron_t1.audit.model import facts_of_model
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.paths import Counters, number_of, numbered
from megatron_t1.phase import PhaseResult
from megatron_t1.rollout.policy import engine_dtype
from megatron_t1.trajectory.exchange import log_names
from megatron_t1.trajectory.record import Trajectory, load
from megatron_t1.trajectory.store import SHARD_SUFFIX, SUFFIX, RolloutStore, Survey

KINDS = tuple(PHASE_OF)


@dataclass(frozen=True)
class Target:
    """Records that lie together, with their exchange logs beside them; or a run itself, where its books are wrong.

    Attributes:
        label: as the report calls it.
        directory: of records and logs.
        file: the only file meant; None: all of the directory.
        run: configuration of the run it belongs to; None: of no run, or it can't be read.
        kind: "rollouts", "evaluations" or "" outside a run, or of one whose configuration can't be read.
        number: of the iteration or version that the directory belongs to; None outside a run.
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
    number: int | None = None
    root: Path | None = None
    result: PhaseResult | None = None
    is_over: bool = False
    problems: tuple[Finding, ...] = ()

    def files(self) -> list[Path]:
        """What is read: records, shards and logs; nothing of a directory that can't be read."""
        if not _can_list(self.directory):
            return []
        logs = [self.directory / name for name in log_names(self.directory)]
        records = [self.file] if self.file is not None else record_files(self.directory)
        return [*records, *logs]

    @property
    def holds_records(self) -> bool:
        """False of a run itself."""
        return self.root is None or self.number is not None

    @property
    def is_sealed(self) -> bool:
        return self.is_over or any(path.name.endswith(SHARD_SUFFIX) for path in self.files())

    @cached_property
    def _survey(self) -> Survey:
        if not self.holds_records:
            return Survey()
        if self.file is None:
            return RolloutStore(self.directory).survey()
        if self.file.name.endswith(SHARD_SUFFIX):
            return RolloutStore(self.directory).survey(self.file.name)
        return Survey()

    def unreadable(self) -> list[Finding]:
        """Of each file that doesn't even say which records it holds."""
        return [
            Finding(Kind.UNREADABLE, f"{name}: {' '.join(str(error.problem).split())}")
            for name, error in self._survey.unreadable.items()
        ]

    def duplicates(self) -> list[Finding]:
        """Of each id that more than one record has."""
        return [Finding(Kind.DUPLICATE, error.problem) for error in self._survey.duplicates]

    def records(self) -> Iterator[tuple[str, Trajectory | T1Error]]:
        """(id, record) of each; an error instead of a record that can't be read or was changed since it was written."""
        if self.file is not None and not self.file.name.endswith(SHARD_SUFFIX):
            yield self.file.name.removesuffix(SUFFIX), _tried(lambda: load(self.file, verify=True))
            return
        store = RolloutStore(self.directory)
        for name, place in self._survey.places.items():
            yield name, _tried(lambda name=name, place=place: store.load_from(place, name, verify=True))

    @property
    def context_size(self) -> int:
        return 1 if self.run is None else self.run.layout.context

    @property
    def policy(self) -> int | None:
        """Version of the policy that sampled the records; None outside a run."""
        if self.run is None or not self.kind:
            return None
        if self.number is None or self.kind == "evaluations":
            return self.number
        return Counters(self.number, self.run.loop.warmup_iterations).policy

    def expected(self) -> dict[str, Any]:
        """What a record must state as the run's configuration and start model fix it; empty outside a run.

        The start model stands for every policy: training changes neither its experts nor its tokenizer.
        """
        if self.run is None or not self.kind:
            return {}
        options = self.run.rollout if self.kind == "rollouts" else self.run.eval
        return {
            "temperature": options.temperature,
            "top_p": self.run.rollout.top_p,
            "chat_format": self.run.model.chat_format,
            "model_dtype": self.run.model.dtype,
            "engine_dtype": engine_dtype(self.run),
            **facts_of_model(self.run.model.path, self.run.model.chat_format),
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
        there = os.path.lexists(path)
        problem = "neither a regular file nor a directory" if there else "no such file or directory"
        raise IncompleteError(problem, where=str(path))
    within = [where for where in places_of(path) if where.name in KINDS]
    if keeps_books(path) or any((path / kind).is_dir() for kind in KINDS):
        targets = _of_run(path, KINDS)
    elif within and _can_list(path) and numbered(path):
        targets = _of_run(within[0].parent, (within[0].name,))
    else:
        target = _target(path)
        known = target.result is not None or not _can_list(path)
        targets = [target] if known or record_files(path) else []
    if not targets:
        raise IncompleteError(
            "there are no records", where=str(path), remedy="name a run, a directory of records, a shard or a record"
        )
    return targets


def find_all(paths: Iterable[str | Path]) -> list[Target]:
    """The targets that several paths name, each once; a file of a directory that is audited as a whole isn't again."""
    found: dict[tuple[Path, Path | None], Target] = {}
    for path in paths:
        for target in _found_at(path):
            key = target.directory.resolve(), target.file and target.file.resolve()
            found.setdefault(key, target)
    whole = {directory for directory, file in found if file is None}
    return [target for (directory, file), target in found.items() if file is None or directory not in whole]


def _found_at(path: str | Path) -> list[Target]:
    """`find_targets`, or one that says why it can't be looked at."""
    try:
        return find_targets(path)
    except OSError as error:
        problem = Finding(Kind.UNREADABLE, f"{path}: {error.strerror or error}")
        return [Target(str(path), Path(path), problems=(problem,))]


def places_of(directory: str | Path) -> list[Path]:
    """Where a directory lies: by its name, and where links lead."""
    return list(dict.fromkeys((Path(os.path.abspath(directory)), Path(directory).resolve())))


def record_files(directory: Path) -> list[Path]:
    """Records and shards, by name. Raises OSError where the directory can't be read."""
    if not directory.is_dir():
        return []
    return [directory / name for name in sorted(os.listdir(directory)) if name.endswith(SUFFIX)]


def _can_list(directory: Path) -> bool:
    """False of a directory that this process may not read; one that isn't there has nothing to list."""
    try:
        os.listdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _of_run(root: Path, kinds: tuple[str, ...]) -> list[Target]:
    """A target for each directory of records that is there or should be, and first the run if its books are wrong."""
    books = read_books(root)
    targets = []
    for kind in kinds:
        expected = {number for of, number in books.results if of == kind}
        try:
            there = {number_of(directory) for directory in numbered(root / kind)}
        except OSError as error:
            books.problems.append(Finding(Kind.UNREADABLE, f"{kind}: {error.strerror or error}"))
            there = set()
        for number in sorted(expected | there):
            directory = root / kind / f"iter_{number:04d}"
            closed = not _can_list(directory)
            has_records = closed or bool(record_files(directory))
            # Nothing but logs: an episode's first turns, unless nobody can say that the phase isn't over.
            lost = not has_records and not books.has_manifest and bool(log_names(directory))
            if has_records or lost or number in expected:
                targets.append(_in_run(directory, books, kind, number, is_over=lost))
    if books.problems and (targets or books.has_manifest or _has_steps(root)):
        targets.insert(0, Target(str(root), root, root=books.root, problems=tuple(books.problems)))
    return targets


def _has_steps(root: Path) -> bool:
    """Whether a phase that writes records was started; a fine-tuning alone has no manifest."""
    return any((step / phase).is_dir() for step in numbered(root / "phases") for phase in PHASE_OF.values())


def _target(directory: Path, file: Path | None = None) -> Target:
    """One directory of records, or one file of it, with the run that it belongs to by where it lies."""
    for where in places_of(directory):
        kind, root = where.parent.name, where.parent.parent
        if kind in KINDS and number_of(where) is not None and (keeps_books(root) or (root / "config.yaml").is_file()):
            books = read_books(root)
            problems = tuple(finding for finding in books.problems if finding.detail.startswith("config.yaml"))
            return _in_run(directory, books, kind, number_of(where), file, problems=problems)
    return Target(str(file or directory), directory, file)


def _in_run(
    directory: Path,
    books: Books,
    kind: str,
    number: int | None,
    file: Path | None = None,
    *,
    is_over: bool = False,
    problems: tuple[Finding, ...] = (),
) -> Target:
    result = books.results.get((kind, number)) if file is None else None
    return Target(
        label=str(file or directory),
        directory=directory,
        file=file,
        run=books.config,
        kind=kind if books.config is not None else "",
        number=number,
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
