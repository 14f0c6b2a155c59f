"""Run a task's own verifier once, after the agent, and turn what it left into a verdict.

Sources, from most to least detail: CTRF, the report that pytest is asked for beside the task's own results, then
reward.json, then reward.txt. The exit status counts only where the task declares it. Whatever is missing, malformed,
linked, too large, late, crashed or contradicts itself makes the verdict untrusted, with the reason; it never makes a
zero (strands-env#183, rllm#677).

`result` in the [metadata] of task.toml says what a task leaves, where that isn't plain:

    result = "exit_code"    no file; exit status 0 or 1 is the result then
    result = "reward"       reward.json or reward.txt alone: what pytest reports is a part of it, or not the result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_t1.environment.protection import planted, runs_module, runs_pytest
from megatron_t1.environment.results import (
    CTRF,
    FAILED,
    PASSED,
    PYTEST,
    READERS,
    RESULT_FILES,
    REWARD_JSON,
    REWARD_TEXT,
    ResultError,
    Statuses,
    own_rewards,
)
from megatron_t1.environment.sandbox.interface import Sandbox, VerifierRun
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
    if runs_module(task) and (path := planted(task, await sandbox.changes())):
        doubt = f"the agent left {path}, which takes the place of a part of Python or pytest when the tests run"
        return Verdict(0, 0, task.baseline, trusted=False, reason=doubt)
    return judge(task, await sandbox.run_verifier(task, limit, RESULT_FILES), limit)


def judge(task: Task, run: VerifierRun, limit_s: float) -> Verdict:
    """The verdict of what a verifier run left; pure, so that stored runs can be judged again."""
    if run.doubt:
        return _untrusted(task, run.doubt, run)
    if run.timed_out:
        return _untrusted(task, f"the verifier ran out of time ({limit_s:g} s)", run)
    if run.exit_code is None or run.exit_code >= CRASHED:
        return _untrusted(task, f"the verifier crashed (exit status {run.exit_code})", run)
    reward_only = task.metadata.get("result") == REWARD
    for name in (REWARD_JSON, REWARD_TEXT) if reward_only else RESULT_FILES:
        if name in run.problems:
            return _untrusted(task, f"{name} {run.problems[name]}", run)
        if name not in run.files:
            continue
        if name not in (CTRF, PYTEST) and not reward_only and runs_pytest(task):
            return _untrusted(task, NO_REPORT, run)
        try:
            statuses = READERS[name](run.files[name])
        except ResultError as error:
            return _untrusted(task, f"{name}: {error}", run)
        if _of_another_verifier(statuses, name, task.check_names):
            return _untrusted(
                task, f"{name} has none of the {len(task.check_names)} checks that the task's baseline names", run
            )
        found = trusted(statuses, name, own_rewards(run.files), baseline=task.baseline, names=task.check_names)
        if found.solved and found.rewards and not any(found.rewards.values()):
            return _untrusted(task, f"all {found.total} checks of {name} pass, and the task's own reward is 0", run)
        return found
    if task.metadata.get("result") == EXIT_CODE and run.exit_code in (0, 1):
        if runs_pytest(task):
            return _untrusted(task, NO_REPORT, run)
        return trusted({EXIT_CODE: PASSED if run.exit_code == 0 else FAILED}, EXIT_CODE, baseline=task.baseline)
    return _untrusted(task, f"the verifier left no result file (exit status {run.exit_code})", run)


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
