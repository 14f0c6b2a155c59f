"""A rollout by the phase itself, with a scripted policy behind the engine's protocol, and copies of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_t1 import atomic
from megatron_t1.config.compose import save
from megatron_t1.config.schema import Config
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.manifest import FinishedStep
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult
from megatron_t1.rollout.phase import run_phases
from megatron_t1.trajectory.exchange import log_names
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.store import RolloutStore
from tests.rollout.conftest import FakeServer, tiny_model  # noqa: F401

ROLLOUT = "rollouts/iter_0000"


def make_config(run_dir: Path, tasks: Path, model: Path) -> Config:
    for kind, count in (("train", 3), ("held_out", 2)):
        for number in range(count):
            content = TaskContent(tests={"test.sh": (b"true\n", 0o755)})
            task = Task(f"{kind}-{number}", f"create the file {number}", content=content, baseline=0)
            write_task(task, tasks / kind / task.name)
    config = Config()
    config.run.dir, config.model.path = str(run_dir), str(model)
    config.env.tasks, config.eval.tasks = str(tasks / "train"), str(tasks / "held_out")
    config.env.sandbox._target_ = "tests.rollout.conftest.PassingSandbox"
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task = 3, 2
    return config


def keep_books(config: Config, results: dict[str, PhaseResult]) -> None:
    """What the loop writes after phases of iteration 0: their results, config.yaml and the manifest."""
    paths = RunPaths.of(config.run.dir)
    save(config, paths.config)
    manifest = new_manifest(config)
    for phase, result in results.items():
        result.write(paths.phase(0, phase))
        digest = atomic.sha256_file(paths.phase(0, phase) / RESULT_FILE)
        size = sum(file.size for file in result.outputs)
        manifest.finished.append(FinishedStep(0, phase, digest, "x", {}, 1.0, 1, len(result.outputs), size, 0.0))
    manifest.write(paths.manifest)


@pytest.fixture(scope="session")
def played(tiny_model, tmp_path_factory):  # noqa: F811
    """A run directory with a sealed rollout of 6 episodes and an evaluation of 4; not to be changed."""
    root = tmp_path_factory.mktemp("played")
    config = make_config(root / "run", root / "tasks", tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_t1.rollout.phase.VllmServer", FakeServer)
        keep_books(config, run_phases(config, 0, ("rollout", "evaluation")))
    return root / "run"


@pytest.fixture
def run(played, tmp_path) -> Path:
    """A copy of the run to damage."""
    shutil.copytree(played, tmp_path / "run")
    return tmp_path / "run"


class Copy:
    """A rollout directory whose records are rewritten, honestly sealed again, with one of them damaged."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.records = {record.header.trajectory_id: record for record in RolloutStore(directory)}
        self.name = sorted(self.records)[1]

    @property
    def record(self) -> Trajectory:
        return self.records[self.name]

    @property
    def log(self) -> Path:
        (name,) = log_names(self.directory)
        return self.directory / name

    def write(self, changed: Trajectory | None = None) -> None:
        if changed is not None:
            self.records[self.name] = changed
        for path in self.directory.glob("*.safetensors"):
            path.unlink()
        RolloutStore(self.directory).add_many(self.records.values())


@pytest.fixture
def copy(run) -> Copy:
    """One whose phases' results are gone, so that only what is in the directory speaks."""
    shutil.rmtree(run / "phases")
    return Copy(run / ROLLOUT)


def edited(array: np.ndarray, at, value) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array
