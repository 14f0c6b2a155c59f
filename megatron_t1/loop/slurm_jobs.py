"""Slurm's jobs: what the controller says of one, handing one in, queueing one again, and the list that a run keeps."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_t1 import sealed
from megatron_t1.errors import T1Error

JOBS_FILE = "slurm/jobs.jsonl"  # of a run: the jobs that were handed in for it, and that started
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
WORKING = ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
# Environment that changes what Slurm's commands do or say (times in a form of the user's, another cluster, questions),
# and what of it says how Slurm is reached.
CHANGES = ("SLURM_", "SBATCH_", "SCANCEL_", "SCONTROL_")
REACHES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# A job that Slurm queued again and holds, since a node couldn't start it: by its owner's leave it may try another one.
LAUNCH_FAILED = "launch_failed_requeued_held"
SAME_S = 5.0  # between Slurm's time of a submission and the run's own note of a job that somebody else handed in
PATIENCE_S = 60.0  # for a controller that doesn't answer: it may be starting again
LEAST_S = 10.0  # that one command may take
# What Slurm's commands say of a controller that didn't get the request, and where it may have got it.
AWAY = re.compile("Unable to contact slurm controller|Connection refused|backup controller in standby mode", re.I)
UNSURE = re.compile("timed out|Zero Bytes were transmitted|transport endpoint|unexpected message", re.I)


@dataclass(frozen=True)
class Job:
    """A job as `scontrol show job` shows it; a heterogeneous one as its first component."""

    id: int
    fields: dict[str, str]

    @property
    def name(self) -> str:
        return self.fields.get("JobName", "")

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "UNKNOWN")

    @property
    def reason(self) -> str:
        """Why it waits, or how it ended; "" where there is nothing to say."""
        reason = self.fields.get("Reason", "None")
        return "" if reason == "None" else reason

    @property
    def nodes(self) -> str:
        nodes = self.fields.get("NodeList", "")
        return "" if nodes == "(null)" else nodes

    @property
    def restarts(self) -> int:
        return int(self.fields.get("Restarts", "0"))

    @property
    def word(self) -> str:
        """The job for a command that changes it: a task of an array is named by its place, since the number of one of
        them is the array's and stands for all.
        """
        task = self.fields.get("ArrayTaskId", "")
        return f"{self.fields['ArrayJobId']}_{task}" if task.isdigit() else str(self.id)

    @property
    def alive(self) -> bool:
        return self.state in (*WAITING, *WORKING)

    @property
    def cancelled(self) -> bool:
        """Whether somebody ended it; not known while it is COMPLETING, however it came to that."""
        return self.state.startswith("CANCELLED")

    @property
    def refused(self) -> bool:
        """Whether a node didn't start the batch script (prolog, slurmd's spool directory, the file for its output), and
        the job isn't queued again. Slurm calls that CANCELLED, too: it has nodes then, and no signal has ended it.
        """
        by_slurm = self.cancelled and bool(self.nodes) and self.fields.get("ExitCode") == "0:0"
        return by_slurm or self.reason == "JobLaunchFailure"

    @property
    def end(self) -> str:
        """How and where it ended."""
        code, _, number = self.fields.get("ExitCode", "0:0").partition(":")
        how = [self.state, self.reason, f"exit status {code}" * (code != "0"), f"signal {number}" * (number > "0")]
        return ", ".join(filter(None, how)) + (f", on {self.nodes}" if self.nodes else "")

    def when(self, field: str) -> float | None:
        """StartTime, EndTime or SubmitTime as seconds since the epoch; None where it isn't known."""
        try:
            return datetime.fromisoformat(self.fields.get(field, "")).timestamp()
        except ValueError:
            return None


def own_job() -> int | None:
    """Number of the job this process belongs to."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return int(job) if job.isdigit() else None


def find(job: int) -> Job | None:
    """The job, or None when Slurm doesn't know it (it forgets ended ones after MinJobAge).

    Raises:
        T1Error: the controller doesn't answer for a minute, or there is no Slurm.
    """
    return next((each for each in components(job) if each.id == job), None)


def components(job: int) -> list[Job]:
    """What Slurm shows for a number: one job; all components of a heterogeneous one, all tasks of an array."""
    return _shown([str(job)])


def of_script(script: Path) -> list[Job]:
    """All jobs that Slurm knows, of anybody, with this batch script. Raises as `find`."""
    return [job for job in _shown([]) if f"{job.fields.get('Command', '')} ".startswith(f"{script} ")]


def _shown(words: Sequence[str]) -> list[Job]:
    said = ask(["scontrol", "show", "job", *words, "-o"], unknown="Invalid job id") or ""
    jobs = []
    for line in said.strip().splitlines():
        fields = dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|$)", line))
        if fields.get("JobId", "").isdigit():
            jobs.append(Job(int(fields["JobId"]), fields))
    return jobs


def submit(options: Sequence[str], script: Path, arguments: Sequence[str], *, directory: Path | None = None) -> Job:
    """Hand a batch script in; returns the job once the controller shows it.

    A job that is handed in seconds before the controller dies can be lost: that Slurm answered with a number isn't
    enough.

    Raises:
        T1Error: Slurm refuses it, with what it says, or doesn't know it afterwards.
    """
    command = ["sbatch", "--parsable", *options, str(script), *arguments]
    said = ask(command, directory=directory, repeatable=False)
    number = (said or "").strip().rpartition("\n")[2].partition(";")[0]
    if not number.isdigit():
        raise T1Error(f"sbatch names no job: {said!r}", where=" ".join(command[:8]))
    if (job := find(int(number))) is None:
        raise T1Error(f"job {number} was handed in, but Slurm doesn't know it", remedy="submit it again")
    return job


def node_address(node: str) -> str:
    """Address of a node as Slurm knows it; node names need not resolve (verl#491).

    Raises:
        T1Error: Slurm doesn't tell.
    """
    said = ask(["scontrol", "show", "node", node, "-o"]) or ""
    match = re.search(r"\bNodeAddr=([A-Za-z0-9_.:-]+)", said)
    if not match:
        raise T1Error(
            f"Slurm doesn't tell the address of node {node}: {said.strip()[:200]}", where="scontrol show node"
        )
    return match[1]


def requeue(job: int) -> None:
    """Put a running job back into the queue; Slurm ends its processes."""
    ask(["scontrol", "requeue", _word(job)])


def release(job: int) -> None:
    """Let a held job start."""
    ask(["scontrol", "release", _word(job)])


def _word(job: int) -> str:
    shown = find(job)
    return shown.word if shown else str(job)


def cluster_name() -> str:
    """Of the cluster this process can ask: in jobs Slurm says it, elsewhere its controller; "" without one."""
    if name := os.environ.get("SLURM_CLUSTER_NAME"):
        return name
    try:
        said = ask(["scontrol", "show", "config"], patience_s=0.0) or ""
    except T1Error:
        return ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", said, re.MULTILINE)
    return found[1] if found else ""


def literal(path: str | Path) -> str:
    """A path as Slurm's --output takes it, which would replace `%j` in it."""
    return str(path).replace("%", "%%")


def cancel(job: int) -> None:
    """End a job, or take it out of the queue; nothing happens to one that is over."""
    ask(["scancel", _word(job)], unknown="Invalid job id")


def note(run_dir: str | Path, job: int, **facts: Any) -> None:
    """Append a job to the run's own list."""
    sealed.append(Path(run_dir) / JOBS_FILE, {"job": job, "time": time.time(), **facts})


def note_submitted(run_dir: str | Path, job: Job, **facts: Any) -> None:
    """Note a job that was handed in, with the time that Slurm's own clock says of that."""
    note(run_dir, job.id, event="submitted", submitted=job.when("SubmitTime"), **facts)


def noted(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's list of jobs, in the order they were noted; without lines that were cut short or changed."""
    return sealed.read_lines(Path(run_dir) / JOBS_FILE).values


def find_noted(run_dir: str | Path, job: int) -> Job | None:
    """A job of the run's list; None when Slurm doesn't know it, or has given its number to another one.

    A controller that lost a job in a crash counts on from the last number it had saved.
    """
    shown = find(job)
    if shown is None or shown.restarts:  # which gives a job another time of submission
        return shown
    own = [line for line in noted(run_dir) if line["job"] == job]
    submitted, known = shown.when("SubmitTime"), {line["submitted"] for line in own if line.get("submitted")}
    if submitted is None or submitted in known:
        return shown
    last = max((line["time"] for line in own if "submitted" not in line), default=0.0)
    return shown if submitted <= last + SAME_S else None


def ask(
    command: Sequence[str],
    *,
    unknown: str = "",
    directory: Path | None = None,
    repeatable: bool = True,
    patience_s: float = PATIENCE_S,
) -> str | None:
    """Standard output of a Slurm command; None where it says `unknown`. Waits for a controller that is away or busy.

    Args:
        directory: where the command is given.
        repeatable: whether the command may be given again where Slurm may have got it the first time.

    Raises:
        T1Error: Slurm says something else, there is none, or its controller doesn't answer for a minute; the directory
            isn't there.
    """
    if directory is not None and not directory.is_dir():
        raise T1Error("the directory that jobs are handed in from isn't there", where=str(directory))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(CHANGES) or name in REACHES}
    deadline = time.monotonic() + patience_s
    while True:
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=directory,
                capture_output=True,
                text=True,
                errors="replace",  # of other users' jobs, too
                timeout=max(patience_s, LEAST_S),
            )
        except FileNotFoundError as error:
            raise T1Error(
                f"{command[0]} is not on PATH: there is no Slurm here", remedy="log in to the cluster's submit node"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise T1Error(f"Slurm's controller doesn't answer `{command[0]}`", remedy="`scontrol ping`") from error
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr.strip() or done.stdout.strip())[:500]
        if unknown and unknown in said:
            return None
        unsure = UNSURE.search(said) is not None and AWAY.search(said) is None
        if unsure and not repeatable:
            raise T1Error(
                f"`{command[0]}` got no answer: {said}", remedy="`squeue --me` shows whether Slurm has taken the job"
            )
        if not (unsure or AWAY.search(said)) or time.monotonic() >= deadline:
            raise T1Error(f"`{command[0]} {command[1]}` failed: {said}", remedy="`scontrol ping` shows the controller")
        time.sleep(2.0)
