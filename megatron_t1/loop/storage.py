"""Room on the disk before a phase, and what may be deleted after one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.loop.steps import Key, Step, predecessors
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths, number_of, numbered

FLOOR_BYTES = 256 * 2**20  # logs and what can't be foreseen
GROWTH = 1.2  # a phase may write this much more than its last execution did
DELETING = ".deleting"


def require_space(config: Config, manifest: Manifest, step: Step) -> None:
    """Raise T1Error when the run's file system has less room than the step is expected to need."""
    expected = FLOOR_BYTES + int(GROWTH * sum(_last_bytes(manifest, phase) for phase in step.phases))
    free = shutil.disk_usage(config.run.dir).free
    if free < expected:
        raise T1Error(
            f"the disk is too full for {step}: {free / 2**30:.2f} GiB free, about {expected / 2**30:.2f} GiB needed",
            where=config.run.dir,
            remedy="free space, lower train.keep_checkpoints, or move the run; finished steps are kept",
        )


def _last_bytes(manifest: Manifest, phase: str) -> int:
    return next((step.output_bytes for step in reversed(manifest.finished) if step.phase == phase), 0)


def retire(config: Config, manifest: Manifest) -> list[Path]:
    """Delete checkpoints and exports that no later step reads; returns what was deleted.

    Of each role the newest `train.keep_checkpoints` stay, those of the newest evaluated policy, and what a finished
    step read that can still be repeated by hand. Exports that were evaluated stay as well.
    """
    paths = RunPaths.of(config.run.dir)
    warmup = config.loop.warmup_iterations
    evaluated = {
        max(0, iteration - warmup) for iteration, phase in manifest.keys if phase == "evaluation" and iteration > warmup
    }
    newest_evaluated = {max(evaluated)} if evaluated else set()
    newest = {
        "actor": max((i - warmup + 1 for i, phase in manifest.keys if phase == "actor"), default=0),
        "critic": max((i + 1 for i, phase in manifest.keys if phase == "critic"), default=0),
        "hf": max((i - warmup + 1 for i, phase in manifest.keys if phase == "export"), default=0),
    }
    read_again = _read_by_repeatable(config, manifest)
    kept = {
        "actor": newest_evaluated | {i - warmup + 1 for i, phase in read_again if phase == "actor"},
        "critic": {policy + warmup for policy in newest_evaluated} | {i + 1 for i, ph in read_again if ph == "critic"},
        "hf": evaluated | {i - warmup + 1 for i, phase in read_again if phase == "export"},
    }
    deleted = []
    for role, parent in (
        ("actor", paths.checkpoint("actor", 0).parent),
        ("critic", paths.checkpoint("critic", 0).parent),
        ("hf", paths.root / "hf"),
    ):
        for directory in _versions(parent):
            version = number_of(directory)
            recent = version > newest[role] - config.train.keep_checkpoints
            if not recent and version not in kept[role]:
                _remove(directory)
                deleted.append(directory)
    return deleted


def _read_by_repeatable(config: Config, manifest: Manifest) -> set[Key]:
    """Makers of what the repeatable steps read: of finished steps whose outputs no finished step has read.

    Until its export is finished, an actor phase may be repeated, and reads the actor before the newest one.
    """
    read = {key: set(predecessors(config.loop, key)) for key in manifest.keys}
    repeatable = manifest.keys - set().union(*read.values())
    return set().union(*(read[key] for key in repeatable))


def _versions(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    for leftover in parent.glob(f"*{DELETING}"):
        shutil.rmtree(leftover, ignore_errors=True)
    return [directory for directory in numbered(parent) if not directory.is_symlink()]


def _remove(directory: Path) -> None:
    """Out of sight first: a reader never meets half a checkpoint."""
    aside = directory.with_name(directory.name + DELETING)
    os.rename(directory, aside)
    shutil.rmtree(aside)
