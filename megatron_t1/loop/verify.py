"""Every file of a run against what was recorded of it while it was written: `t1 verify`. Changes none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_t1 import atomic, sealed
from megatron_t1.config.compose import load_run_config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.fence import LAUNCH_FILE
from megatron_t1.loop import job_list, start_model
from megatron_t1.loop.manifest import differences
from megatron_t1.loop.outside import POLICY_FILE, phase_outside_the_loop
from megatron_t1.manifest import FinishedStep, Manifest, predecessor
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, missing_outputs
from megatron_t1.report.metrics import contradictions


@dataclass
class Verified:
    """What was found.

    Attributes:
        problems: one line for each file that isn't what was recorded, with its name.
        files, size: what was compared; size in bytes.
        retired: directories that are gone by policy.
    """

    problems: list[str] = field(default_factory=list)
    files: int = 0
    size: int = 0
    retired: int = 0


def verify_run(run_dir: str | Path) -> Verified:
    """Compare a run's files with its manifest, the phases' results, and the seals of both; in the directory of a
    fine-tuning or a critic's warm-up, what that left with its result.

    Raises:
        IncompleteError: there is no manifest that could be read, or the phase outside a training isn't finished.
    """
    paths, found = RunPaths.of(run_dir), Verified()
    if not Manifest.exists(paths.manifest):
        phase = phase_outside_the_loop(paths.root)
        if not phase:
            raise IncompleteError("there is no run", where=str(paths.root), remedy="name the run.dir of a `t1 run`")
        _outside(paths, phase, found)
        return found
    manifest = Manifest.read(paths.manifest)
    _books(paths, manifest, found)
    gone = {name for name in manifest.retired if not (paths.root / name).exists()}
    found.retired = len(gone)
    results = []
    for step in manifest.finished:
        result = _result(paths, step, found)
        if result is None:
            continue
        results.append(result)
        result.outputs = [file for file in result.outputs if not _below(file.path, gone)]
        found.problems += missing_outputs(result, paths.root, digests=True)
        found.files += len(result.outputs)
        found.size += sum(file.size for file in result.outputs)
    try:
        found.problems += contradictions(paths.root, results)
        found.files += 1
    except T1Error as error:
        found.problems.append(f"{paths.metrics.name}: {error.problem}")
    return found


def _books(paths: RunPaths, manifest: Manifest, found: Verified) -> None:
    """The files that nobody's result lists."""
    for path in (paths.manifest, predecessor(paths.manifest)):
        try:
            if path == paths.manifest or path.exists():
                Manifest.read_exactly(path)
                found.files += 1
        except IncompleteError as error:
            found.problems.append(f"{path.name}: {error.problem}")
    try:
        config = load_run_config(paths.root)
        found.problems += [f"config.yaml, {line.strip()}" for line in differences(manifest, config)]
        model = Path(config.model.path)
        found.problems += [f"{model}: {line}" for line in start_model.differences(model, manifest.start_model)]
        found.files += 1 + len(manifest.start_model)
    except T1Error as error:
        found.problems.append(f"config.yaml: {error.problem}")
    if manifest.tasks_sha256 and not _is(paths.tasks, manifest.tasks_sha256):
        found.problems.append(f"{paths.tasks.name}: it isn't the one that manifest.json names")
    if damage := job_list.damage(paths.root):
        found.problems.append(damage)
    launches = [paths.phase(*step.key) / LAUNCH_FILE for step in manifest.finished]
    for path in (paths.tasks, *launches):
        try:
            if path.exists():
                sealed.read(path)
                found.files += 1
        except (OSError, ValueError) as error:
            found.problems.append(f"{path.relative_to(paths.root)}: {error}")


def _result(paths: RunPaths, step: FinishedStep, found: Verified) -> PhaseResult | None:
    """A finished step's result, when it is the one that the manifest names."""
    path = paths.phase(*step.key) / RESULT_FILE
    try:
        result = PhaseResult.read(path.parent)
        found.files += 1
        if atomic.sha256_file(path) == step.result_sha256:
            return result
        problem = "it isn't the one that manifest.json names"
    except IncompleteError as error:
        problem = error.problem
    found.problems.append(f"{path.relative_to(paths.root)}: {problem}")
    return None


def _outside(paths: RunPaths, phase: str, found: Verified) -> None:
    """Of a phase outside a training: its options, its outputs, and the policy that it must have left alone."""
    directory = paths.phase(0, phase)
    result = PhaseResult.read(directory)
    found.problems += missing_outputs(result, paths.root, digests=True)
    found.files, found.size = 1 + len(result.outputs), sum(file.size for file in result.outputs)
    try:
        model = Path(load_run_config(paths.root).model.path)
        policy = sealed.read(directory / POLICY_FILE)
        found.problems += [f"{model}: {line}" for line in start_model.differences(model, policy)]
        found.files += 2 + len(policy)
    except T1Error as error:
        found.problems.append(f"config.yaml: {error.problem}")
    except (OSError, ValueError) as error:
        found.problems.append(f"{(directory / POLICY_FILE).relative_to(paths.root)}: {error}")


def _is(path: Path, digest: str) -> bool:
    try:
        return atomic.sha256_file(path) == digest
    except OSError:
        return False


def _below(path: str, directories: set[str]) -> bool:
    return any(path.startswith(f"{directory}/") for directory in directories)
