"""Tasks of several steps: what begins a step, whether the next one is begun, and the verdict of all together.

The rules are Harbor's (docs/tasks.md, "Several steps"); where a step was not reached they are stricter: its checks have
not passed, so that an episode gains nothing by ending early.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from megatron_t1.environment.sandbox.interface import FileRefused, Sandbox
from megatron_t1.environment.task import FINAL, Healthcheck, Step, Task
from megatron_t1.trajectory.record import NOT_REACHED, StepOutcome, Verdict

SETUP = "setup.sh"
REWARD = "reward"  # what a min_reward without names is about
SHOWN_OUTPUT = 300
MAX_NAMES = 1 << 20  # characters of all steps' names of checks and rewards; a record's header holds them several times


async def begin_step(sandbox: Sandbox, task: Task, number: int, timeout_s: float) -> str:
    """Bring a started sandbox to where the agent of step `number` begins: files, setup.sh, healthcheck.

    Args:
        timeout_s: of setup.sh, and of the healthcheck.

    Returns:
        Why the step can't be begun; "" when it can.

    Raises:
        SandboxLost: the sandbox failed.
        T1Error: the step's files can't be read.
    """
    step, stage = task.steps[number], task.stages[number]
    files = await asyncio.to_thread(stage.workdir_files)
    if number or files:
        try:
            await sandbox.resume(files)
        except FileRefused as error:
            return f"its files can't be put in place: {error.problem}"
    if SETUP in files:
        result = await sandbox.execute(f'exec /bin/bash "$PWD/{SETUP}"', timeout_s)
        if result.exit_code != 0:
            why = "ran out of time" if result.timed_out else f"failed (exit status {result.exit_code})"
            return f"{SETUP} {why}: {result.output.strip()[-SHOWN_OUTPUT:]}".rstrip(": ")
    if step.healthcheck is not None:
        return await _unhealthy(sandbox, step.healthcheck, timeout_s)
    return ""


async def _unhealthy(sandbox: Sandbox, check: Healthcheck, timeout_s: float) -> str:
    """Why the healthcheck fails; "" as soon as it succeeds."""
    began, failures = time.monotonic(), 0
    while True:
        elapsed = time.monotonic() - began
        result = await sandbox.execute(check.command, min(check.timeout_s, max(0.1, timeout_s - elapsed)))
        if result.exit_code == 0:
            return ""
        starting = elapsed < check.start_period_s
        failures += not starting
        if failures >= max(1, check.retries):
            return f"its healthcheck failed {failures} times: {result.output.strip()[-SHOWN_OUTPUT:]}".rstrip(": ")
        wait_s = check.start_interval_s if starting else check.interval_s
        if time.monotonic() - began + wait_s >= timeout_s:
            return f"its healthcheck did not succeed within {timeout_s:g} s"
        await asyncio.sleep(wait_s)


def not_ready(problem: str) -> Verdict:
    """Of a step whose agent never began: nobody's failure, so no zero."""
    return Verdict(0, 0, -1, trusted=False, reason=problem)


def recordable(verdict: Verdict, before: Sequence[StepOutcome]) -> Verdict:
    """The verdict of the step after `before`; untrusted where all names together are more than a record holds."""
    verdicts = [verdict, *(outcome.verdict for outcome in before if outcome.verdict is not None)]
    length = sum(len(name) for own in verdicts for names in (own.checks, own.rewards) for name in names)
    if length <= MAX_NAMES:
        return verdict
    reason = f"the names of all steps' checks have {length} characters, at most {MAX_NAMES}"
    return Verdict(0, 0, verdict.baseline, trusted=False, reason=reason)


def below_minimum(step: Step, verdict: Verdict) -> str:
    """Why the steps after this one are not begun; "" where its rewards are enough.

    Compared are the numbers of its reward.json or reward.txt, where one that is missing is below everything; the share
    of checks is the reward of a step that leaves neither.
    """
    rewards = verdict.rewards or {REWARD: verdict.share}
    for name, least in step.min_reward.items():
        reward = rewards.get(name, -math.inf)
        if reward < least:
            return f"{name} = {reward:g}, below {least:g}"
    return ""


def combined(task: Task, outcomes: Sequence[StepOutcome]) -> Verdict:
    """The verdict of a whole task from those of its steps.

    Checks are called "STEP/CHECK". Those of a step that was not reached have not passed: by name where names are known,
    else one stands for all. One step that can't be trusted makes the whole untrusted.

    Args:
        outcomes: of the steps that were reached, each with a verdict.
    """
    for outcome in outcomes:
        if outcome.verdict is not None and not outcome.verdict.trusted:
            return Verdict(0, 0, task.baseline, trusted=False, reason=f"step {outcome.name}: {outcome.verdict.reason}")
    reached = {outcome.name: outcome.verdict for outcome in outcomes if outcome.verdict is not None}
    counting = task.stages[-1:] if task.strategy == FINAL else task.stages
    verdicts = {stage.step: reached.get(stage.step) or _not_reached(stage) for stage in counting}
    return combine(verdicts, task.baseline)


def combine(verdicts: Mapping[str, Verdict], baseline: int = -1) -> Verdict:
    """The verdict that trusted ones of steps, by name, come to: checks one by one, shares and rewards as means.

    A reward that a step lacks is 0 there, as in Harbor; one that leaves no rewards at all leaves the whole without.
    """
    own = list(verdicts.values())
    reached = [verdict for verdict in own if NOT_REACHED not in verdict.statuses.values()]
    keys = {key for verdict in reached for key in verdict.rewards} if all(v.rewards for v in reached) else set()
    return Verdict(
        sum(verdict.passed for verdict in own),
        sum(verdict.total for verdict in own),
        baseline,
        trusted=True,
        checks={f"{step}/{name}": passed for step, v in verdicts.items() for name, passed in v.checks.items()},
        statuses={f"{step}/{name}": status for step, v in verdicts.items() for name, status in v.statuses.items()},
        source=", ".join(dict.fromkeys(verdict.source for verdict in reached)),
        rewards={key: sum(verdict.rewards.get(key, 0.0) for verdict in own) / len(own) for key in sorted(keys)},
        step_share=sum(verdict.share for verdict in own) / len(own),
    )


def _not_reached(stage: Task) -> Verdict:
    names = stage.check_names or tuple(stage.baseline_checks or ()) or (NOT_REACHED,)
    return Verdict(
        0, len(names), -1, trusted=True,
        checks=dict.fromkeys(names, False), statuses=dict.fromkeys(names, NOT_REACHED),
    )  # fmt: skip
