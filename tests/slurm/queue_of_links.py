"""A Slurm that is a dictionary, and links of a chain run over it."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest

from megatron_t1.config.compose import absolute, compose
from megatron_t1.errors import T1Error
from megatron_t1.loop import chain, links, slurm_jobs
from megatron_t1.loop.launcher import Stopped
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.manifest import FinishedStep
from megatron_t1.paths import RunPaths


class Slurm:
    """Jobs by number; `refuses` is what sbatch says next."""

    def __init__(self):
        self.jobs: dict[int, dict[str, str]] = {1: {"JobState": "RUNNING", "kind": "this one"}}
        self.refuses = ""

    def submit(self, options, script, arguments, *, directory=None):
        if self.refuses:
            raise T1Error(self.refuses)
        self.options = list(options)
        number = 9 + len(self.jobs)
        self.jobs[number] = {"JobState": "PENDING", "Reason": "Dependency", "kind": arguments[-1]}
        return self.find(number)

    def find(self, job):
        return slurm_jobs.Job(job, self.jobs[job]) if job in self.jobs else None

    def cancel(self, job):
        self.jobs[job]["JobState"] = "CANCELLED"

    def end(self, job, state, **fields):
        """As Slurm shows a job that is over: by default one that a node worked on."""
        self.jobs[job] |= {"JobState": state, "Reason": "None", "NodeList": "n3", "BatchHost": "n3", "ExitCode": "0:0"}
        self.jobs[job] |= fields

    @property
    def waiting(self) -> list[tuple[int, str]]:
        return [(number, job["kind"]) for number, job in self.jobs.items() if job["JobState"] == "PENDING"]


@pytest.fixture
def slurm(monkeypatch):
    fake = Slurm()
    for name in ("submit", "find", "cancel"):
        monkeypatch.setattr(slurm_jobs, name, getattr(fake, name))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    return fake


@pytest.fixture(scope="module")
def setting():
    return compose(
        ["run.dir=somewhere", "cluster=slurm", "cluster.slurm.max_failures=2", "cluster.slurm.spare_links=0"]
    )


@pytest.fixture
def config(setting, tmp_path):
    value = copy.deepcopy(setting)
    value.run.dir = str(tmp_path / "run")
    value = absolute(value)
    links.Chain([], str(tmp_path)).write(value.run.dir)
    return value


def finish(config, *phases):
    """Record these phases of iteration 0."""
    manifest = new_manifest(config)
    manifest.finished = [FinishedStep(0, phase, "0" * 64, "l", {}, 1.0, 1, 0, 0, 0.0) for phase in phases]
    manifest.write(RunPaths.of(config.run.dir).manifest)


def link(config, kind="rollout", *, work=lambda: None):
    """Run a link whose work is a function; what it said."""
    said = []

    @contextmanager
    def begin():
        class Runner:
            @staticmethod
            def run(of_kind):
                work()

        yield Runner

    try:
        chain.run_link(config, kind, said.append, begin)
    except (T1Error, Stopped) as error:
        said.append(f"raised {error}")
    return "\n".join(said)


def fail(error):
    def work():
        raise error

    return work
