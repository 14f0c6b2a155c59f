"""A training as a chain of jobs: rollout and training on partitions of their own, each job the next one's dependency.

A link is one job. It hands its successor in before it begins, held back until it has ended however it ends
(`afterany`: with `afterok` a failed link would leave its successor waiting for ever), then runs the steps of its own
kind until one of the other kind is next. A link that finds no step of its kind hands on at once, so a chain gets over
failed, lost and timed-out links by itself, also over those whose nodes aren't fit to start on, or that no node starts
(`loop.links`); links that finish no step, and come no further within one either (`loop.headway`), are counted, and a
few in a row end it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error, readable
from megatron_t1.loop import job_list, slurm_jobs
from megatron_t1.loop.headway import finished_keys, headway
from megatron_t1.loop.launcher import Stopped
from megatron_t1.loop.links import (
    OTHER,
    UNSTARTED,
    cancelled_before,
    fill,
    listed,
    note_elsewhere,
    note_unstarted,
    submit_link,
    take_back,
)
from megatron_t1.loop.lock import OtherLoop, lock_owner
from megatron_t1.loop.runner import Runner, stop_signals
from megatron_t1.loop.steps import next_step
from megatron_t1.manifest import Key


def next_kind(config: Config, finished: Collection[Key]) -> str | None:
    """Kind of the step that is next; None: the training is done."""
    step = next_step(config.loop, finished)
    return None if step is None else step.kind


def run_link(
    config: Config, kind: str, say: Callable[[str], None], begin: Callable[[], AbstractContextManager[Runner]]
) -> None:
    """One job of the chain.

    A chain whose working job was cancelled ends. While that job is stopping nobody can tell why it is, so it is its
    successor that finds out and does nothing.

    Args:
        begin: opens the run, once the successor waits: a job whose nodes are not fit to start on has one, too.

    Raises:
        T1Error: the run can't be opened or a step failed (the successor tries again), or too many links in a row
            finished none.
        Stopped: the job was told to stop; its successor goes on, unless the job was cancelled.
    """
    job = slurm_jobs.own_job()
    if job is None:
        raise T1Error("a link of a chain runs in a Slurm job", remedy="`t1 slurm submit --chain ...` hands it in")
    with stop_signals():  # a job that was handed in is noted, whatever happens
        waiting = _to_follow(config, kind, job, say)
        if waiting is None:
            return
    try:
        with begin() as runner:
            runner.run(kind)
    except OtherLoop:
        owner = lock_owner(config.run.dir).get("slurm_job")
        if owner in {str(line["job"]) for line in slurm_jobs.noted(config.run.dir)}:
            take_back(config.run.dir, job)  # that job of the run has successors of its own
        raise
    except Exception as error:
        try:
            successor = _verified(config, waiting, OTHER[kind], job, say)
        except (T1Error, OSError) as refused:  # beside which the link's own error stays the one to read
            say(f"no job that follows could be handed in: {readable(refused)}; `t1 slurm status` says how to go on")
        else:
            if isinstance(error, Stopped):
                say(f"job {successor} goes on, unless this job was cancelled")  # which only its successor can know
        raise
    if next_kind(config, finished_keys(config)) is not None:
        _verified(config, waiting, OTHER[kind], job, say)
    elif taken := take_back(config.run.dir, job):
        say(f"the training is done; {listed(taken)} {'was' if len(taken) == 1 else 'were'} taken back")


def _to_follow(config: Config, kind: str, job: int, say: Callable[[str], None]) -> list[int] | None:
    """The links that wait for this job, which is to work now; None: it has handed on, or the chain is over."""
    job_list.mend(config.run.dir, say)
    cancelled = cancelled_before(config.run.dir, job)
    if cancelled is not None:
        say(f"job {cancelled}, which this one follows, was cancelled: the chain ends; the run can be submitted again")
        take_back(config.run.dir, job)
        return None
    finished = finished_keys(config)
    come = headway(config, finished)
    note_unstarted(config.run.dir, come, say, before=job)
    note_elsewhere(config.run.dir, job)
    slurm_jobs.note(config.run.dir, job, event="began", kind=kind, headway=come)
    wanted = next_kind(config, finished)
    if wanted is None:
        say("nothing is left to do: the chain ends")
        take_back(config.run.dir, job)
        return None
    try:
        _require_headway(config, wanted, come, begun=wanted == kind)
    except T1Error:
        take_back(config.run.dir, job)
        raise
    if wanted != kind:
        say(f"the next step is of kind {wanted}: job {fill(config, wanted, job, say)[0]} takes it")
        return None
    try:
        waiting = fill(config, OTHER[kind], job, say)
    except T1Error as error:  # which is no reason not to work
        say(f"no job that follows could be handed in, which is tried again at the end: {error.problem}")
        return []
    spares = f"; {listed(waiting[1:])} in its place where no node starts it" if len(waiting) > 1 else ""
    say(f"job {waiting[0]} follows when this one ends{spares}")
    return waiting


def _verified(config: Config, waiting: Sequence[int], kind: str, job: int, say: Callable[[str], None]) -> int:
    """The successor, or another one where a controller that died just after it was handed in has lost it."""
    left = [each for each in waiting if slurm_jobs.find_noted(config.run.dir, each) is not None]
    if left and left[0] == waiting[0]:
        return left[0]
    again = left[0] if left else submit_link(config, kind, after=[job])
    say(f"Slurm has lost job {waiting[0]}: job {again} follows in its place" if waiting else f"job {again} follows")
    return again


def _require_headway(config: Config, kind: str, come: list[int], *, begun: bool) -> None:
    """Refuse when links of this kind, since the chain was handed in, all left the run where it is.

    Args:
        begun: whether the last one noted is at work now.
    """
    tries, never = -begun, 0
    for line in reversed(slurm_jobs.noted(config.run.dir)):
        if line.get("event") == "chain" or line.get("headway", come) != come:
            break
        if line.get("kind") == kind:
            tries += line.get("event") in ("began", UNSTARTED)
            never += line.get("event") == UNSTARTED
    limit = config.cluster.slurm.max_failures
    if tries >= limit:
        raise T1Error(
            f"{limit} jobs in a row finished no step, no episode and no checkpoint within a phase"
            + f" ({never} of them were started by no node)" * bool(never) + ": the chain ends here",
            where=str(Path(config.run.dir) / "slurm"),
            remedy="their logs say why; `t1 slurm submit --chain` goes on when it is mended",
        )  # fmt: skip


def cancel_chain(run_dir: str | Path) -> list[int]:
    """End all jobs of a run that wait or work, the last one first; returns their numbers."""
    jobs: Sequence[int] = sorted({line["job"] for line in slurm_jobs.noted(run_dir) if line["job"]}, reverse=True)
    ended = []
    for number in jobs:
        shown = slurm_jobs.find_noted(run_dir, number)
        if shown is not None and shown.alive:
            slurm_jobs.cancel(number)
            ended.append(number)
    return ended
