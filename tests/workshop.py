"""`t1` as a user starts it, at the smallest size: one directory, whose processes can be told from all others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from megatron_t1.trajectory.store import RolloutStore

ROOT = Path(__file__).resolve().parent.parent
MARK = "T1_TEST_MARK"
SIZES = (
    "generate.train=12 generate.held_out=6 generate.demonstrations=150 generate.workers=4 "
    "train.sft.tokens=30000 train.sft.holdout=10 train.critic.minibatches=2 train.critic.warmup_epochs=1 "
    "loop.warmup_iterations=1 loop.iterations=1 rollout.tasks_per_iteration=4 rollout.samples_per_task=3 "
    "rollout.engine.omp_threads=1 eval.attempts=2"
).split()
SEEDED = ("rollout.seeded=true", "rollout.engine.chunked_prefill=false")


class Workshop:
    """One directory in which `t1` is used; every process started from here carries a mark.

    Args:
        tasks: another workshop whose tasks and demonstrations are used; None: this one's own.
        seeded: whether sampling is; vLLM caches a delta net's state with chunked prefill only, which rules seeds out.
    """

    def __init__(self, directory: Path, *, model: str = "tiny", tasks: Workshop | None = None, seeded: bool = True):
        self.directory, self.mark = directory, uuid.uuid4().hex
        shared = directory if tasks is None else tasks.directory
        # Episodes run as another user, who may not pass through pytest's own directories.
        self.scratch = Path(tempfile.gettempdir()) / f"t1-test-{self.mark}"
        self.scratch.mkdir(mode=0o711)
        self.options = [
            "experiment=quickstart", f"model={model}", *SIZES, *(SEEDED if seeded else ()),
            f"generate.out={shared}/tasks", f"env.tasks={shared}/tasks/train",
            f"eval.tasks={shared}/tasks/held_out", f"train.sft.demonstrations={shared}/demonstrations",
        ]  # fmt: skip

    def start(self, *words: str, around: Sequence[str] = ()) -> subprocess.Popen:
        """`t1` with these words; `around`: a command that it runs under."""
        # To a file: a pipe that nobody reads would stop the loop.
        self.output = self.directory / f"output.{uuid.uuid4().hex[:8]}"
        with open(self.output, "wb") as file:
            return subprocess.Popen(
                [*around, sys.executable, "-m", "megatron_t1.cli", *words],
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, "TMPDIR": str(self.scratch)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def t1(self, *words: str, status: int = 0, timeout_s: float = 400.0) -> str:
        """Output of a finished command, which must end with `status` and leave no process."""
        process = self.start(*words)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
        said = self.output.read_text()
        assert process.returncode == status, f"t1 {' '.join(words)}: status {process.returncode}\n{said[-4000:]}"
        assert "Traceback" not in said
        self.no_process_is_left()
        return said

    @property
    def untaught(self) -> str:
        """The option that names the start model."""
        return f"model.path={self.directory}/start"

    def furnish(self) -> None:
        """Tasks, demonstrations, and a start model that they have taught to run commands; what is there stays."""
        if (self.directory / "sft/model").exists():
            return
        for made, words in (
            ("start", "model init"),
            ("tasks", "tasks generate"),
            ("demonstrations", "tasks demonstrate"),
        ):
            if not (self.directory / made).exists():
                self.t1(*words.split(), *self.options, self.untaught)
        self.teach()

    def teach(self, *more: str) -> None:
        """Show the demonstrations to the start model."""
        said = self.t1("train", "sft", *self.options, *more, self.untaught, f"run.dir={self.directory}/sft")
        assert "held-out loss" in said

    def run(self, name: str, *more: str, status: int = 0) -> str:
        return self.t1(*self.run_words(name), *more, status=status)

    def run_words(self, name: str) -> list[str]:
        return ["run", *self.options, f"model.path={self.directory}/sft/model", f"run.dir={self.directory}/{name}"]

    def processes(self) -> list[str]:
        """Command lines of what runs with the mark, or from this directory."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    places = (str(self.directory), str(self.scratch))
                    if process.environ().get(MARK) == self.mark or any(place in words for place in places):
                        found.append(f"{process.pid} {words[:150]}")
            except (psutil.Error, OSError):
                continue
        return found

    def no_process_is_left(self) -> None:
        wait_until(lambda: not self.processes(), 30, lambda: "\n".join(self.processes()))


def wait_until(condition: Callable[[], object], timeout_s: float, explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain\n{explain()}"
        time.sleep(0.02)


def records(directory: Path) -> dict[str, str]:
    """id -> digest of what was played, as it lies there."""
    store = RolloutStore(directory)
    return {name: store.load(name, verify=True).digest for name in store.ids()}


def played(directory: Path) -> dict[str, list[int]]:
    return {record.header.trajectory_id: record.ids.tolist() for record in RolloutStore(directory)}
