"""A training as a chain of jobs: rollout and training on partitions of their own, each job the next one's dependency.

A link is one job. It hands its successor in before it begins, held back until it has ended however it ends
(`afterany`: with `afterok` a failed link would leave its successor waiting for ever), then runs the steps of its own
kind until one of the other kind is next. A link that finds no step of its kind hands on at once, so a chain gets over
failed, lost and timed-out links by itself, also over those whose nodes aren't fit to start on; links that finish no
step, and come no further within one either (`loop.headway`), are counted, and a few in a row end it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_t1 import sealed
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.headway import finished_keys, headway
from megatron_t1.loop.launcher import KINDS, Stopped
from megatron_t1.loop.lock import OtherLoop, lock_owner
from megatron_t1.loop.runner import Runner, stop_signals
from megatron_t1.loop.steps import next_step
from megatron_t1.loop.submission import job_options, resource_options, t1_command, write_script
from megatron_t1.manifest import Key

CHAIN_FILE = "slurm/chain.json"
STARTS = "`t1 slurm submit --chain ...` starts one"
OTHER = dict(zip(KINDS, reversed(KINDS), strict=True))
HELD = ("--kill-on-invalid-dep=yes", "--no-requeue")


@dataclass(frozen=True)
class Chain:
    """What every link of a chain needs to know; lies in the run directory.

    Attributes:
        overrides: of the `t1 run` that the chain stands for.
        directory: where it was handed in; relative paths are relative to it.
    """

    overrides: list[str]
    directory: str

    def write(self, run_dir: str | Path) -> None:
        path = Path(run_dir) / CHAIN_FILE
        sealed.write(path, asdict(self))

    @classmethod
    def read(cls, run_dir: str | Path) -> Chain:
        """Raises IncompleteError where the run has no chain, or a damaged one."""
        path = Path(run_dir) / CHAIN_FILE
        try:
            return cls(**sealed.read(path))
        except FileNotFoundError as error:
            problem = "there is no chain of jobs to go on with"
            raise IncompleteError(problem, where=str(path), remedy=STARTS) from error
        except (OSError, ValueError, TypeError) as error:
            raise IncompleteError(
                f"the chain of jobs can't be gone on with: {error}", where=str(path), remedy=STARTS
            ) from error


def next_kind(config: Config, finished: Collection[Key]) -> str | None:
    """Kind of the step that is next; None: the training is done."""
    step = next_step(config.loop, finished)
    return None if step is None else step.kind


def submit_link(config: Config, kind: str, *, after: int | None) -> int:
    """Hand a link in, and note it.

    Args:
        after: the job that it waits for; one that Slurm has lost is waited for by the run's lock instead.
    """
    chain, name = Chain.read(config.run.dir), f"t1-{kind}"
    options = [*job_options(config, name), *resource_options(config, [kind])]
    if after is not None and slurm_jobs.find(after) is not None:
        options += [f"--dependency=afterany:{after}", *HELD]
    command = t1_command("slurm", "link", str(Path(config.run.dir).resolve()), kind)
    job = slurm_jobs.submit(options, write_script(config.run.dir), command, directory=Path(chain.directory))
    slurm_jobs.note_submitted(config.run.dir, job, kind=kind, after=after)
    return job.id


def waiting_links(run_dir: str | Path) -> list[int]:
    """Links that were handed in and haven't begun, the last one first."""
    jobs = {line["job"] for line in slurm_jobs.noted(run_dir) if line.get("event") == "submitted"}
    found = [slurm_jobs.find_noted(run_dir, job) for job in sorted(jobs, reverse=True)]
    return [job.id for job in found if job is not None and job.state in slurm_jobs.WAITING]


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
        if not _is_for(config, kind, job, say):
            return
        successor = _handed_in(config, OTHER[kind], job, say)
    try:
        with begin() as runner:
            runner.run(kind)
    except OtherLoop:
        owner = lock_owner(config.run.dir).get("slurm_job")
        if owner in {str(line["job"]) for line in slurm_jobs.noted(config.run.dir)}:
            _take_back(config, successor)  # that job of the run has a successor of its own
        raise
    except Exception as error:
        successor = _verified(config, successor, OTHER[kind], job, say)
        if isinstance(error, Stopped):
            say(f"job {successor} goes on, unless this job was cancelled")  # which only its successor can know
        raise
    if next_kind(config, finished_keys(config)) is not None:
        _verified(config, successor, OTHER[kind], job, say)
    elif successor:
        slurm_jobs.cancel(successor)
        say(f"the training is done; job {successor} was taken back")


def _is_for(config: Config, kind: str, job: int, say: Callable[[str], None]) -> bool:
    """Whether a job of this kind is to work now; otherwise it has handed on, or the chain is over."""
    cancelled = _cancelled_before(config, job)
    if cancelled is not None:
        say(f"job {cancelled}, which this one follows, was cancelled: the chain ends; the run can be submitted again")
        return False
    finished = finished_keys(config)
    slurm_jobs.note(config.run.dir, job, event="began", kind=kind, headway=headway(config, finished))
    wanted = next_kind(config, finished)
    if wanted is None:
        say("nothing is left to do: the chain ends")
    elif wanted != kind:
        successor = _successor(config, wanted, job)
        say(f"the next step is of kind {wanted}: job {successor} takes it")
    else:
        _require_headway(config, kind, headway(config, finished))
    return wanted == kind


def _handed_in(config: Config, kind: str, job: int, say: Callable[[str], None]) -> int:
    """The job's successor; 0 where Slurm takes none now, which is no reason not to work."""
    try:
        successor = _successor(config, kind, job)
    except T1Error as error:
        say(f"no job that follows could be handed in, which is tried again at the end: {error.problem}")
        return 0
    say(f"job {successor} ({kind}) follows when this one ends")
    return successor


def _take_back(config: Config, successor: int) -> None:
    shown = slurm_jobs.find_noted(config.run.dir, successor) if successor else None
    if shown is not None and shown.state in slurm_jobs.WAITING:
        slurm_jobs.cancel(successor)


def _verified(config: Config, successor: int, kind: str, job: int, say: Callable[[str], None]) -> int:
    """The successor, or another one where a controller that died just after it was handed in has lost it."""
    if successor and slurm_jobs.find_noted(config.run.dir, successor) is not None:
        return successor
    again = submit_link(config, kind, after=job)
    say(f"Slurm has lost job {successor}: job {again} follows in its place" if successor else f"job {again} follows")
    return again


def _cancelled_before(config: Config, job: int) -> int | None:
    """The link that this job follows, if somebody cancelled it; None too where Slurm has forgotten it."""
    for line in slurm_jobs.noted(config.run.dir):
        if line.get("event") == "submitted" and line["job"] == job and line.get("after") is not None:
            shown = slurm_jobs.find_noted(config.run.dir, line["after"])
            return shown.id if shown is not None and shown.cancelled else None
    return None


def _successor(config: Config, kind: str, job: int) -> int:
    """The link that waits for this one: handed in before this job was queued again, or handed in now."""
    for line in reversed(slurm_jobs.noted(config.run.dir)):
        if line.get("event") == "submitted" and line.get("after") == job and line.get("kind") == kind:
            shown = slurm_jobs.find_noted(config.run.dir, line["job"])
            if shown is not None and shown.state in slurm_jobs.WAITING:
                return shown.id
    return submit_link(config, kind, after=job)


def _require_headway(config: Config, kind: str, come: list[int]) -> None:
    """Refuse when links of this kind that began at the same point, since the chain was handed in, all left it there."""
    tries = 0
    for line in reversed(slurm_jobs.noted(config.run.dir)):
        if line.get("event") == "chain" or line.get("headway", come) != come:
            break
        tries += line.get("event") == "began" and line.get("kind") == kind
    limit = config.cluster.slurm.max_failures
    if tries > limit:
        raise T1Error(
            f"{limit} jobs in a row finished no step, no episode and no checkpoint within a phase: the chain ends here",
            where=str(Path(config.run.dir) / "slurm"),
            remedy="their logs say why; `t1 slurm submit --chain` goes on when it is mended",
        )


def cancel_chain(run_dir: str | Path) -> list[int]:
    """End all jobs of a run that wait or work, the last one first; returns their numbers."""
    jobs: Sequence[int] = sorted({line["job"] for line in slurm_jobs.noted(run_dir)}, reverse=True)
    ended = []
    for number in jobs:
        shown = slurm_jobs.find_noted(run_dir, number)
        if shown is not None and shown.alive:
            slurm_jobs.cancel(number)
            ended.append(number)
    return ended
