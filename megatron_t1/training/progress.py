"""Checkpoints in the middle of a training phase, and how the phase goes on from one.

    RUN/phases/iter_0003/critic/progress/step_0000012/    a checkpoint after 12 mini-batches (model.checkpoint)
    RUN/phases/iter_0003/critic/progress/fields_0000008/  per-token numbers that the updates since then read (a sidecar)

A phase that goes on is one that was never interrupted, to the bit: model, optimizer and its counter, random generators,
position in the data, metrics so far, and what was computed before the first update, by the model of that time. The
newest complete checkpoint is kept, and that of a warm-up's best critic; both are gone when the phase's result is
written. A damaged one is passed over, by name; one of another configuration or other records is an error.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_t1 import sealed
from megatron_t1.atomic import TEMPORARY_SUFFIX
from megatron_t1.config.compose import flatten
from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.model.checkpoint import MARKER_FILE, files_of, read_marker, read_own, read_state
from megatron_t1.model.collective import gather_objects, on_first_rank, together
from megatron_t1.model.directories import publish_directory
from megatron_t1.model.random_state import random_state, restore_random_state
from megatron_t1.paths import MODEL_PATTERNS, RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, WrittenFile, missing_outputs, summarised
from megatron_t1.ppo.sums import Sums
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.samples import Sample, attach
from megatron_t1.trajectory.sidecar import read_sidecar

RANDOM = "random.safetensors"
_STEP = re.compile(r"step_(\d{7,})", re.ASCII)
# Options that decide what the updates of every role compute; those of the role itself come on top.
_DECIDING = (
    "run.seed model loop.warmup_iterations env.timed_out_policy rollout.temperature rollout.top_p "
    "rollout.tasks_per_iteration rollout.samples_per_task train.capacity train.gae train.replay train.loss_denominator "
    "train.head_dtype train.router_dtype"
).split()
_FREE = ("checkpoint_every", "reset_optimizer", "nonfinite", "max_gap", "path", "name", "start", "rollouts")
_FREE += ("demonstrations", "measure_gap", "load", "capacity")


class Progress:
    """Where one role's phase stands, on every rank the same.

    Args:
        role: of the phase.
        section: of `train` that holds its options: actor, critic or sft.
        origin: checkpoint or Hugging Face directory that the phase's model comes from.
        samples: what it trains on, with the fields that came from files.
        keeps_best: whether the phase looks for a best critic, and saves it whatever `checkpoint_every` says.
        keep_steps: whether the sums of all steps are wanted, or of the last one only.

    Attributes:
        taken: mini-batches so far, skipped ones counted.
        steps: the sums of each.
        history: a warm-up's measurements.
        start: what the phase found before its first update: `metrics` and whatever else it wants to know again.
    """

    def __init__(
        self,
        context: Context,
        role: str,
        section: str,
        origin: Path,
        samples: Sequence[Sample],
        *,
        keeps_best: bool = False,
        keep_steps: bool = True,
    ):
        self.context, self.role, self.keep_steps = context, role, keep_steps
        self.every = getattr(context.config.train, section).checkpoint_every
        self.saves = self.every > 0 or keeps_best
        self.directory = context.paths.progress(context.iteration, role)
        self.identity = _identity(context, section, origin, samples)
        self.taken = 0
        self.steps: list[Sums] = []
        self.history: list[dict[str, float]] = []
        self.start: dict[str, Any] = {}
        self.best: int | None = None  # step whose checkpoint is the best critic so far
        self._fields: dict[str, Any] | None = None  # where the kept fields are
        self._inputs: list[dict[str, Any]] = []  # files that the phase has written before its first update
        self._saved_at = 0

    # -- while the phase runs -----------------------------------------------------------------------------------------

    def began(self, **start: Any) -> None:
        """Note what the phase found before its first update: JSON values, equal on all ranks."""
        self.start = start

    def keep(self, samples: Sequence[Sample], names: Iterable[str], *, directory: Path | None = None) -> None:
        """Keep fields as they are now, for the updates that follow. Collective; nothing where the phase never saves.

        Args:
            samples: all of them, on every rank.
            directory: a sidecar of this phase that has them already; None: one is written.
        """
        names = sorted(names)
        if not names or not self.saves:
            return
        if directory is None:
            directory = self.directory / f"fields_{self.taken:07d}"
            own = samples[self.context.replica :: self.context.replica_count]
            self.context.write_fields(directory, own, names)
            files = self._written(directory)
        else:
            files = self._inputs = self._written(directory)
        place = str(directory.relative_to(self.context.paths.root))
        self._fields = {"directory": place, "names": names, "files": files}

    def took(self, sums: Sums) -> None:
        """Count a mini-batch."""
        self.taken += 1
        if not self.keep_steps:
            self.steps.clear()
        self.steps.append(sums)

    def save_if_due(self, engine: Engine) -> None:
        if self.every and self.taken >= self._saved_at + self.every:
            self.save(engine)

    def save_best(self, engine: Engine) -> None:
        """Keep the critic as it is now as the best so far."""
        self.best = self.taken
        self.save(engine)

    def save(self, engine: Engine) -> None:
        """A checkpoint of the phase as it is now; earlier ones that it doesn't need are deleted. Collective."""
        state = {
            "identity": self.identity,
            "layout": self._layout,
            "taken": self.taken,
            "steps": [{name: pair.tolist() for name, pair in sums.items()} for sums in self.steps],
            "history": self.history,
            "start": self.start,
            "best": self.best,
            "fields": self._fields,
            "inputs": self._inputs,
            "skipped": engine.skipped,
        }
        with self.context.timed("checkpoint"):
            engine.save(
                self._step(self.taken), self.taken, relative_to=self.context.paths.root,
                more={"progress": state}, own={RANDOM: random_state()},
            )  # fmt: skip
            self._saved_at = self.taken
            on_first_rank(self._prune)

    def publish_best(self, final: Path) -> list[WrittenFile]:
        """Make the best critic's checkpoint what the phase leaves; its files. Collective.

        It stays among the phase's own, which may still go on from it, until the result is written.
        """

        def publish() -> None:
            partial = final.with_name(final.name + TEMPORARY_SUFFIX)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._step(self.best), partial, copy_function=_link)
            publish_directory(partial, final)

        on_first_rank(publish)
        return files_of(final, relative_to=self.context.paths.root)

    # -- going on -----------------------------------------------------------------------------------------------------

    def resumed(self, build: Callable[[], Engine], samples: Sequence[Sample]) -> Engine | None:
        """An engine that stands where the newest usable checkpoint does, as this object then does; None: there is none.

        Collective. Fills the samples' fields that were kept.

        Args:
            build: the engine, with weights that mean nothing.

        Raises:
            MismatchError: the checkpoint belongs to other options, records or another start; names every difference.
        """
        engine = None
        for step in gather_objects(self._steps())[0]:
            place = self._step(step)
            try:
                state = together(lambda place=place: self._usable(place))[0]
                engine = engine or build()
                engine.load(place)
                self._take_over(state, place, engine, samples)
            except IncompleteError as error:
                self.context.say(f"the checkpoint {place} is passed over: {error.problem}")
                continue
            self.context.say(f"going on in the middle of the phase, after {self.taken} mini-batches")
            return engine
        del engine
        gc.collect()  # the phase builds its own; a model's cycles would keep this one beside it
        return None

    def _usable(self, place: Path) -> dict[str, Any]:
        """The state of a checkpoint that this phase can go on from. Ranks share the reading of other files."""
        state = read_state(place)["progress"]
        stored = state["identity"]
        different = [
            f"  {name}: the checkpoint has {stored.get(name)!r}, now {self.identity.get(name)!r}"
            for name in sorted(stored.keys() | self.identity.keys())
            if not _is_free(name) and stored.get(name) != self.identity.get(name)
        ]
        if different:
            raise MismatchError(
                "the checkpoint in the middle of this phase is of another one:\n" + "\n".join(different),
                where=str(place),
                remedy=f"start it as it was started; or delete {self.directory}, and the phase begins anew",
            )
        files = [*state["inputs"], *(state["fields"] or {"files": []})["files"]]
        share = [WrittenFile(**file) for file in files[dist.get_rank() :: dist.get_world_size()]]
        wrong = missing_outputs(PhaseResult(self.role, 0, outputs=share), self.context.paths.root, digests=True)
        if state["best"] not in (None, state["taken"]) and not (self._step(state["best"]) / MARKER_FILE).is_file():
            wrong.append(f"{self._step(state['best'])}: the best critic so far is missing")
        if wrong:
            raise IncompleteError(f"what it needs has changed: {summarised(wrong)}", where=str(place))
        return state

    def _take_over(self, state: dict[str, Any], place: Path, engine: Engine, samples: Sequence[Sample]) -> None:
        if state["layout"] == self._layout:
            together(lambda: restore_random_state(read_own(place, RANDOM), where=str(place)))
        else:
            self.context.say("the layout has changed since: sums are added in another order")
        if state["fields"]:
            together(lambda: _attach_kept(self.context.paths.root, state["fields"], samples))
        self.taken = self._saved_at = state["taken"]
        self.steps = [{n: torch.tensor(p, dtype=torch.float64) for n, p in sums.items()} for sums in state["steps"]]
        self.history, self.start, self.best = state["history"], state["start"], state["best"]
        self._fields, self._inputs = state["fields"], state["inputs"]
        engine.skipped = state["skipped"]

    # -- files --------------------------------------------------------------------------------------------------------

    def _written(self, directory: Path) -> list[dict[str, Any]]:
        """Files of a directory with size and digest, which the first rank computes."""
        files = self.context.written(directory) if self.context.is_writer else []
        return [asdict(file) for file in gather_objects(files)[0]]

    @property
    def _layout(self) -> dict[str, Any]:
        return asdict(self.context.config.layout)

    def _step(self, taken: int) -> Path:
        return self.directory / f"step_{taken:07d}"

    def _steps(self) -> list[int]:
        """Steps with a checkpoint, the newest first."""
        found = (_STEP.fullmatch(path.name) for path in self.directory.glob("step_*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _prune(self) -> None:
        kept = {self._step(step) for step in (self.taken, self.best) if step is not None}
        if self._fields:
            kept.add(self.context.paths.root / self._fields["directory"])
        for path in self.directory.iterdir():
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def forget_progress(paths: RunPaths, *, but: Path | None = None) -> None:
    """Delete the checkpoints in the middle of phases that are finished, in any iteration. What can't be deleted yet,
    because a rank on another node has it open (NFS), is tried again by the next phase.

    Args:
        but: the one of a phase that runs now, whose result may be an earlier attempt's.
    """
    for leftover in paths.root.glob("phases/*/*/progress.deleting"):
        shutil.rmtree(leftover, ignore_errors=True)
    for directory in paths.root.glob("phases/*/*/progress"):
        if directory != but and (directory.parent / RESULT_FILE).exists():
            aside = directory.with_name("progress.deleting")
            with suppress(OSError):
                os.rename(directory, aside)
            shutil.rmtree(aside, ignore_errors=True)


def _identity(context: Context, section: str, origin: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """What must be equal for a phase to go on, by name."""
    prefixes = (*_DECIDING, f"train.{section}")
    options = {
        key: value
        for key, value in flatten(context.config).items()
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes) and not _is_free(key)
    }
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.key.encode())
        if "advantages" in sample.fields:
            digest.update(sample.fields["advantages"].tobytes())
    records = f"{len(samples)} records, {digest.hexdigest()[:16]}"
    return {**options, "records": records, "start": _digest_of(origin)}


def _attach_kept(root: Path, fields: dict[str, Any], samples: Sequence[Sample]) -> None:
    sidecar = read_sidecar(root / fields["directory"])
    attach([sample for sample in samples if sample.key in sidecar], sidecar, fields["names"])


def _link(source: str, target: str) -> None:
    """A second name of a file; a second file where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _is_free(option: str) -> bool:
    section, _, name = option.rpartition(".")
    return bool(section) and name in _FREE  # "start" and "records" are no options


def _digest_of(directory: Path) -> str:
    """Of a checkpoint: its marker's; of a Hugging Face directory: of the names and sizes of a model's files."""
    if (directory / MARKER_FILE).is_file():
        return f"checkpoint {sealed.digest(read_marker(directory))[:16]}"
    found = {path for pattern in MODEL_PATTERNS for path in directory.glob(pattern) if path.is_file()}
    names = sorted(f"{path.name} {path.stat().st_size}" for path in found)
    return f"model {hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:16]}"
