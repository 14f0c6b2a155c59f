"""What a path on the command line means: a run, a directory of records, a shard, or one record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_t1.config.compose import load_run_config
from megatron_t1.config.inputs import is_run
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.exchange import log_names
from megatron_t1.trajectory.record import Trajectory, load
from megatron_t1.trajectory.store import SHARD_SUFFIX, SUFFIX, RolloutStore

KINDS = ("rollouts", "evaluations")


@dataclass(frozen=True)
class Target:
    """Records that lie together, with their exchange logs beside them.

    Attributes:
        label: as the report calls it.
        directory: of records and logs.
        file: the only file meant; None: all of the directory.
        run: configuration of the run it belongs to; None: of no run.
        kind: "rollouts", "evaluations" or "" outside a run.
    """

    label: str
    directory: Path
    file: Path | None = None
    run: Config | None = None
    kind: str = ""

    def files(self) -> list[Path]:
        """What is read: records, shards and logs."""
        logs = [self.directory / name for name in log_names(self.directory)]
        records = [self.file] if self.file is not None else sorted(self.directory.glob(f"*{SUFFIX}"))
        return [*records, *logs]

    @property
    def is_sealed(self) -> bool:
        return any(path.name.endswith(SHARD_SUFFIX) for path in self.files())

    def records(self) -> Iterator[tuple[str, Trajectory | T1Error]]:
        """(id, record) of each; an error instead of a record that can't be read or was changed since it was written.

        Raises:
            IncompleteError: the index itself can't be read.
        """
        if self.file is not None and not self.file.name.endswith(SHARD_SUFFIX):
            yield self.file.name.removesuffix(SUFFIX), _tried(lambda: load(self.file, verify=True))
            return
        store = RolloutStore(self.directory)
        names = store.ids() if self.file is None else store.sealed_ids(self.file.name)
        for name in names:
            yield name, _tried(lambda name=name: store.load(name, verify=True))

    @property
    def context_size(self) -> int:
        return 1 if self.run is None else self.run.layout.context

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
        run, kind = _run_of(path.parent)
        return [Target(str(path), path.parent, path, run, kind)]
    if not path.is_dir():
        raise IncompleteError("no such file or directory", where=str(path))
    if is_run(RunPaths.of(path).root) or any((path / kind).is_dir() for kind in KINDS):
        directories = [directory for kind in KINDS for directory in sorted((path / kind).glob("iter_*"))]
    else:
        directories = [path]
    targets = []
    for directory in directories:
        if any(directory.glob(f"*{SUFFIX}")):
            targets.append(Target(str(directory), directory, None, *_run_of(directory)))
    if not targets:
        raise IncompleteError(
            "there are no records", where=str(path), remedy="name a run, a directory of records, a shard or a record"
        )
    return targets


def _run_of(directory: Path) -> tuple[Config | None, str]:
    """The run that a directory of records belongs to, by where it lies."""
    directory = directory.resolve()
    kind, root = directory.parent.name, directory.parent.parent
    if kind not in KINDS or not RunPaths.of(root).config.is_file():
        return None, ""
    return load_run_config(root), kind


def _tried(read) -> Trajectory | T1Error:
    try:
        return read()
    except T1Error as error:
        return error
