"""One training on the virtual cluster, as its user sees it: handed in, looked at, handed in again; what it came to."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs import ROOT, SCRIPT, TINY, environment, processes_of, user_environment
from virtual_cluster import VirtualCluster

from megatron_t1.config.compose import compose
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.runner import read_launch
from megatron_t1.loop.steps import all_steps
from megatron_t1.manifest import Key, Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE
from megatron_t1.processes import marked

# Rollout, one training phase of three roles, evaluation: the kinds alternate, and every file is made once.
LOOP = (
    "loop.warmup_iterations=0 loop.iterations=1 loop.evaluate_first=false rollout.tasks_per_iteration=2 "
    "rollout.samples_per_task=3 eval.limit=2 rollout.seeded=true rollout.engine.chunked_prefill=false "
    "train.actor.old_logprobs=recomputed cluster.backend=cpu"
).split()
RELEASE_AFTER_S = 20.0  # a job whose start failed: longer than the run itself takes where something of it is alive
FLAGS = {"chain": "--chain", "heterogeneous": "--het"}
PARTITIONED = (
    'cluster.rollout.sbatch_args=["--partition=sampling"]',
    'cluster.train.sbatch_args=["--partition=training"]',
    "cluster.rollout.nodes=1",
)


@dataclass
class Training:
    """A run directory, and the jobs that work on it.

    Attributes:
        inputs: directory of tasks and model.
        mode: "one job", "chain" or "heterogeneous".
        light: phases of tests stand in for vLLM and Megatron: what is looked at is the loop, its jobs and files.
        limit_s: for anything that is waited for.
        linger: name of the phase that works until `hurry`.
    """

    cluster: VirtualCluster
    directory: Path
    inputs: Path
    mode: str
    light: bool
    limit_s: float
    linger: str = ""
    others: list["Training"] = field(default_factory=list)  # that ran at the same time
    paths: RunPaths = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        # Sandboxes run as another user, who may not enter pytest's own directories.
        self.scratch = self.cluster.base / self.directory.name
        self.scratch.mkdir(exist_ok=True)
        self.paths = RunPaths.of(self.directory / "run")

    @property
    def words(self) -> list[str]:
        inputs = self.inputs
        return [
            *TINY, *LOOP, "run.dir=run", f"model.path={inputs / 'model'}", f"env.tasks={inputs / 'tasks/train'}",
            f"eval.tasks={inputs / 'tasks/held_out'}", "cluster.slurm.stop_lead_s=60",
            *(PARTITIONED if self.mode != "one job" else ("cluster.rollout.nodes=2",)),
        ]  # fmt: skip

    @property
    def expected(self) -> list[Key]:
        config = compose(["experiment=ppo_122b", *TINY, *LOOP, "run.dir=run"])
        return [key for step in all_steps(config.loop) for key in step.keys]

    @property
    def environment(self) -> dict[str, str]:
        light = {
            **environment(),
            "BEHAVIOUR": f"linger:{self.linger}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/slurm/driven"), environment()["PYTHONPATH"]]),
        }
        return {**self.cluster.env, **user_environment(), "TMPDIR": str(self.scratch), **(light if self.light else {})}

    def another(self) -> "Training":
        """One like this, with the same inputs and seeds, in a directory of its own."""
        other = replace(self, directory=self.directory.with_name(f"{self.directory.name}_other"), others=[])
        self.others.append(other)
        return other

    def submit(self) -> None:
        """The first time and whenever it has stopped: always the same line."""
        if self.mode == "one job":
            header = ("-N2", "--gpus-per-node=0", "--time=20", "--signal=B:TERM@60", f"--output={self.log}")
            self.cluster.submit(*header, str(SCRIPT), *self.words, cwd=self.directory, env=self.environment)
            return
        line = [
            sys.executable, "-m", "megatron_t1.cli", "slurm", "submit", FLAGS[self.mode], "experiment=ppo_122b",
            "cluster=slurm", *self.words, "cluster.slurm.time=20",
        ]  # fmt: skip
        done = subprocess.run(line, cwd=self.directory, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def log(self) -> Path:
        return self.directory / "job-%j.log"

    def said(self) -> str:
        """All logs of its jobs."""
        logs = [*self.directory.glob("job-*.log"), *self.paths.root.glob("slurm/*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(logs))

    def jobs(self) -> list[int]:
        return sorted({line["job"] for line in slurm_jobs.noted(self.paths.root) if line["job"]})

    def handed_in(self) -> list[int]:
        """Links that were handed in by others."""
        lines = slurm_jobs.noted(self.paths.root)
        first = next((index for index, line in enumerate(lines) if line["event"] == "began"), len(lines))
        return [line["job"] for line in lines[first:] if line["event"] == "submitted"]

    def running(self) -> int:
        """The job in which its loop is working."""
        return next((job for job in reversed(self.jobs()) if self.cluster.state(job) == "RUNNING"), 0)

    def nodes(self) -> list[str]:
        """Of the running job, its batch host first; in a heterogeneous one those of rollout's component."""
        shown = self.cluster.shown(self.running(), "NodeList")
        return self.cluster.output("scontrol", "show", "hostnames", shown).split()

    def finished(self) -> list[Key]:
        path = self.paths.manifest
        return [step.key for step in Manifest.read(path).finished] if path.exists() else []

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 0.0) -> None:
        """Until the condition holds; meanwhile its user does what `t1 slurm status` says of jobs that are held."""
        looked = time.monotonic()

        def holds() -> bool:
            nonlocal looked
            if time.monotonic() > looked + RELEASE_AFTER_S:
                looked = time.monotonic()
                self._release_held()
            return bool(condition())

        try:
            self.cluster.wait(holds, seconds or self.limit_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()[-6000:]}\n{self.cluster.output('squeue')}") from error

    def _release_held(self) -> None:
        for job in set(self.jobs()) & self.cluster.queue():
            if self.cluster.shown(job, "Reason") == slurm_jobs.LAUNCH_FAILED:
                line = [sys.executable, "-m", "megatron_t1.cli", "slurm", "status", str(self.paths.root)]
                said = subprocess.run(line, env=self.environment, capture_output=True, text=True).stdout
                assert f"`scontrol release {job}`" in said, said
                self.cluster.output("scontrol", "release", str(job))

    def wait_for(self, phase: str) -> None:
        """Until a phase is at work: in the middle of its episodes, or after its processes have met."""
        directory = self.paths.phase(0, phase)
        self.wait(lambda: read_launch(directory), f"{phase} to begin")
        if self.light:
            self.wait(lambda: (0, phase) in self.executions(), f"{phase} to work")
        elif phase == "rollout":
            self.wait(lambda: any(self.paths.rollouts(0).glob("*.safetensors")), "the first episode")
        else:
            log = directory / "logs" / f"attempt_{read_launch(directory)['attempt']}" / "rank_0.log"
            self.wait(lambda: log.exists() and f"{phase} started from" in log.read_text(), f"{phase} to work")
        if not self.light:
            self._signal_workers(signal.SIGSTOP)
        assert not (directory / RESULT_FILE).exists(), f"{phase} was over before anything could happen to it"

    def executions(self) -> list[Key]:
        """Light phases that were begun."""
        path = self.paths.root / "executions.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(iteration, phase) for iteration, phase, _ in lines]

    def hurry(self) -> None:
        """Let the phase that `wait_for` has found at work, and holds there, go on."""
        if not self.light:
            self._signal_workers(signal.SIGCONT)
        elif self.linger:
            (self.paths.root / "hurry").touch()

    def _signal_workers(self, which: signal.Signals) -> None:
        """A real phase takes seconds here, less than Slurm needs to miss a node: stopped, it works until `hurry`."""
        from tests.chaos.kills import kind_of, words_of

        for pid in marked("SLURM_CONF", self.cluster.env["SLURM_CONF"]):
            with contextlib.suppress(OSError):
                words = words_of(str(pid))
                if kind_of(words) in ("rank", "rollout worker") and str(self.paths.root) in words:
                    os.kill(pid, which)

    def finish(self) -> None:
        """Until the training is done, and nothing of it is left."""
        self.wait(lambda: self.finished() == self.expected, "the training's end")
        own = set(self.jobs())
        self.wait(lambda: not own & self.cluster.queue(), "an empty queue", 60)
        conf = self.cluster.env["SLURM_CONF"]
        left = lambda: {pid: line for job in own for pid, line in processes_of(job, conf).items()}  # noqa: E731
        self.wait(lambda: not left(), f"the end of {left()}", 60)
        assert "Traceback" not in self.said(), self.said()
        assert str(self.scratch) not in Path("/proc/mounts").read_text()

    def outcome(self) -> dict[str, object]:
        """What must be equal in two trainings, however they were disturbed."""
        if self.light:
            outputs = {path.name: path.read_text() for path in (self.paths.root / "outputs").iterdir()}
            return {"steps": self.finished(), "outputs": outputs}
        from tests.chaos.comparison import outcome

        return outcome(self.paths)

    def intended(self) -> dict[str, object]:
        """The outcome of a light training, which follows from its configuration."""
        outputs = {f"{iteration}-{phase}": f"{phase} of {iteration}" for iteration, phase in self.expected}
        return {"steps": self.expected, "outputs": outputs}

    def distance(self, other: "Training") -> float:
        """Of its weights and optimizer state from another training's, over the largest of each tensor.

        Raises:
            AssertionError: they differ although the records are equal, or by more than what ties in sampling explain.
        """
        from tests.chaos.comparison import difference

        found = difference(self.paths, other.paths)
        return max(found.weights, found.optimizer)
