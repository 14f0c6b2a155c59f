"""Is a task sound? Doing nothing must not solve it, its reference solution must, and each must give the same twice."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_t1.environment.sandbox.interface import CommandResult, Sandbox, SandboxLost
from megatron_t1.environment.steps import begin_step, below_minimum, combine, combined, not_ready
from megatron_t1.environment.task import Task
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import StepOutcome, Verdict

Checks = dict[str, bool]
SOLUTION_DIR, SOLUTION = "/solution", "solve.sh"
SHOWN_CHECKS = 5
SHOWN_OUTPUT = 300
STEP_START_S = 900.0  # for a step's setup and healthcheck, where no limit is given


class Status:
    """What was found. Only PROVEN tasks, and UNPROVEN ones by choice, are worth training on."""

    PROVEN = "proven"
    UNPROVEN = "unproven"  # no reference solution; everything else holds
    SOLVED = "solved"  # by doing nothing
    UNSOLVED = "unsolved"  # by its reference solution
    UNSTABLE = "unstable"  # two runs of the same differ
    UNTRUSTED = "untrusted"  # the verifier gave no verdict that can be trusted
    UNBUILDABLE = "unbuildable"  # here: its Dockerfile fails in this sandbox
    UNPLAYABLE = "unplayable"  # it needs what no sandbox here gives
    BROKEN = "broken"  # its files contradict the format

    ALL = (PROVEN, UNPROVEN, SOLVED, UNSOLVED, UNSTABLE, UNTRUSTED, UNBUILDABLE, UNPLAYABLE, BROKEN)
    OF_MACHINE = (UNBUILDABLE,)  # says as much about this machine as about the task


@dataclass
class Proof:
    """What a task did in a sandbox. Of several steps the checks are those of all, as "STEP/CHECK".

    Attributes:
        reason: why the status is not PROVEN.
        baseline: checks that pass when nothing is done, by name; {} where that wasn't found.
        names: checks that the reference solution's run reported.
        passed: checks that pass after the reference solution; -1 where it wasn't run.
        seconds: of building the sandbox, of the reference solution and of the verifier, the longest of all runs.
        notes: what doesn't decide, and may surprise.
    """

    status: str
    reason: str = ""
    baseline: dict[str, bool] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    passed: int = -1
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.names or self.baseline)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """Seconds, as in a rollout: of building a sandbox, and of the verifier where the task's own limit isn't shorter."""

    start_s: float | None = None
    verifier_s: float | None = None


NO_LIMITS = Limits()


async def prove(sandbox: Sandbox, task: Task, *, repeats: int = 2, limits: Limits = NO_LIMITS) -> Proof:
    """Play nothing, then the reference solution, `repeats` times each, every time from a fresh start.

    A task that ends the sandbox, or fails in it, has a status; nothing is raised for it.
    """
    proof = Proof(Status.PROVEN)
    try:
        proof.status = await _prove(sandbox, task, repeats, limits, proof)
    except TimeoutError:
        proof.status = Status.UNBUILDABLE
        proof.reason = f"its sandbox was not ready within {limits.start_s:g} s"
    except T1Error as error:  # SandboxLost: also one of a machine that can't run it
        proof.status = Status.UNBUILDABLE
        proof.reason = f"{error.problem} ({error.where})" if error.where else error.problem
    except Exception as error:  # one task doesn't end the check of all the others
        proof.status = Status.UNBUILDABLE
        proof.reason = f"the sandbox failed on it: {type(error).__name__}: {error}"
    proof.seconds = {name: round(seconds, 3) for name, seconds in proof.seconds.items()}
    return proof


async def run_solution(sandbox: Sandbox, task: Task, timeout_s: float) -> CommandResult:
    """The reference solution in a started sandbox, where Harbor's oracle agent runs it.

    Raises:
        SandboxLost: the sandbox ended.
    """
    files = {f"{SOLUTION_DIR}/{name}": entry for name, entry in task.solution_files().items()}
    await sandbox.put_files(files)
    variables = [f"{name}={value}" for name, value in task.solution_env.items()]
    return await sandbox.run(shlex.join(["env", *variables, "bash", f"{SOLUTION_DIR}/{SOLUTION}"]), timeout_s)


async def _prove(sandbox: Sandbox, task: Task, repeats: int, limits: Limits, proof: Proof) -> str:
    """The status; what was found meanwhile is kept in `proof`."""
    for number in range(repeats):
        idle, checks, _ = await _play(sandbox, task, limits, proof, solve=False)
        if not idle.trusted:
            proof.reason = f"after nothing was done: {idle.reason}"
            return Status.UNTRUSTED
        if number and (differing := _differences(proof.baseline, checks)):
            proof.reason = f"doing nothing gives different verdicts: {differing}"
            return Status.UNSTABLE
        proof.baseline = dict(checks)
    if idle.solved:
        proof.reason = f"doing nothing passes all {idle.total} checks"
        return Status.SOLVED
    if 0 <= task.baseline != idle.passed:
        proof.notes.append(f"task.toml states a baseline of {task.baseline}, {idle.passed} checks pass")
    for stage in task.stages:
        if SOLUTION not in stage.solution_files():
            proof.reason = f"{f'step {stage.step}' if stage.step else 'it'} has no solution/{SOLUTION}"
            return Status.UNPROVEN
    first: Checks | None = None
    for _ in range(repeats):
        verdict, checks, result = await _play(sandbox, task, limits, proof, solve=True)
        said = f" (status {result.exit_code}{', out of time' if result.timed_out else ''}: {_tail(result.output)})"
        if not verdict.trusted:
            proof.reason = f"after the reference solution{said}: {verdict.reason}"
            return Status.UNTRUSTED
        if first is not None and (differing := _differences(first, checks)):
            proof.reason = f"the reference solution gives different verdicts: {differing}"
            return Status.UNSTABLE
        first, proof.passed, proof.names = checks, sum(checks.values()), sorted(checks)
        if not verdict.solved or not all(checks.values()):
            failed = [name for name, passed in {**verdict.checks, **checks}.items() if not passed]
            proof.reason = f"the reference solution passes {proof.passed} of {len(checks)} checks, not "
            proof.reason += f"{_named(failed)}{said}"
            return Status.UNSOLVED
    return Status.PROVEN


async def _play(
    sandbox: Sandbox, task: Task, limits: Limits, proof: Proof, *, solve: bool
) -> tuple[Verdict, Checks, CommandResult]:
    """The verdict, the checks of all steps that were reached, and what the last solution that was run said."""
    began = time.monotonic()
    async with asyncio.timeout(limits.start_s):
        await sandbox.start(task)
    _longest(proof, "build", time.monotonic() - began)
    result, outcomes = CommandResult(None, ""), []
    for number, stage in enumerate(task.stages):
        if task.steps and (problem := await begin_step(sandbox, task, number, limits.start_s or STEP_START_S)):
            outcomes.append(StepOutcome(stage.step, verdict=not_ready(problem)))
            break
        if solve:
            began = time.monotonic()
            result = await run_solution(sandbox, stage, stage.agent_timeout_s)
            _longest(proof, "solution", time.monotonic() - began)
        verdict = await _verdict(sandbox, stage, limits, proof)
        outcomes.append(StepOutcome(stage.step, verdict=verdict))
        if not verdict.trusted or (task.steps and below_minimum(task.steps[number], verdict)):
            break
    if not task.steps:
        return verdict, verdict.checks, result
    return combined(task, outcomes), combine({o.name: o.verdict for o in outcomes}).checks, result


async def _verdict(sandbox: Sandbox, stage: Task, limits: Limits, proof: Proof) -> Verdict:
    began = time.monotonic()
    try:
        return await verify(sandbox, stage, limits.verifier_s)
    except SandboxLost as error:
        return Verdict(0, 0, -1, trusted=False, reason=error.problem)
    finally:
        _longest(proof, "verifier", time.monotonic() - began)


def _longest(proof: Proof, name: str, seconds: float) -> None:
    proof.seconds[name] = max(proof.seconds.get(name, 0.0), seconds)


def _differences(one: Mapping[str, bool], other: Mapping[str, bool]) -> str:
    return _named([name for name in {**one, **other} if one.get(name) is not other.get(name)])


def _named(checks: list[str]) -> str:
    more = len(checks) - SHOWN_CHECKS
    return ", ".join(checks[:SHOWN_CHECKS]) + (f" and {more} more" if more > 0 else "")


def _tail(output: str) -> str:
    return output.strip()[-SHOWN_OUTPUT:]
