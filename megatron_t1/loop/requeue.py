"""A job that ran out of time, or lost a part of itself, queues itself again: bounded, with the reason in its log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.loop import slurm_jobs


def requeue_when_out_of_time(config: Config, signal_number: int, say: Callable[[str], None]) -> bool:
    """After a clean stop by a signal: put this job back into the queue if its time was running out.

    A job is out of time when its end, as the controller has it, is at most cluster.slurm.requeue_within_s away. The
    same holds for a preempted one, whose end Slurm moves forward. A cancelled job, and one that somebody stopped with
    a signal in the middle of its time, stay ended.

    Returns:
        Whether it was queued again; Slurm then ends this process.
    """
    job, options = slurm_jobs.own_job(), config.cluster.slurm
    if config.cluster.launcher != "slurm" or job is None or signal_number != signal.SIGTERM:
        return False
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
    return _requeue(config, job, f"ran out of time ({left:.0f} s left)", say)


@contextmanager
def answering_for_its_job(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Around a loop in a Slurm job: how the process ends must be what becomes of the job.

    * Slurm takes a lost node's component of a heterogeneous job out of it and starts it again by itself, on nodes that
      this process doesn't know: then the whole job is queued again.
    * A process whose node's slurmd was lost, while Slurm holds its job for another start, doesn't end before that: its
      end would be taken for the job's.
    """
    try:
        yield
    except T1Error:
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
            time.sleep(2.0)
            own = slurm_jobs.find(job)
    except T1Error as error:
        say(f"job {job}: {error.problem}")


def _restarts() -> int:
    """How often this job had been queued again when this process was started."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _requeue(config: Config, job: int, why: str, say: Callable[[str], None]) -> bool:
    restarts, limit = _restarts(), config.cluster.slurm.max_requeues
    if restarts >= limit:
        say(f"job {job} {why}, but is not queued again: it was {restarts} times (cluster.slurm.max_requeues)")
        return False
    say(f"job {job} {why}: queued again ({restarts + 1} of {limit} times)")
    slurm_jobs.note(config.run.dir, job, event="requeued", restarts=restarts + 1)
    try:
        slurm_jobs.requeue(job)
    except T1Error as error:
        say(f"job {job} could not be queued again: {error.problem}; submit it again")
        return False
    return True
