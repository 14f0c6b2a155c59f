"""Every kind of file that a training writes, with a bit turned and cut short at several places.

Who reads the file says its name, or goes on from the last good one and says that; `t1 verify` names it, too.
Checkpoints in the middle of a phase: test_progress. Files that are lost: tests/loop/test_runner.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from functools import partial
from math import isfinite

import pytest

from megatron_t1 import sealed
from megatron_t1.atomic import sha256_file
from megatron_t1.config.compose import load_run_config
from megatron_t1.config.schema import Config
from megatron_t1.environment.selection import kept_choice
from megatron_t1.environment.task import Task
from megatron_t1.errors import IncompleteError, T1Error, readable
from megatron_t1.fence import LAUNCH_FILE
from megatron_t1.loop import job_list, slurm_jobs
from megatron_t1.loop.links import CHAIN_FILE, Chain
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.loop.runner import read_launch
from megatron_t1.loop.verify import verify_run
from megatron_t1.manifest import FinishedStep, Manifest, predecessor
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, require_recorded
from megatron_t1.report.metrics import MetricsWriter, read_metrics
from megatron_t1.trajectory.exchange import ExchangeLog
from megatron_t1.trajectory.store import RolloutStore
from tests.training.synthetic import episode, run_config, write_rollout

pytestmark = pytest.mark.slow
PHASES = ("rollout", "critic", "actor", "export")
SINGLE = "loose-0"  # a record that was not sealed yet


@dataclass(frozen=True)
class Run:
    """A training of one iteration, by the phases themselves, as the loop records it."""

    config: Config
    paths: RunPaths
    chunks: dict[str, list]  # role -> model that its checkpoints fit

    def tasks(self) -> None:
        kept_choice(self.paths.tasks, self.config.env, self.config.rollout.selection, {"tasks": {"a": Task("a", "do")}})


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, backend) -> Run:
    from megatron_t1.model.build import build_model
    from megatron_t1.training.context import Context
    from megatron_t1.training.main import _phase
    from tests.tiny_model import tiny_config

    config = run_config(tmp_path_factory.mktemp("damaged") / "run", model)
    paths = RunPaths.of(config.run.dir)
    with ExchangeLog(paths.rollouts(0)) as log:
        log.session("task0-0", 0)
    write_rollout(paths.rollouts(0), model)
    RolloutStore(paths.rollouts(1)).add(episode(SINGLE))
    chunks = {
        role: build_model(tiny_config(), backend, kind, initialize=False)
        for role, kind in (("actor", "policy"), ("critic", "value"))
    }
    found = Run(config, paths, chunks)
    found.tasks()
    manifest = new_manifest(load_run_config(paths.root))
    manifest.tasks_sha256 = sha256_file(paths.tasks)
    writer = MetricsWriter(paths)
    for phase in PHASES:
        directory = paths.phase(0, phase)
        if phase != "rollout":
            _phase(phase)(Context(config, backend, 0)).write(directory)
        sealed.write(directory / LAUNCH_FILE, {"launch": phase, "attempt": 1, "inputs": {}})
        result = PhaseResult.read(directory)
        writer.append(result, seconds=1.0)
        manifest.finished.append(FinishedStep.of(result, directory, launch=phase, inputs={}, seconds=1.0, attempts=1))
        manifest.write(paths.manifest)
    writer.close()
    Chain(["loop.iterations=1"], "/somewhere").write(paths.root)
    for job in (7, 8):
        slurm_jobs.note(paths.root, job, event="submitted", kind="train")
    assert verify_run(paths.root).problems == []
    return found


def load(run: Run, role: str) -> None:
    from megatron_t1.model.checkpoint import load_checkpoint

    load_checkpoint(run.paths.checkpoint(role, 1), run.chunks[role], None)


def previous_manifest(run: Run) -> None:
    """The newest is damaged: what lies beside it is taken, and says so on stderr."""
    before = Manifest.read_exactly(predecessor(run.paths.manifest))
    if Manifest.read(run.paths.manifest).keys == before.keys:
        raise IncompleteError("going on from the one before", where=str(run.paths.manifest))


def repeated(run: Run) -> None:
    """A step's launch that can't be read: what it left isn't adopted."""
    if not read_launch(run.paths.phase(0, "actor")):
        raise IncompleteError("not adopted", where=str(run.paths.phase(0, "actor") / LAUNCH_FILE))


def played_again(run: Run) -> None:
    for error in RolloutStore(run.paths.rollouts(1)).set_aside_damaged().values():
        shutil.rmtree(run.paths.rollouts(1))  # test: the copy of it is put back
        raise error


def notes(run: Run) -> None:
    """The jobs of other lines stay known, and `t1 slurm status` says how many can't be read; who cuts off whole lines
    leaves no trace.
    """
    known = [line["job"] for line in slurm_jobs.noted(run.paths.root)]
    assert known in ([7, 8], [7], [8], [])
    whole = (run.paths.root / slurm_jobs.JOBS_FILE).read_bytes().endswith(b"\n")
    if job_list.damage(run.paths.root) or known != [7, 8] or not whole:  # the next note begins a line
        raise IncompleteError("a job may be missing", where=str(run.paths.root / slurm_jobs.JOBS_FILE))


def metrics(run: Run) -> None:
    """A line that was lost is taken from its step's own result; `t1 verify` tells."""
    found = {(line["iteration"], line["phase"]): line["metrics"] for line in read_metrics(run.paths.root)}
    for phase in PHASES:
        result = PhaseResult.read(run.paths.phase(0, phase))
        assert found[0, phase] == {name: value if isfinite(value) else None for name, value in result.metrics.items()}
    if run.paths.metrics.read_bytes().count(b"\n") < len(PHASES):
        raise IncompleteError("taken from the results", where=str(run.paths.metrics))


def recorded(phase: str, directory: str):
    return lambda run: require_recorded(run.paths, 0, phase, run.paths.root / directory)


# Where the files are, who reads them, and whether `t1 verify` does.
KINDS = {
    "manifest": ("manifest.json", previous_manifest, True),
    "manifest before": (
        "manifest.previous.json", lambda run: Manifest.read_exactly(predecessor(run.paths.manifest)), True),
    "options": ("config.yaml", lambda run: load_run_config(run.paths.root), True),
    "choice of tasks": ("tasks.json", Run.tasks, True),
    "launch": (f"phases/iter_0000/actor/{LAUNCH_FILE}", repeated, True),
    "result": (
        f"phases/iter_0000/critic/{RESULT_FILE}", lambda run: PhaseResult.read(run.paths.phase(0, "critic")), True),
    "metrics": ("metrics.jsonl", metrics, True),
    "record": (f"rollouts/iter_0001/{SINGLE}.safetensors", played_again, False),
    "sealed records": ("rollouts/iter_0000/*.safetensors", recorded("rollout", "rollouts/iter_0000"), True),
    "exchange log": ("rollouts/iter_0000/exchange.*", recorded("rollout", "rollouts/iter_0000"), True),
    "values": ("values/iter_0000/*", recorded("critic", "values/iter_0000"), True),
    "export": ("hf/iter_0001/*", recorded("export", "hf/iter_0001"), True),
    "actor": ("checkpoints/actor/iter_0001/*", partial(load, role="actor"), True),
    "critic": ("checkpoints/critic/iter_0001/*", partial(load, role="critic"), True),
    "chain": (CHAIN_FILE, lambda run: Chain.read(run.paths.root), False),
    "jobs": (slurm_jobs.JOBS_FILE, notes, False),
}  # fmt: skip


def damages(data: bytes, generator: random.Random):
    """A bit turned in the head, in the last byte but one and in between; cut to nothing, in the middle, by a byte."""
    for place in (0, 9, len(data) // 3, len(data) // 2, len(data) - 2, generator.randrange(len(data))):
        changed = bytearray(data)
        changed[min(place, len(data) - 1)] ^= 1 << generator.randrange(8)
        yield f"bit turned at {place}", bytes(changed)
    for size in (0, len(data) // 2, len(data) - 1):
        yield f"cut to {size}", data[:size]


def same(one: bytes, other: bytes) -> bool:
    """JSON has white space in which one may become another."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_is_silent(run, kind, tmp_path):  # Automodel#3261 KempnerForge#102
    pattern, read, verified = KINDS[kind]
    files = sorted(path for path in run.paths.root.glob(pattern) if path.is_file())
    assert files
    generator = random.Random(kind)
    for path in files:
        whole = path.read_bytes()
        for what, data in damages(whole, generator):
            path.write_bytes(data)
            if same(data, whole):
                continue
            with pytest.raises((T1Error, OSError)) as caught:
                read(run)
                pytest.fail(f"{path}, {what}: silent")
            said = str(readable(caught.value))
            assert path.name in said or str(path.parent) in said, (path, what, said)
            if verified:
                assert any(path.name in line for line in verify_run(run.paths.root).problems), (path, what)
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole)
        read(run) if kind != "manifest" else Manifest.read_exactly(path)
