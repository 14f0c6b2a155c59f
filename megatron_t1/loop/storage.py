"""What of a run may be deleted: by policy after a step, and at a start what killed processes left half-written.

What is deleted by policy is recorded in the manifest before it goes, so that a kill in between leaves nothing that is
missing without a reason. Whatever a step still to come, a step that can be repeated, or the audit of a rollout that
stays has to read is never deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_t1.atomic import TEMPORARY_SUFFIX
from megatron_t1.config.schema import Config
from megatron_t1.errors import warn
from megatron_t1.loop.steps import Key, all_steps, predecessors
from megatron_t1.manifest import Manifest
from megatron_t1.paths import Counters, RunPaths, number_of, numbered

DELETING = ".deleting"
# Suffixes of directories that killed processes leave: half-deleted, half-written, replaced (model.directories).
LEFT = (DELETING, TEMPORARY_SUFFIX, ".replaced")
OUTSIDE_RESULTS = ("model", "critic")  # of phases outside a training (loop.outside), beside numbered directories
_HALF_WRITTEN = re.compile(rf"\.[0-9]+{re.escape(TEMPORARY_SUFFIX)}\Z")  # of `atomic.replacing`: NAME.RANDOM.PID
DEPTH = 4  # of directories in a run that files are written to: RUN/phases/iter_N/PHASE


def retire(config: Config, manifest: Manifest) -> list[Path]:
    """Delete what the options let go; returns what was deleted.

    Of each role the newest `train.keep_checkpoints` checkpoints stay, those of the newest evaluated policy, and what a
    finished step read that can still be repeated by hand. Exports: the newest `loop.keep_exports`, those of the newest
    `loop.keep_evaluated` evaluated policies and of those that are still to be, and where rollouts are deleted, those
    that sampled what stays. Rollouts, with their values: the newest `loop.keep_rollouts`.
    """
    paths = RunPaths.of(config.run.dir)
    leave = _to_leave(config, manifest, paths)
    names = {str(directory.relative_to(paths.root)) for directory in leave}
    gone = {name for name in manifest.retired if not (paths.root / name).exists()}  # others were kept in the end
    if (retired := sorted(names | gone)) != manifest.retired:
        manifest.retired = retired
        for _ in range(2):  # the one that a run goes on from where the newest is lost knows it, too
            manifest.write(paths.manifest)
    for directory in leave:
        _remove(directory)
    return leave


def _to_leave(config: Config, manifest: Manifest, paths: RunPaths) -> list[Path]:
    warmup, loop, checkpoints = config.loop.warmup_iterations, config.loop, config.train.keep_checkpoints
    evaluated = sorted({i - warmup for i, phase in manifest.keys if phase == "evaluation" and i > warmup})
    newest_evaluated, kept_evaluated = set(evaluated[-1:]), set(evaluated[-loop.keep_evaluated :])
    newest = {
        phase: max((iteration for iteration, name in manifest.keys if name == phase), default=-1)
        for phase in ("rollout", "critic", "actor", "export")
    }
    actor, critic, export = newest["actor"] - warmup + 1, newest["critic"] + 1, newest["export"] - warmup + 1
    needed = _read_by_repeatable(config, manifest, [policy + warmup for policy in kept_evaluated])
    of = {phase: {i for i, name in needed if name == phase} for phase in newest}
    open_steps = {key for step in all_steps(loop) for key in step.keys} - manifest.keys
    to_evaluate = {Counters(i, warmup).policy for i, phase in open_steps if phase == "evaluation"}
    rollouts = _stay(newest["rollout"], loop.keep_rollouts) | of["rollout"] | of["critic"]
    sampled = {Counters(i, warmup).policy for i in rollouts} if loop.keep_rollouts else set()
    # Directory of versions, the newest that is recorded, and those that stay.
    rules: list[tuple[Path, int, set[int]]] = [
        (paths.checkpoint("actor", 0).parent, actor,
         _stay(actor, checkpoints) | newest_evaluated | {i - warmup + 1 for i in of["actor"]}),
        (paths.checkpoint("critic", 0).parent, critic,
         _stay(critic, checkpoints) | {policy + warmup for policy in newest_evaluated} | {i + 1 for i in of["critic"]}),
        (paths.hf(1, "").parent, export,
         _stay(export, loop.keep_exports or checkpoints) | kept_evaluated | to_evaluate | sampled
         | {i - warmup + 1 for i in of["export"]}),
    ]  # fmt: skip
    if loop.keep_rollouts:
        rules += [(place.parent, newest["rollout"], rollouts) for place in (paths.rollouts(0), paths.values(0))]
    return [
        directory
        for parent, last, stay in rules
        for directory in _versions(parent)
        if (number := number_of(directory)) <= last and number not in stay
    ]


def _stay(newest: int, count: int) -> set[int]:
    """The last `count` numbers up to `newest`."""
    return set(range(max(0, newest - count + 1), newest + 1))


def _read_by_repeatable(config: Config, manifest: Manifest, evaluations: Collection[int]) -> set[Key]:
    """Makers of what the repeatable steps read: of finished steps whose outputs no finished step has read.

    Nobody reads an evaluation: of these the ones in the iterations `evaluations` count. Until its export is finished,
    an actor phase may be repeated, and reads the actor before the newest one.
    """
    read = {key: set(predecessors(config.loop, key)) for key in manifest.keys}
    repeatable = manifest.keys - set().union(*read.values())
    return set().union(*(read[key] for key in repeatable if key[1] != "evaluation" or key[0] in evaluations))


def _versions(parent: Path) -> list[Path]:
    return [directory for directory in numbered(parent) if not directory.is_symlink()]


def _remove(directory: Path) -> None:
    """Out of sight first: a reader never meets half a checkpoint.

    What can't be deleted, because a process on another node still has it open or the right is missing, is tried again
    by the next `sweep` or `retire`: it ends no training.
    """
    aside = directory.with_name(directory.name + DELETING)
    try:
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(directory, aside)
        shutil.rmtree(aside)
    except OSError as error:
        warn(f"warning: {directory} can't be deleted yet: {error.strerror or error}")


def sweep(root: Path) -> list[Path]:
    """Remove what killed processes left: half-written files and directories, and those that were being deleted.

    Only for who holds the run's lock: then nobody is writing.
    """
    removed = list(_leftovers(root, DEPTH))
    for path in removed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return removed


def _leftovers(directory: Path, depth: int) -> Iterable[Path]:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            if _is_left(entry.name):
                yield Path(entry.path)
            elif depth > 1:
                yield from _leftovers(Path(entry.path), depth - 1)
        elif _HALF_WRITTEN.search(entry.name):
            yield Path(entry.path)


def _is_left(name: str) -> bool:
    """Whether a directory of this name is what a killed process left of one that a run gives its name to."""
    suffix = next((suffix for suffix in LEFT if name.endswith(suffix)), "")
    whole = name.removesuffix(suffix)
    return bool(suffix) and (number_of(whole) is not None or whole in OUTSIDE_RESULTS)
