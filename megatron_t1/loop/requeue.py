"""A job that ran out of time, or lost a part of itself, queues itself again: bounded, with the reason in its log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_t1.config.cluster import slurm_seconds
from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.headway import finished_keys, headway


def requeue_when_out_of_time(config: Config, signal_number: int, say: Callable[[str], None]) -> bool:
    """After a clean stop by a signal: put this job back into the queue if its time was running out.

    A job is out of time when its end, as the controller has it, is at most cluster.slurm.requeue_within_s away. The
    same holds for a preempted one, whose end Slurm moves forward. A cancelled job, and one that somebody stopped with
    a signal in the middle of its time, stay ended.

    One that Slurm holds since another start of it failed is let go.

    Returns:
        Whether it was queued again or let go; Slurm ends this process then.
    """
    job, options = slurm_jobs.own_job(), config.cluster.slurm
    if config.cluster.launcher != "slurm" or job is None or signal_number != signal.SIGTERM:
        return False
    if release_if_held(config, say):
        return True
    try:
        shown = slurm_jobs.find(job)
    except T1Error as error:
        say(f"job {job} is not queued again: {error.problem}")
        return False
    end = shown.when("EndTime") if shown else None
    if shown is None or shown.state != "RUNNING" or end is None:
        say(f"job {job} is not queued again: its state is {shown.state if shown else 'unknown'}")
        return False
    if shown.restarts > _restarts():  # this process outlived a node that Slurm has lost
        say(f"job {job} is not queued again: it works elsewhere since")
        return False
    left = end - time.time()
    if left > options.requeue_within_s:
        say(f"job {job} is not queued again: it was stopped {left:.0f} s before its time was over")
        return False
    why = f"ran out of time ({left:.0f} s left)"
    return _requeue(config, job, why, say, whole=_had_its_time(shown))


def _had_its_time(job: slurm_jobs.Job) -> bool:
    """Whether a job has worked for most of its time limit, and wasn't preempted."""
    begun, limit_s = job.when("StartTime"), slurm_seconds(job.fields.get("TimeLimit", ""))
    return begun is not None and limit_s is not None and time.time() - begun >= limit_s / 2


def release_if_held(config: Config, say: Callable[[str], None]) -> bool:
    """Let this process's job go where Slurm has started it again beside the process, a node refused to, and it is held.

    Returns:
        Whether it was let go; Slurm ends this process then.
    """
    try:
        shown = slurm_jobs.find(job) if (job := slurm_jobs.own_job()) is not None else None
        if shown is None or not shown.alive or shown.reason != slurm_jobs.LAUNCH_FAILED:
            return False
        return _release(config, shown, say)
    except T1Error as error:
        say(f"whether the job is held isn't known: {error.problem}")
        return False


@contextmanager
def answering_for_its_job(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Around a loop in a Slurm job: how the process ends must be what becomes of the job.

    * Slurm takes a lost node's component of a heterogeneous job out of it and starts it again by itself, on nodes that
      this process doesn't know: then the whole job is queued again.
    * A process whose node's slurmd was lost, while Slurm holds its job for another start, doesn't end before that: its
      end would be taken for the job's. Where a node couldn't start it, Slurm holds it: it is let go then.
    """
    try:
        yield
    except Exception:
        if config.cluster.launcher == "slurm" and (job := slurm_jobs.own_job()) is not None:
            _answer(config, job, say)
        raise


def _answer(config: Config, job: int, say: Callable[[str], None]) -> None:
    try:
        parts = [each for each in slurm_jobs.components(job) if each.id != job and "HetJobId" in each.fields]
        own = slurm_jobs.find(job)
        if own is not None and own.restarts == _restarts() and any(each.restarts > own.restarts for each in parts):
            _requeue(config, job, "lost a node of one of its components", say)
            return
        while own is not None and own.restarts > _restarts() and own.state in slurm_jobs.WAITING:
            if own.reason == slurm_jobs.LAUNCH_FAILED and not _release(config, own, say):
                return
            time.sleep(2.0)
            own = slurm_jobs.find(job)
    except T1Error as error:
        say(f"job {job}: {error.problem}")


def _release(config: Config, job: slurm_jobs.Job, say: Callable[[str], None]) -> bool:
    """Each failed start counts as a restart."""
    limit = config.cluster.slurm.max_requeues
    if job.restarts > limit:
        say(
            f"job {job.id} is held, and stays so: it was queued again {job.restarts} times (cluster.slurm.max_requeues)"
        )
        return False
    say(f"job {job.id} could not be started again, and was held: released ({job.restarts} of {limit} times)")
    slurm_jobs.note(config.run.dir, job.id, event="released", restarts=job.restarts)
    slurm_jobs.release(job.id)
    return True


def _restarts() -> int:
    """How often this job had been queued again when this process was started."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _requeue(config: Config, job: int, why: str, say: Callable[[str], None], *, whole: bool = False) -> bool:
    """Queue the job again unless that has happened too often, or has led nowhere.

    Args:
        whole: whether it had all its time.
    """
    slurm, restarts = config.cluster.slurm, _restarts()
    if restarts >= slurm.max_requeues:
        say(f"job {job} {why}, but is not queued again: it was {restarts} times (cluster.slurm.max_requeues)")
        return False
    come = headway(config, finished_keys(config))
    stuck = [line for line in slurm_jobs.noted(config.run.dir) if line.get("whole") and line.get("headway") == come]
    if whole and len(stuck) >= slurm.max_failures:
        say(
            f"job {job} {why}, but is not queued again: {len(stuck)} times its whole time finished no step, no episode "
            "and no checkpoint within a phase; give it more time, or set train.*.checkpoint_every"
        )
        return False
    say(f"job {job} {why}: queued again ({restarts + 1} of {slurm.max_requeues} times)")
    slurm_jobs.note(config.run.dir, job, event="requeued", restarts=restarts + 1, headway=come, whole=whole)
    try:
        slurm_jobs.requeue(job)
    except T1Error as error:
        say(f"job {job} could not be queued again: {error.problem}; submit it again")
        return False
    return True
