"""Which finished rollouts some paths name, to be trained on without the run that made them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_t1.audit.targets import Target, find_all, places_of
from megatron_t1.errors import IncompleteError, T1Error


def rollouts_of(paths: Iterable[str]) -> list[Target]:
    """Directories of records: of a run, of its rollouts, or records by themselves; each once.

    Raises:
        IncompleteError: a path names no records, or a rollout that isn't finished.
        T1Error: a path names nothing but evaluations, or one file of a directory.
    """
    found: dict[Path, Target] = {}
    for path in paths:
        chosen = [target for target in find_all([path]) if target.holds_records and not _is_evaluation(target)]
        if not chosen:
            raise T1Error(
                "there is no rollout to train on, only evaluations",
                where=str(path),
                remedy="name a run, or RUN/rollouts/iter_NNNN",
            )
        found |= {target.directory.resolve(): target for target in chosen}
    for target in found.values():
        if target.file is not None:
            raise T1Error(
                "this is one file; a warm-up reads whole rollouts",
                where=str(target.file),
                remedy="name the directory it lies in",
            )
        if target.root is not None and target.result is None:
            raise IncompleteError(
                "this rollout isn't finished", where=str(target.directory), remedy="name the finished ones one by one"
            )
    return list(found.values())


def _is_evaluation(target: Target) -> bool:
    """Whether the records lie where a run keeps its evaluations."""
    return target.root is not None and any(where.parent.name == "evaluations" for where in places_of(target.directory))
