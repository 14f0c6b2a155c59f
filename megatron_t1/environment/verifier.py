"""Run a task's own verifier once, after the agent, and turn what it left into a verdict.

Sources, from most to least detail: CTRF, the report that pytest is asked for beside the task's own results, then
reward.json, then reward.txt; a file that the task's tests never name doesn't count, and reports of the same tests have
to agree. The exit status counts only where the task declares it. Whatever is missing, malformed,
linked, too large, late, crashed or contradicts itself makes the verdict untrusted, with the reason; it never makes a
zero (strands-env#183, rllm#677).

`result` in the [metadata] of task.toml says what a task leaves, where that isn't plain:

    result = "exit_code"    no file; exit status 0 or 1 is the result then
    result = "reward"       reward.json or reward.txt alone: what pytest reports is a part of it, or not the result
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from megatron_t1.environment.protection import asks_for_junit, runs_pytest
from megatron_t1.environment.results import (
    CTRF,
    FAILED,
    PASSED,
    PYTEST,
    READERS,
    RESULT_FILES,
    EmptyReport,
    ResultError,
    Statuses,
    own_rewards,
)
from megatron_t1.environment.sandbox.interface import Sandbox, VerifierRun
from megatron_t1.environment.sources import REPORTS, contradiction, expected_files
from megatron_t1.environment.task import Task
from megatron_t1.trajectory.record import Verdict

REASON_OUTPUT = 300  # characters of the verifier's last words in a reason
EXIT_CODE, REWARD = "exit_code", "reward"  # values of [metadata] result
NO_REPORT = "tests/test.sh runs pytest, which left no report: it wasn't found, failed, or was ended by what it tested"
CRASHED = 126  # exit statuses from here on: not executable, not found, killed by a signal


async def verify(sandbox: Sandbox, task: Task, timeout_s: float | None = None) -> Verdict:
    """Count the checks that pass now. The agent's session in the sandbox ends with it.

    Args:
        timeout_s: limit of the verifier; the task's own where it is shorter or this is None.

    Raises:
        SandboxLost: the sandbox died; the caller decides about another attempt.
        T1Error: the task's tests can't be read.
    """
    limit = task.verifier_timeout_s if timeout_s is None else min(timeout_s, task.verifier_timeout_s)
    run = await sandbox.run_verifier(task, limit, RESULT_FILES)
    return await asyncio.to_thread(judge, task, run, limit)  # what it left can be long, and made to take time


def judge(task: Task, run: VerifierRun, limit_s: float) -> Verdict:
    """The verdict of what a verifier run left; pure, so that stored runs can be judged again."""
    if run.doubt:
        return _untrusted(task, run.doubt, run)
    if run.timed_out:
        return _untrusted(task, f"the verifier ran out of time ({limit_s:g} s)", run)
    if run.exit_code is None or run.exit_code >= CRASHED:
        return _untrusted(task, f"the verifier crashed (exit status {run.exit_code})", run)
    try:
        return _judged(task, run)
    except ResultError as error:
        return _untrusted(task, str(error), run)


def _judged(task: Task, run: VerifierRun) -> Verdict:
    """The verdict of a run that ended well. Raises ResultError with the reason for none."""
    declared = task.metadata.get("result")
    sources, strays = _sources(task, run)
    for name in sources:
        if name in run.problems:
            raise ResultError(f"{name} {run.problems[name]}")
    by_pytest = declared != REWARD and runs_pytest(task)
    own_junit = by_pytest and asks_for_junit(task)
    if by_pytest and PYTEST not in sources and not (own_junit and CTRF in sources):
        raise ResultError(NO_REPORT)
    if not sources:
        if declared == EXIT_CODE and run.exit_code in (0, 1):
            return trusted({EXIT_CODE: PASSED if run.exit_code == 0 else FAILED}, EXIT_CODE, baseline=task.baseline)
        raise ResultError(
            f"{strays[0]} is there, which nothing in the task's tests names, and no file that they name"
            if strays
            else f"the verifier left no result file (exit status {run.exit_code})"
        )
    reports = {name: statuses for name in sources if name in REPORTS and (statuses := _read(name, run, sources))}
    if PYTEST in reports and CTRF in strays and CTRF in run.files:
        reports[CTRF] = _read(CTRF, run)
    if doubt := contradiction(reports, run.output if by_pytest and not own_junit else ""):
        raise ResultError(doubt)
    name = next(name for name in sources if name in reports or name not in REPORTS)
    statuses = reports[name] if name in reports else _read(name, run)
    if _of_another_verifier(statuses, name, task.check_names):
        raise ResultError(f"{name} has none of the {len(task.check_names)} checks that the task's baseline names")
    rewards = own_rewards({own: run.files[own] for own in sources})
    if task.gated and not rewards:  # the share of checks stands for rewards that aren't there, not for malformed ones
        for own in (source for source in sources if source not in REPORTS):
            _read(own, run)
    found = trusted(statuses, name, rewards, baseline=task.baseline, names=task.check_names)
    if found.solved and found.rewards and not any(found.rewards.values()):
        raise ResultError(f"all {found.total} checks of {name} pass, and the task's own reward is 0")
    return found


def _sources(task: Task, run: VerifierRun) -> tuple[list[str], list[str]]:
    """Names of what was left and counts, the most detailed first, and of what was left and doesn't.

    Where the tests name no result file, a program of the image writes it, and whatever is there counts.
    """
    left = [name for name in RESULT_FILES if name in run.files or name in run.problems]
    expected: tuple[str, ...] = expected_files(task)
    if not expected and task.metadata.get("result") != EXIT_CODE:
        expected = RESULT_FILES
    if task.metadata.get("result") == REWARD:
        left = [name for name in left if name not in REPORTS]
    return [name for name in left if name in expected], [name for name in left if name not in expected]


def _read(name: str, run: VerifierRun, sources: Sequence[str] = ()) -> Statuses:
    """What a file says; {} for a CTRF of no check where pytest.xml says why: nothing could be collected."""
    try:
        return READERS[name](run.files[name])
    except EmptyReport:
        if name == CTRF and PYTEST in sources:
            return {}
        raise ResultError(f"{name}: no check ran") from None
    except ResultError as error:
        raise ResultError(f"{name}: {error}") from error


def trusted(
    statuses: Statuses,
    source: str,
    rewards: Mapping[str, float] | None = None,
    *,
    baseline: int = -1,
    names: Sequence[str] = (),
) -> Verdict:
    """A trusted verdict.

    Where the names of a task's checks are known, they are its checks: one that was not reported has not passed, and one
    that nobody knows doesn't count, so that a report can't be made longer or shorter by what it judges.

    Args:
        rewards: what the task gave itself.
    """
    if names:
        statuses = {name: statuses.get(name, "missing") for name in names}
    checks = {name: status == PASSED for name, status in statuses.items()}
    others = {name: status for name, status in statuses.items() if status not in (PASSED, FAILED)}
    return Verdict(
        sum(checks.values()), len(checks), baseline, trusted=True,
        checks=checks, statuses=others, source=source, rewards=dict(rewards or {}),
    )  # fmt: skip


def _of_another_verifier(statuses: Statuses, source: str, names: Sequence[str]) -> bool:
    """Whether no known check was reported although something was: a lost report, or a baseline of another verifier.

    Tests that can't even be collected are reported under other names too, but then as failed.
    """
    if not names or set(statuses) & set(names):
        return False
    return source not in (CTRF, PYTEST) or PASSED in statuses.values()


def _untrusted(task: Task, reason: str, run: VerifierRun) -> Verdict:
    words = run.output.strip()[-REASON_OUTPUT:]
    return Verdict(0, 0, task.baseline, trusted=False, reason=f"{reason}: {words}" if words else reason)
