"""The run's list of jobs (`slurm/jobs.jsonl`) as a whole: whether lines of it are gone, and what Slurm knows instead.

Each line says its number and the seal of the one before (`sealed.append`); the manifest says which was the last one
when it was written. What is missing is asked of Slurm, noted again, and never keeps a run from going on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_t1 import sealed
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.submission import script_of
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths

MENDED = "mended"  # event of a line before which damage was found, and what Slurm still knew was noted again


def damage(run_dir: str | Path) -> str:
    """What is wrong with the list, since it was mended last; "" for nothing."""
    lines, known = sealed.read_lines(Path(run_dir) / slurm_jobs.JOBS_FILE), _marked(run_dir)
    mended = [index for index, line in enumerate(lines.values) if line.get("event") == MENDED]
    since = mended[-1] if mended else -1
    gone = sum(count for index, count in lines.gaps.items() if index > since)
    changed = lines.damaged - (lines.values[since].get("damaged", 0) if mended else 0)
    settled = any(lines.values[index].get("mark") == known for index in mended)
    if known and not settled and (known["number"], known[sealed.SEAL]) not in lines.places and not changed:
        gone = max(gone, known["number"] - lines.last[0], 1)
    said = [f"{changed} lines aren't what was written"] * (changed > 0) + [f"{gone} lines are gone"] * (gone > 0)
    return f"{slurm_jobs.JOBS_FILE}: {' and '.join(said)}" if said else ""


def unlisted(run_dir: str | Path) -> list[slurm_jobs.Job]:
    """Jobs with this run's batch script that Slurm knows and the list doesn't.

    Raises:
        T1Error: Slurm can't be asked.
    """
    known = {line["job"] for line in slurm_jobs.noted(run_dir)}
    return [job for job in slurm_jobs.of_script(script_of(run_dir)) if job.id not in known]


def kind_of(job: slurm_jobs.Job) -> str:
    return job.name.removeprefix("t1-") if job.name in ("t1-rollout", "t1-train") else "run"


def mend(run_dir: str | Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Note what Slurm knows of a list with damage, and say it.

    Returns:
        What the manifest is to say of the list from now on: its last line; what it says already while damage couldn't
        be mended; {} where there is no list.
    """
    if (found := damage(run_dir)) and not _mended(run_dir, found, say):
        return _marked(run_dir)
    number, seal = sealed.read_lines(Path(run_dir) / slurm_jobs.JOBS_FILE).last
    return {"number": number, sealed.SEAL: seal} if number else {}


def _mended(run_dir: str | Path, found: str, say: Callable[[str], None]) -> bool:
    try:
        jobs = unlisted(run_dir)
    except T1Error as error:
        say(f"{found}, and what was in them isn't known: {error.problem}; this goes on")
        return False
    for job in jobs:
        after = re.findall(r":(\d+)", job.fields.get("Dependency", ""))
        slurm_jobs.note_submitted(run_dir, job, kind=kind_of(job), after=int(after[-1]) if after else None)
    lines = sealed.read_lines(Path(run_dir) / slurm_jobs.JOBS_FILE)
    slurm_jobs.note(run_dir, 0, event=MENDED, mark=_marked(run_dir), damaged=lines.damaged)
    again = ", ".join(str(job.id) for job in jobs) or "no further job"
    say(f"{found}; Slurm knows {again} of this run, which is noted again; this goes on")
    return True


def _marked(run_dir: str | Path) -> dict[str, Any]:
    """What the manifest says; {} where it says nothing."""
    try:
        known = Manifest.read_exactly(RunPaths.of(run_dir).manifest).jobs
    except IncompleteError:
        return {}
    return known if type(known.get("number")) is int else {}
