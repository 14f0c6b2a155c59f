"""A job that reached its time limit, or is preempted, queues itself again: bounded, and with the reason in its log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

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
    left = end - time.time()
    if left > options.requeue_within_s:
        say(f"job {job} is not queued again: it was stopped {left:.0f} s before its time was over")
        return False
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts >= options.max_requeues:
        say(f"job {job} is not queued again: it was {restarts} times (cluster.slurm.max_requeues)")
        return False
    say(f"job {job} ran out of time ({left:.0f} s left): queued again ({restarts + 1} of {options.max_requeues} times)")
    slurm_jobs.note(config.run.dir, job, event="requeued", restarts=restarts + 1)
    try:
        slurm_jobs.requeue(job)
    except T1Error as error:
        say(f"job {job} could not be queued again: {error.problem}; submit it again")
        return False
    return True
