"""Slurm's jobs: what the controller says of one, handing one in, queueing one again, and the list that a run keeps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_t1.errors import T1Error

JOBS_FILE = "slurm/jobs.jsonl"  # of a run: the jobs that were handed in for it, and that started
WAITING, WORKING = ("PENDING",), ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED")
SAME_S = 5.0  # between Slurm's time of a submission and the run's own note of it
PATIENCE_S = 60.0  # for a controller that doesn't answer: it may be starting again


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
    def alive(self) -> bool:
        return self.state in (*WAITING, *WORKING)

    @property
    def cancelled(self) -> bool:
        """Whether somebody ended it; not known while it is COMPLETING, however it came to that."""
        return self.state.startswith("CANCELLED")

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
    said = ask(["scontrol", "show", "job", str(job), "-o"], unknown="Invalid job id") or ""
    jobs = []
    for line in said.strip().splitlines():
        fields = dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|$)", line))
        if fields.get("JobId", "").isdigit():
            jobs.append(Job(int(fields["JobId"]), fields))
    return jobs


def submit(options: Sequence[str], script: Path, arguments: Sequence[str], *, directory: Path | None = None) -> int:
    """Hand a batch script in; returns the job's number once the controller shows the job.

    A job that is handed in seconds before the controller dies can be lost: that Slurm answered with a number isn't
    enough.

    Raises:
        T1Error: Slurm refuses it, with what it says, or doesn't know it afterwards.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    command = ["sbatch", "--parsable", *options, str(script), *arguments]
    said = ask(command, environment={**clean, **kept}, directory=directory)
    number = (said or "").strip().splitlines()[-1].partition(";")[0]
    if not number.isdigit():
        raise T1Error(f"sbatch names no job: {said!r}", where=" ".join(command[:8]))
    if find(int(number)) is None:
        raise T1Error(f"job {number} was handed in, but Slurm doesn't know it", remedy="submit it again")
    return int(number)


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
    ask(["scontrol", "requeue", str(job)])


def cancel(job: int) -> None:
    """End a job, or take it out of the queue; nothing happens to one that is over."""
    ask(["scancel", str(job)], unknown="Invalid job id")


def note(run_dir: str | Path, job: int, **facts: Any) -> None:
    """Append a job to the run's own list."""
    path = Path(run_dir) / JOBS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({"job": job, "time": time.time(), **facts}) + "\n")


def noted(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's list of jobs, in the order they were noted; a line cut short by a crash is left out."""
    path = Path(run_dir) / JOBS_FILE
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("job"), int):
            lines.append(line)
    return lines


def find_noted(run_dir: str | Path, job: int) -> Job | None:
    """A job of the run's list; None when Slurm doesn't know it, or has given its number to another one.

    A controller that lost a job in a crash counts on from the last number it had saved.
    """
    shown = find(job)
    if shown is None or shown.restarts:  # which gives a job another time of submission
        return shown
    submitted = shown.when("SubmitTime")
    last = max((line["time"] for line in noted(run_dir) if line["job"] == job and "time" in line), default=0.0)
    return shown if submitted is None or submitted <= last + SAME_S else None


def ask(
    command: Sequence[str],
    *,
    unknown: str = "",
    environment: dict[str, str] | None = None,
    directory: Path | None = None,
) -> str | None:
    """Standard output of a Slurm command; None where it says `unknown`. Waits for a controller that is away.

    Raises:
        T1Error: Slurm says something else, there is none, or its controller doesn't answer for a minute.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            done = subprocess.run(
                command, env=environment, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S
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
        away = "Unable to contact slurm controller" in said or "Connection refused" in said
        if not away or time.monotonic() > deadline:
            raise T1Error(f"`{command[0]} {command[1]}` failed: {said}", remedy="`scontrol ping` shows the controller")
        time.sleep(2.0)
