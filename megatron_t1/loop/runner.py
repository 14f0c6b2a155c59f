"""Runs the steps of a training: start, wait, check, record. Holds no tensors.

What makes a step safe to interrupt anywhere: before a launch its inputs are written to launch.json; the phase writes
its outputs, then result.json; the loop checks the outputs and writes the manifest. A result without a manifest entry
is adopted when the launch that made it had the same inputs, otherwise it is set aside and the step is run again.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_t1 import atomic, sealed
from megatron_t1.config.compose import save
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.fence import LAUNCH_FILE
from megatron_t1.loop import job_list
from megatron_t1.loop.launcher import (
    KINDS,
    BaseLauncher,
    PhaseCommand,
    Stopped,
    make_launcher,
    may_pass,
    next_attempt,
    require_success,
)
from megatron_t1.loop.lock import RunLock
from megatron_t1.loop.manifest import config_digest, open_manifest
from megatron_t1.loop.position import contract_of, position_of
from megatron_t1.loop.space import require_space
from megatron_t1.loop.steps import Key, Step, all_steps, next_step, predecessors, progress, readers
from megatron_t1.loop.storage import retire, sweep
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import Counters, RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, missing_outputs, summarised
from megatron_t1.processes import LAUNCH_MARK, stop_signal_numbers
from megatron_t1.report.metrics import MetricsWriter
from megatron_t1.report.monitor import alarms


def step_command(config: Config, step: Step) -> PhaseCommand:
    """The command that runs a step from the run directory's own files."""
    common = ("--run", str(Path(config.run.dir).resolve()), "--iteration", str(step.iteration))
    name = "+".join(step.phases)
    if step.kind == "rollout":
        arguments = (*common, "--phases", ",".join(step.phases))
        return PhaseCommand(name, "rollout", "megatron_t1.loop.worker", arguments)
    arguments = (*common, "--roles", ",".join(step.phases))
    return PhaseCommand(
        name, "train", "megatron_t1.training.main", arguments, config.layout.processes, distributed=True
    )


@dataclass
class Runner:
    """One start of the loop on one run directory; use inside `opened`."""

    config: Config
    manifest: Manifest
    launcher: BaseLauncher
    metrics: MetricsWriter
    say: Callable[[str], None]
    lock: RunLock
    command: Callable[..., PhaseCommand] = step_command
    paths: RunPaths = field(init=False)

    def __post_init__(self) -> None:
        self.paths = RunPaths.of(self.config.run.dir)

    def run(self, kind: str = "") -> int:
        """Run every step that is left, or until one of another kind is next; returns how many were."""
        retire(self.config, self.manifest)  # options that let more go make room before it is asked for
        self._say_unevaluated()
        count = 0
        while (step := next_step(self.config.loop, self.manifest.settled)) is not None and kind in ("", step.kind):
            finished, total = progress(self.config.loop, self.manifest.settled)
            self.say(f"[{finished + 1}/{total}] {step}")
            self.execute(step)
            count += 1
        return count

    def _say_unevaluated(self) -> None:
        """Name the policies whose evaluation the options ask for now that their exports are gone."""
        wanted = {key for step in all_steps(self.config.loop) for key in step.keys}
        missed = sorted(wanted & self.manifest.settled - self.manifest.keys)
        if missed:
            numbers = ", ".join(str(Counters(i, self.config.loop.warmup_iterations).policy) for i, _ in missed)
            self.say(f"not evaluated, since their exports were deleted (loop.keep_exports): policies {numbers}")

    def execute(self, step: Step, *, retries: int = 0) -> list[PhaseResult]:
        """Run one launch (or adopt what an interrupted loop left of it) and record it.

        Args:
            retries: launches before this one that something killed.
        """
        adopted = [result for key in step.keys if (result := self._adopt(key)) is not None]
        pending = tuple(phase for phase in step.phases if (step.iteration, phase) not in self.manifest.keys)
        if not pending:
            return adopted
        step = Step(step.iteration, pending)
        self._require_inputs(step)
        if self.paths.tasks.exists():  # otherwise they are chosen again
            self._require_tasks(step.phases)
        require_space(self.config, self.manifest, step)
        launch, attempt = self._prepare(step)
        command = self.command(self.config, step)
        command = replace(command, environment={**command.environment, LAUNCH_MARK: launch})
        logs = self.paths.phase(step.iteration, pending[0]) / "logs" / f"attempt_{attempt}"
        result = self.launcher.launch(command, logs, echo=lambda line: self.say(f"    {line}"))
        self.lock.require_held()
        if result.code == 0:
            self._wait_for_results(step, self.launcher.late_files_s(result))
        # srun's status is 0 when Slurm ends a step because it lost a node.
        lost = result.code == 0 and any(not (self.paths.phase(*key) / RESULT_FILE).exists() for key in step.keys)
        if retries < self.config.cluster.phase_retries and (lost or may_pass(result)):
            self.say(f"    {command.name} was lost ({result.reason or f'exit status {result.code}'}): {logs}")
            self.say(f"    launched again ({retries + 1} of {self.config.cluster.phase_retries} times)")
            return [*adopted, *self.execute(step, retries=retries + 1)]
        require_success(result, command)
        results = [self._checked(key) for key in step.keys]
        for phase_result in results:
            self._record(phase_result, launch, result.seconds, attempt)
        retire(self.config, self.manifest)
        return [*adopted, *results]

    def _inputs(self, key: Key, launch: str = "", together: Sequence[Key] = ()) -> dict[str, str]:
        """What a step reads, by name: the digest of its maker's result, or the launch that is to make it."""
        inputs = {"config": config_digest(self.manifest.config)}
        for predecessor in predecessors(self.config.loop, key):
            name = f"{predecessor[0]}/{predecessor[1]}"
            if predecessor in together:
                inputs[name] = f"launch:{launch}"
                continue
            finished = self.manifest.find(predecessor)
            inputs[name] = finished.result_sha256 if finished else "missing"
        return inputs

    def _prepare(self, step: Step) -> tuple[str, int]:
        """Write down what this launch reads; set aside results of launches that read something else."""
        launch, attempt = uuid.uuid4().hex, 1
        for key in step.keys:
            directory = self.paths.phase(*key)
            attempt = max(attempt, read_launch(directory).get("attempt", 0) + 1, next_attempt(directory))
        for key in step.keys:
            directory = self.paths.phase(*key)
            if (directory / RESULT_FILE).exists():
                os.replace(directory / RESULT_FILE, directory / f"superseded.{RESULT_FILE}")
            sealed.write(
                directory / LAUNCH_FILE,
                {"launch": launch, "attempt": attempt, "started_at": time.time(),
                 "inputs": self._inputs(key, launch, step.keys), "phases": list(step.phases)},
            )  # fmt: skip
        return launch, attempt

    def _adopt(self, key: Key) -> PhaseResult | None:
        """Record a result that a loop left behind when it was killed before it could record it."""
        if key in self.manifest.keys:
            return None
        directory = self.paths.phase(*key)
        launch = read_launch(directory)
        if not launch or not (directory / RESULT_FILE).exists():
            return None
        if key[1] == "rollout" and self.manifest.tasks_sha256 and not self.paths.tasks.exists():
            return None  # started once more it chooses them again, and finds its episodes
        for name, value in self._inputs(key).items():
            recorded = launch.get("inputs", {}).get(name)
            if recorded == f"launch:{launch['launch']}":
                iteration, _, phase = name.partition("/")
                made = self.manifest.find((int(iteration), phase))
                if made is None or made.launch != launch["launch"]:
                    return None
            elif recorded != value:
                return None
        try:
            result = self._checked(key)
        except IncompleteError:
            return None
        self.say(f"    {key[1]} of iteration {key[0]} was already finished; it is not repeated")
        self._record(result, launch["launch"], sum(result.timings_s.values()), launch["attempt"])
        return result

    def _checked(self, key: Key) -> PhaseResult:
        directory = self.paths.phase(*key)
        result = PhaseResult.read(directory)
        if (result.iteration, result.phase) != key:
            raise IncompleteError(
                f"the result is of {result.phase}, iteration {result.iteration}; expected {key[1]}, iteration {key[0]}",
                where=str(directory / RESULT_FILE),
                remedy="start the loop again: the step will be repeated",
            )
        self._require_outputs(result, directory)
        return result

    def _wait_for_results(self, step: Step, late_s: float) -> None:
        """Until what a phase on another node has written is seen here, or as long as that may take."""
        deadline = time.monotonic() + late_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                for key in step.keys:
                    self._checked(key)
                return
            except IncompleteError:
                for key in step.keys:
                    atomic.look_anew(self.paths.phase(*key))
                time.sleep(min(1.0, left))

    def _require_outputs(self, result: PhaseResult, directory: Path) -> None:
        wrong = missing_outputs(result, self.paths.root)
        if wrong:
            raise IncompleteError(
                f"outputs of {result.phase} (iteration {result.iteration}) are not what its result says: "
                + summarised(wrong),
                where=str(directory / RESULT_FILE),
                remedy="restore the files from a copy; or repeat from there in a copy of the run directory",
            )  # fmt: skip

    def _require_inputs(self, step: Step) -> None:
        """What the step is about to read is still there, with the recorded sizes and the recorded result."""
        for key in step.keys:
            for predecessor in predecessors(self.config.loop, key):
                finished = self.manifest.find(predecessor)
                if predecessor in step.keys:
                    continue
                directory = self.paths.phase(*predecessor)
                if finished is None:
                    raise T1Error(
                        f"{key[1]} of iteration {key[0]} needs {predecessor[1]} of iteration {predecessor[0]} first",
                        where=str(self.paths.manifest),
                        remedy="`t1 run` runs the steps in order",
                    )
                result = PhaseResult.read(directory)
                if atomic.sha256_file(directory / RESULT_FILE) != finished.result_sha256:
                    raise IncompleteError(
                        f"{predecessor[1]} of iteration {predecessor[0]} is not the one that was recorded",
                        where=str(directory / RESULT_FILE),
                        remedy="restore the file from a copy of the run directory",
                    )
                self._require_outputs(result, directory)

    def _require_tasks(self, phases: Sequence[str]) -> None:
        """All rollouts are played from the tasks of the first one."""
        known, path = self.manifest.tasks_sha256, self.paths.tasks
        if "rollout" in phases and known and not (path.exists() and atomic.sha256_file(path) == known):
            raise IncompleteError(
                "the run's choice of tasks isn't the one that its first rollout was played by",
                where=str(path),
                remedy="restore the file from a copy; delete rollouts that were played by another choice",
            )

    def _record(self, result: PhaseResult, launch: str, seconds: float, attempts: int) -> None:
        directory = self.paths.phase(result.iteration, result.phase)
        self.lock.require_held()
        self._require_tasks([result.phase])
        self.metrics.append(result, seconds=seconds)
        digest, contract = contract_of(result)
        if digest:
            self.manifest.contracts[digest] = contract
        if result.phase == "rollout":
            if self.paths.tasks.exists():
                self.manifest.tasks_sha256 = self.manifest.tasks_sha256 or atomic.sha256_file(self.paths.tasks)
            for alarm in alarms(self.metrics.lines, self.config.monitor):
                if alarm.iteration == result.iteration:
                    self.say(f"    alarm, {alarm}")
        self.manifest.finished.append(
            FinishedStep.of(
                result,
                directory,
                launch=launch,
                inputs=read_launch(directory).get("inputs", {}),
                seconds=seconds,
                attempts=attempts,
                position=position_of(result, self.config),
                contract=digest,
            )
        )
        self.manifest.jobs = job_list.mend(self.paths.root, self.say)
        self.manifest.write(self.paths.manifest)

    def forget(self, key: Key) -> None:
        """Take a step out of the manifest so that it can be run again by hand; refused once others have read it."""
        read_by = readers(self.config.loop, key, self.manifest.keys)
        if read_by:
            names = ", ".join(f"{phase} of iteration {iteration}" for iteration, phase in read_by)
            raise T1Error(
                f"{key[1]} of iteration {key[0]} is finished and was read by {names}",
                where=str(self.paths.manifest),
                remedy="repeat it in a copy of the run directory, or choose another iteration=N",
            )
        self.manifest.finished = [step for step in self.manifest.finished if step.key != key]
        directory = self.paths.phase(*key)
        if (directory / RESULT_FILE).exists():
            os.replace(directory / RESULT_FILE, directory / f"superseded.{RESULT_FILE}")
        self.manifest.write_anew(self.paths.manifest)


@contextmanager
def opened(
    config: Config,
    *,
    say: Callable[[str], None] = print,
    command: Callable[..., PhaseCommand] = step_command,
    kinds: Sequence[str] = KINDS,
) -> Iterator[Runner]:
    """Lock the run directory, open or make its manifest and config.yaml, and stop cleanly on SIGTERM and SIGINT.

    Raises:
        T1Error: the directory is locked, belongs to another configuration or start model, or phases can't be started
            here.
        Stopped: from the body, after a signal; the running phase has been ended, the manifest is intact.
    """
    paths = RunPaths.of(config.run.dir)
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise T1Error(
            f"the run directory can't be made: {error.strerror}", where=str(paths.root), remedy="choose another run.dir"
        ) from error
    with stop_signals() as received, RunLock(paths.root) as lock:
        if lock.former:
            former = f"process {lock.former['pid']} on {lock.former['host']}"
            say(f"waiting for {former} to end its phase: this loop has taken the run over")
        lock.wait_for_former(config.cluster.stop_grace_s, lambda: len(received))
        launcher = make_launcher(config, lambda: received[0] if received else lock.lost)
        problems = launcher.preflight(kinds)
        if problems:
            raise T1Error(
                "phases can't be started here:\n" + "\n".join(f"  - {problem}" for problem in problems),
                remedy="nothing was started",
            )
        sweep(paths.root)
        manifest = open_manifest(config, say=say, before_file=lambda: go_on(received))
        save(config, paths.config)
        manifest.jobs = job_list.mend(paths.root, say)
        manifest.write(paths.manifest)
        metrics = MetricsWriter(paths)
        try:
            yield Runner(config, manifest, launcher, metrics, say, lock, command)
        finally:
            metrics.close()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Remember `stop_signal_numbers` instead of dying of them; a second one of the same kind acts as usual."""
    received: list[int] = []
    previous = {}

    def remember(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    for number in stop_signal_numbers():
        previous[number] = signal.signal(number, remember)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    go_on(received)


def go_on(received: Sequence[int]) -> None:
    """Raises Stopped where one of `stop_signals` was received."""
    if received:
        raise Stopped(received[0])


def read_launch(directory: Path) -> dict[str, Any]:
    """What the last launch of a phase wrote down before it began; {} where there is none, or a damaged one: a result is
    adopted only by what is sure of its launch.
    """
    try:
        return sealed.read(directory / LAUNCH_FILE)
    except (OSError, ValueError):
        return {}
