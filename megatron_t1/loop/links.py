"""Links of a chain in Slurm's queue: handed in, waiting for one another, taken back; those that no node started.

A link that no node starts (slurmd refuses it, a prolog fails, the run's file system isn't there) hands nothing in. So
some more links wait behind each successor, of both kinds in turn: whichever is the first to begin goes on, and links
that are handed in from then on leave the node out on which the others didn't begin. Links aren't queued again by Slurm:
it would hold one that a node didn't start, and those behind it with it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_t1 import sealed
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.launcher import KINDS
from megatron_t1.loop.submission import job_arguments, job_options, resource_options, write_script

CHAIN_FILE = "slurm/chain.json"
STARTS = "`t1 slurm submit --chain ...` starts one"
OTHER = dict(zip(KINDS, reversed(KINDS), strict=True))
UNSTARTED = "unstarted"  # event of the run's list: a link that never began
ELSEWHERE = "elsewhere"  # the same: a link that began on other nodes than the first ones (loop.submission)
LEFT_OUT_S = 86400.0  # how long a node is left out on which a link didn't begin; ours
TOO_FEW = re.compile("node (count|configuration|name)", re.I)  # what sbatch says where no nodes are left for a job
LEFT_OUT = 4  # nodes at most: leaving out one after the other makes a cluster too small; ours


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

    @property
    def command(self) -> str:
        """That hands it in once more, for a shell."""
        return f"cd {shlex.quote(self.directory)} && t1 slurm submit --chain {shlex.join(self.overrides)}".rstrip()

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


def submit_link(config: Config, kind: str, *, after: Sequence[int] = ()) -> int:
    """Hand a link in, and note it.

    Args:
        after: the jobs that it waits for, its predecessor last; those that Slurm has lost are waited for by the run's
            lock instead.
    """
    chain, run = Chain.read(config.run.dir), Path(config.run.dir).resolve()
    options = [*job_options(config, f"t1-{kind}"), *resource_options(config, [kind]), "--no-requeue"]
    known = [job for job in after if slurm_jobs.find(job) is not None]
    if known:
        options += [f"--dependency=afterany:{':'.join(map(str, known))}", "--kill-on-invalid-dep=yes"]
    command, script = job_arguments(config.run.dir, "slurm", "link", str(run), kind), write_script(config.run.dir)
    leave_out = _left_out(config.run.dir, options)
    try:
        job = slurm_jobs.submit([*options, *leave_out], script, command, directory=Path(chain.directory))
    except T1Error as error:
        if not leave_out or TOO_FEW.search(error.problem) is None:
            raise
        job = slurm_jobs.submit(options, script, command, directory=Path(chain.directory))
    slurm_jobs.note_submitted(config.run.dir, job, kind=kind, after=after[-1] if after else None)
    return job.id


def _left_out(run_dir: str | Path, options: Sequence[str]) -> list[str]:
    """The option that keeps a link off nodes on which others didn't begin, beside those that the user leaves out."""
    since = time.time() - LEFT_OUT_S
    told = [line for line in slurm_jobs.noted(run_dir) if line.get("event") in (UNSTARTED, ELSEWHERE)]
    late = [line for line in told if line["time"] >= since]
    nodes = list(dict.fromkeys(line["node"] for line in reversed(late) if line.get("node")))[:LEFT_OUT]
    given = [option for option in options if option.startswith(("-x", "--exclude"))]
    if not nodes or any(not option.startswith("--exclude=") for option in given):
        return []
    return ["--exclude=" + ",".join([*(option.removeprefix("--exclude=") for option in given), *nodes])]


def fill(config: Config, kind: str, job: int | None, say: Callable[[str], None]) -> list[int]:
    """See to it that a link and its spares wait for a job, or without one that a chain's first one has its spares.

    Args:
        kind: of the first one where none waits; of the others each is of another kind than the one before.

    Returns:
        Those that wait; fewer than wanted where Slurm takes no more, which is said, and tried again by the one that
        begins.

    Raises:
        T1Error: Slurm takes none at all.
    """
    waiting = [] if job is None else followers(config.run.dir, job)
    kinds = {line["job"]: line.get("kind") for line in slurm_jobs.noted(config.run.dir)}
    before = [] if job is None else [job]
    while len(waiting) < 1 + config.cluster.slurm.spare_links:
        last = kinds.get(waiting[-1]) if waiting else None
        next_one = OTHER.get(last, kind)
        try:
            waiting.append(submit_link(config, next_one, after=[*before, *waiting]))
        except T1Error as error:
            if not waiting:
                raise
            say(f"{len(waiting)} jobs wait to go on; Slurm takes no more now: {error.problem}")
            break
        kinds[waiting[-1]] = next_one
    return waiting


def followers(run_dir: str | Path, job: int) -> list[int]:
    """Links that wait for a job, or for one that does, in their order."""
    known, found = {job}, []
    for line in slurm_jobs.noted(run_dir):
        if line.get("event") == "submitted" and line.get("after") in known and line["job"] not in known:
            known.add(line["job"])
            found.append(line["job"])
    return _waiting(run_dir, found)


def take_back(run_dir: str | Path, job: int) -> list[int]:
    """Take the links that wait for this job out of the queue."""
    waiting = followers(run_dir, job)
    for each in reversed(waiting):
        slurm_jobs.cancel(each)
    return waiting


def waiting_links(run_dir: str | Path) -> list[int]:
    """Links that were handed in and haven't begun, the last one first."""
    jobs = {line["job"] for line in slurm_jobs.noted(run_dir) if line.get("event") == "submitted"}
    return _waiting(run_dir, sorted(jobs, reverse=True))


def _waiting(run_dir: str | Path, jobs: Sequence[int]) -> list[int]:
    shown = [slurm_jobs.find_noted(run_dir, job) for job in jobs]
    return [job.id for job in shown if job is not None and job.state in slurm_jobs.WAITING]


def listed(jobs: Sequence[int]) -> str:
    return f"job{'s' * (len(jobs) > 1)} {', '.join(map(str, jobs))}"


def cancelled_before(run_dir: str | Path, job: int) -> int | None:
    """The link that this job follows, if somebody cancelled it, or one before those that never began; None too where
    Slurm has forgotten it.
    """
    began = begun(run_dir)
    for each in _predecessors(run_dir, job):
        shown = slurm_jobs.find_noted(run_dir, each)
        if shown is not None and shown.cancelled and not shown.refused:
            return each
        if each in began:
            return None
    return None


def begun(run_dir: str | Path) -> set[int]:
    """Jobs of the run that began to work on it."""
    return {line["job"] for line in slurm_jobs.noted(run_dir) if line.get("event") == "began"}


def _predecessors(run_dir: str | Path, job: int) -> list[int]:
    """The links that a job follows, the last one first."""
    after = {line["job"]: line.get("after") for line in slurm_jobs.noted(run_dir) if line.get("event") == "submitted"}
    found: list[int] = []
    while (before := after.get(found[-1] if found else job)) is not None and before not in (job, *found):
        found.append(before)
    return found


def unstarted(run_dir: str | Path, *, before: int | None = None) -> dict[int, slurm_jobs.Job | None]:
    """Links that are over and never began; None: Slurm knows no more of it.

    Args:
        before: only those in whose place this link has begun; otherwise all that Slurm still knows.
    """
    lines, began = slurm_jobs.noted(run_dir), begun(run_dir)
    if before is None:
        links = [line["job"] for line in lines if line.get("event") == "submitted" and line["job"] not in began]
        shown = {job: slurm_jobs.find_noted(run_dir, job) for job in links}
        return {job: each for job, each in shown.items() if each is not None and _never_began(each)}
    found = {}
    for job in _predecessors(run_dir, before):
        if job in began:
            break
        shown = slurm_jobs.find_noted(run_dir, job)
        if shown is None or _never_began(shown):
            found[job] = shown
    return found


def _never_began(job: slurm_jobs.Job) -> bool:
    """Of a link that isn't noted to have begun: not one that was taken back, or found that the chain was cancelled."""
    return not job.alive and job.state != "COMPLETED" and (job.refused or not job.cancelled)


def note_elsewhere(run_dir: str | Path, job: int) -> None:
    """Note the nodes that a link leaves out since it couldn't begin there."""
    shown = slurm_jobs.find(job)
    left_out = shown.fields.get("ExcNodeList", "(null)") if shown and shown.restarts else "(null)"
    if left_out not in ("(null)", *(line.get("node") for line in slurm_jobs.noted(run_dir))):
        slurm_jobs.note(run_dir, job, event=ELSEWHERE, node=left_out)


def note_unstarted(
    run_dir: str | Path, come: list[int], say: Callable[[str], None], *, before: int | None = None
) -> None:
    """Note links that never began, with the node that was to start them, and say so, once.

    Args:
        come: the run's `headway`.
        before: as of `unstarted`.
    """
    lines = slurm_jobs.noted(run_dir)
    known = {line["job"] for line in lines if line.get("event") == UNSTARTED}
    kinds = {line["job"]: line.get("kind") for line in lines if line.get("event") == "submitted"}
    for job, shown in unstarted(run_dir, before=before).items():
        if job not in known:
            end = shown.end if shown else "Slurm knows no more of it"
            node = shown.fields.get("BatchHost", "") if shown else ""
            say(f"job {job} never began: {end}")
            slurm_jobs.note(run_dir, job, event=UNSTARTED, kind=kinds.get(job), node=node, end=end, headway=come)
