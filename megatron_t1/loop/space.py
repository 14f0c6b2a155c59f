"""Room on the disk for a phase, before it is started: estimated from what it wrote the last time, or from the model."""

from __future__ import annotations

import errno
import os
import shutil

from megatron_t1.config.dtypes import OPTIMIZER_BYTES, WIDTHS
from megatron_t1.config.inputs import CHECKPOINT_MARKER
from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.loop import reserve
from megatron_t1.loop.steps import Step
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.routes import route_row_bytes

FLOOR_BYTES = 256 * 2**20  # logs and what can't be foreseen
FLOOR_FILES = 2_000
GROWTH = 1.2  # a phase may write this much more than its last execution did
# ids 4, origin 1, turn 2, log-prob 4, whether routed 1; and of the exchange log: ids 4, log-prob 4, rounded up
TOKEN_BYTES = 24
VALUE_BYTES = 12  # value, advantage and return of a token
FILES_OF_AN_EPISODE = 2  # the record, and the name it is written under


def require_space(config: Config, manifest: Manifest, step: Step) -> None:
    """Raise T1Error when the run's file system has less room than the step is expected to need, or grants it less."""
    needed = FLOOR_BYTES + sum(
        max(0, expected_bytes(config, manifest, phase) - _saved_so_far(config, step.iteration, phase))
        for phase in step.phases
    )
    free = shutil.disk_usage(config.run.dir).free
    if free < needed:
        raise T1Error(
            f"the disk is too full for {step}: {free / 2**30:.2f} GiB free, about {needed / 2**30:.2f} GiB needed",
            where=config.run.dir,
            remedy="free space, lower train.keep_checkpoints, loop.keep_rollouts or loop.keep_exports, or move the "
            "run; finished steps are kept",
        )
    if code := reserve.refusal(config.run.dir, needed):
        raise T1Error(
            f"the file system refuses the space for {step}: {os.strerror(code)} ({errno.errorcode[code]}); about "
            f"{needed / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB are free for whom no quota limits",
            where=config.run.dir,
            remedy="`quota -s` (`lfs quota`, `mmlsquota`) shows the quota of the user, group or project: free some of "
            "it, lower train.keep_checkpoints, loop.keep_rollouts or loop.keep_exports, or move the run; finished "
            "steps are kept",
        )
    files = FLOOR_FILES + FILES_OF_AN_EPISODE * sum(_episodes(config, phase) for phase in step.phases)
    status = os.statvfs(config.run.dir)
    if status.f_files and status.f_favail < files:
        raise T1Error(
            f"the file system has too few free inodes for {step}: {status.f_favail}, about {files} needed",
            where=config.run.dir,
            remedy="delete files there, or move the run; finished steps are kept",
        )


def expected_bytes(config: Config, manifest: Manifest, phase: str) -> int:
    """What one execution of a phase may write: from its last one, or at the first from the model and the options.

    A first rollout is taken to fill every episode's context; a checkpoint has weights, master weights and moments.
    """
    last = next((step.output_bytes for step in reversed(manifest.finished) if step.phase == phase), None)
    if last is not None:
        return int(GROWTH * last * _checkpoints_at_once(config, phase))
    weights = sum(facts["size"] for name, facts in manifest.start_model.items() if name.endswith(".safetensors"))
    match phase:
        case "rollout" | "evaluation":
            return _tokens(config, phase) * (TOKEN_BYTES + _route_bytes(config, phase))
        case "export":
            return weights
        case "critic" | "actor":
            each = OPTIMIZER_BYTES[config.model.dtype] / WIDTHS[config.model.dtype]
            values = VALUE_BYTES * _tokens(config, "rollout") if phase == "critic" else 0
            return int(weights * (1 + each)) * _checkpoints_at_once(config, phase) + values
    return 0


def _checkpoints_at_once(config: Config, phase: str) -> int:
    """The one that a phase leaves, and those in its middle (training.progress): the newest, and a warm-up's best."""
    if phase not in ("critic", "actor"):
        return 1
    best = phase == "critic" and config.train.critic.warmup_holdout > 0
    return 1 + (getattr(config.train, phase).checkpoint_every > 0) + best


def _saved_so_far(config: Config, iteration: int, phase: str) -> int:
    """Bytes of the checkpoints in a phase's middle that are among those counted: one that goes on has them already."""
    found = RunPaths.of(config.run.dir).progress(iteration, phase).glob(f"step_*/{CHECKPOINT_MARKER}")
    complete = sorted(marker.parent for marker in found if marker.parent.suffix == "")
    counted = complete[::-1][: _checkpoints_at_once(config, phase) - 1]
    return sum(path.lstat().st_size for directory in counted for path in directory.rglob("*") if path.is_file())


def _episodes(config: Config, phase: str) -> int:
    if phase == "rollout":
        return config.rollout.tasks_per_iteration * config.rollout.samples_per_task
    return config.eval.attempts * config.eval.limit if phase == "evaluation" else 0


def _tokens(config: Config, phase: str) -> int:
    return _episodes(config, phase) * config.rollout.max_context


def _route_bytes(config: Config, phase: str) -> int:
    """Of one token's recorded experts."""
    if phase != "rollout" or not config.rollout.routes:
        return 0
    return route_row_bytes(config.model.architecture)
