"""The files of a run: pure functions of the run directory and the counters. No phase invents a path of its own.

    RUN/config.yaml                         what `t1 run` was started with, resolved
    RUN/manifest.json                       what is finished (manifest.py); the one before: manifest.previous.json
    RUN/tasks.json                          tasks that are played (environment.selection)
    RUN/rollouts/iter_0003/                 records of iteration 3 (trajectory.store)
    RUN/values/iter_0003/                   old values, advantages, returns (trajectory.sidecar)
    RUN/checkpoints/actor/iter_0002/        actor after 2 actor phases (torch_dist)
    RUN/checkpoints/critic/iter_0004/       critic after 4 critic phases
    RUN/hf/iter_0002/                       the actor's export for vLLM after 2 actor phases
    RUN/evaluations/iter_0002/              records of an evaluation of that export
    RUN/phases/iter_0003/actor/             result.json and logs of a phase; progress/ while it is in its middle
    RUN/model/, RUN/critic/                 what is left outside a training: by a fine-tuning, by a critic's warm-up

With W warm-up iterations, loop iteration i samples with policy max(0, i - W); policy 0 is `model.path` itself.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.errors import T1Error

# Files of a model's directory in Hugging Face's form; an export takes over what isn't weights.
TEMPLATE_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")  # settings, chat template, tokenizer
MODEL_PATTERNS = ("*.safetensors", *TEMPLATE_PATTERNS)
_NUMBERED = re.compile(r"iter_(\d{4,18})", re.ASCII)


def number_of(directory: str | Path) -> int | None:
    """The iteration or version that a directory of a run is named after; None for a name that no run gives."""
    name = Path(directory).name
    found = _NUMBERED.fullmatch(name)
    number = int(found[1]) if found else None
    return number if number is not None and name == _name(number) else None


def numbered(parent: str | Path) -> list[Path]:
    """The directories in `parent` that are named after an iteration or version, in order; those of other names aren't
    part of the run.
    """
    parent = Path(parent)
    found = [entry for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    return sorted((entry for entry in found if number_of(entry) is not None), key=number_of)


def within(path: str | Path, root: str | Path) -> Path:
    """`path` relative to `root`, by the names on the way as well as by where links lead.

    Raises:
        T1Error: it doesn't lie there, however one looks at it.
    """
    for inner in (Path(os.path.abspath(path)), Path(path).resolve()):
        for outer in (Path(os.path.abspath(root)), Path(root).resolve()):
            if inner.is_relative_to(outer):
                return inner.relative_to(outer)
    raise T1Error(f"this doesn't lie in {root}", where=str(path), remedy="name a path in the run directory")


def _name(number: int) -> str:
    return f"iter_{number:04d}"


@dataclass(frozen=True)
class RunPaths:
    root: Path

    @classmethod
    def of(cls, run_dir: str | Path) -> RunPaths:
        return cls(Path(run_dir).resolve())

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def rollouts(self, iteration: int) -> Path:
        return self.root / "rollouts" / _name(iteration)

    def values(self, iteration: int) -> Path:
        return self.root / "values" / _name(iteration)

    def checkpoint(self, role: str, version: int) -> Path:
        return self.root / "checkpoints" / role / _name(version)

    @property
    def warm_critic(self) -> Path:
        """Checkpoint that a warm-up on stored rollouts leaves in its own directory."""
        return self.root / "critic"

    def hf(self, policy: int, start: str | Path) -> Path:
        """Export of policy `policy`; policy 0 is the start model itself."""
        return Path(start).resolve() if policy == 0 else self.root / "hf" / _name(policy)

    def evaluation(self, policy: int) -> Path:
        return self.root / "evaluations" / _name(policy)

    def phase(self, iteration: int, phase: str) -> Path:
        return self.root / "phases" / _name(iteration) / phase

    def progress(self, iteration: int, phase: str) -> Path:
        """Checkpoints in the middle of a training phase; gone when it is over."""
        return self.phase(iteration, phase) / "progress"


@dataclass(frozen=True)
class Counters:
    """Which versions an iteration reads: derived, never stored."""

    iteration: int
    warmup_iterations: int

    @property
    def policy(self) -> int:
        """Policy (actor version) that samples in this iteration; the actor phase writes `policy + 1`."""
        return max(0, self.iteration - self.warmup_iterations)

    @property
    def critic(self) -> int:
        """Critic version read in this iteration; the critic phase writes `critic + 1`."""
        return self.iteration

    @property
    def is_warmup(self) -> bool:
        return self.iteration < self.warmup_iterations
