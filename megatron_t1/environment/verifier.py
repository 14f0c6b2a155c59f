"""Run a task's own verifier once, after the agent, and turn what it left into a verdict.

Sources, from most to least detail: CTRF (/logs/verifier/ctrf.json), reward.json, reward.txt. The exit status counts
only where the task declares it (`result = "exit_code"` in [metadata]). Whatever is missing, malformed, linked, too
large, late or crashed makes the verdict untrusted, with the reason; it never makes a zero (strands-env#183, rllm#677).
"""

from __future__ import annotations

from megatron_t1.environment.results import READERS, RESULT_FILES, ResultError
from megatron_t1.environment.sandbox.interface import Sandbox, VerifierRun
from megatron_t1.environment.task import Task
from megatron_t1.trajectory.record import Verdict

REASON_OUTPUT = 300  # characters of the verifier's last words in a reason


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
    if run.doubt:
        return _untrusted(task, run.doubt, run)
    if run.timed_out:
        return _untrusted(task, f"the verifier ran out of time ({limit:g} s)", run)
    if run.exit_code is None or run.exit_code >= 126:
        return _untrusted(task, f"the verifier crashed (exit status {run.exit_code})", run)
    for name in RESULT_FILES:
        if name in run.problems:
            return _untrusted(task, f"{name} {run.problems[name]}", run)
        if name in run.files:
            try:
                return _trusted(task, READERS[name](run.files[name]))
            except ResultError as error:
                return _untrusted(task, f"{name}: {error}", run)
    if task.metadata.get("result") == "exit_code" and run.exit_code in (0, 1):
        return _trusted(task, {"exit_code": run.exit_code == 0})
    return _untrusted(task, f"the verifier left no result file (exit status {run.exit_code})", run)


def _trusted(task: Task, checks: dict[str, bool]) -> Verdict:
    return Verdict(sum(checks.values()), len(checks), task.baseline, trusted=True, checks=checks)


def _untrusted(task: Task, reason: str, run: VerifierRun) -> Verdict:
    words = run.output.strip()[-REASON_OUTPUT:]
    return Verdict(0, 0, task.baseline, trusted=False, reason=f"{reason}: {words}" if words else reason)
