"""Prove the tasks of a directory or list, many at once, and keep what was found: `t1 tasks check`.

    OUT/results.jsonl     a line for each task as soon as it is known: an interrupted check goes on from there
    OUT/tasks.list        the tasks worth training on, to be named in env.tasks
    OUT/baseline.json     what passes when nothing is done (environment.baseline); env.tasks=OUT/tasks.list brings it
    OUT/table.txt         all tasks, with status, checks and seconds

A result counts again while the task's files, the sandbox's options and the number of repeats are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_t1 import atomic, sealed
from megatron_t1.config.schema import EnvConfig, SandboxConfig
from megatron_t1.environment.baseline import BASELINE_FILE, Baseline, write_baselines
from megatron_t1.environment.digest import task_digest
from megatron_t1.environment.harbor_format import UNKNOWN_FIELDS
from megatron_t1.environment.loading import TaskFolder, find_tasks, load_task, write_list
from megatron_t1.environment.proof import Limits, Proof, Status, prove
from megatron_t1.environment.sandbox.interface import Sandbox, builds_dockerfiles
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error, readable

RESULTS, LIST, TABLE = "results.jsonl", "tasks.list", "table.txt"
VERSION = 2


@dataclass(frozen=True)
class Checked:
    """A task folder and what was found of it."""

    folder: TaskFolder
    proof: Proof

    @property
    def name(self) -> str:
        return self.folder.path.name


class TaskCheck:
    """One check of a task set; `play` is called for each of `pending`, then `finish`.

    Args:
        tasks: task directory or list.
        out: directory for results; made when there is none.
        repeats: times that nothing, and the reference solution, are played.
        again: statuses whose tasks are played again; those that depend on the machine always are.
        tell: called with each task that was found out about.

    Raises:
        T1Error: there is no task, or `out` can't be used.
    """

    def __init__(
        self,
        tasks: str | Path,
        out: str | Path,
        env: EnvConfig,
        *,
        repeats: int = 2,
        again: Sequence[str] = (),
        limit: int = 0,
        tell: Callable[[Checked], None] = lambda checked: None,
    ):
        self.out, self.env, self.repeats, self.tell = Path(out), env, repeats, tell
        self._settings = _settings(env, repeats)
        self._unreadable: dict[str, str] = {}
        self.folders = [self._with_digest(folder) for folder in find_tasks(tasks)[: limit or None]]
        self.out.mkdir(parents=True, exist_ok=True)
        known = _read_results(self.out / RESULTS, self._settings)
        forget = {*Status.OF_MACHINE, *again}
        self.checked: dict[str, Checked] = {}
        for folder in self.folders:
            proof = known.get((folder.path.name, folder.sha256))
            if folder.sha256 and proof is not None and proof.status not in forget:
                self.checked[folder.path.name] = Checked(folder, proof)

    @property
    def pending(self) -> list[TaskFolder]:
        return [folder for folder in self.folders if folder.path.name not in self.checked]

    async def play(self, folder: TaskFolder, sandbox: Sandbox) -> None:
        """Prove one task; what goes wrong with it is its result."""
        checked = Checked(folder, await self._proof(folder, sandbox))
        self._keep(checked)
        self.checked[checked.name] = checked
        self.tell(checked)

    async def _proof(self, folder: TaskFolder, sandbox: Sandbox) -> Proof:
        if folder.path.name in self._unreadable:
            return Proof(Status.BROKEN, self._unreadable[folder.path.name])
        try:
            task = await asyncio.to_thread(load_task, folder.path, engine_builds=builds_dockerfiles(self.env.sandbox))
        except T1Error as error:
            return Proof(Status.BROKEN, error.problem)
        except Exception as error:  # whatever a task's files do to a reader, the other tasks are checked
            return Proof(Status.BROKEN, f"can't be read: {type(error).__name__}: {error}")
        if task.obstacles:
            return Proof(Status.UNPLAYABLE, "; ".join(task.obstacles))
        limits = Limits(self.env.start_timeout_s, self.env.verifier_timeout_s)
        proof = await prove(sandbox, task, repeats=self.repeats, limits=limits)
        proof.notes += _notes(task, self.env.sandbox)
        return proof

    def _with_digest(self, folder: TaskFolder) -> TaskFolder:
        """With no digest where its files can't be read: such a task is broken, and not known from an earlier check."""
        try:
            return TaskFolder(folder.path, task_digest(folder.path))
        except OSError as error:
            self._unreadable[folder.path.name] = readable(error).problem
            return TaskFolder(folder.path)

    def finish(self, *, unproven: bool = False) -> list[Checked]:
        """Write list, baselines and table; returns what was found, sorted by name.

        Args:
            unproven: also list tasks without a reference solution.
        """
        results = [self.checked[folder.path.name] for folder in self.folders if folder.path.name in self.checked]
        wanted = {Status.PROVEN, Status.UNPROVEN} if unproven else {Status.PROVEN}
        listed = [checked for checked in results if checked.proof.status in wanted]
        write_list(self.out / LIST, [checked.folder for checked in listed])
        usable = [checked for checked in results if checked.proof.status in (Status.PROVEN, Status.UNPROVEN)]
        write_baselines(self.out / BASELINE_FILE, {checked.name: _baseline(checked) for checked in usable})
        atomic.write_text(self.out / TABLE, table_text(results))
        return results

    def _keep(self, checked: Checked) -> None:
        line = {
            "settings": self._settings,
            "name": checked.name,
            "sha256": checked.folder.sha256,
            **checked.proof.to_json(),
        }
        with open(self.out / RESULTS, "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line, ensure_ascii=False)}\n")


def table_rows(results: Sequence[Checked]) -> list[tuple[str, ...]]:
    """Header and a row for each task: status, checks at the baseline and after the reference, seconds, remarks."""
    rows = [("task", "status", "baseline", "reference", "checks", "build s", "solve s", "verify s", "remarks")]
    for checked in results:
        proof = checked.proof
        counts = [
            str(sum(proof.baseline.values())) if proof.baseline else "-",
            str(proof.passed) if proof.passed >= 0 else "-",
            str(proof.total or "-"),
        ]
        times = [f"{proof.seconds[name]:.2f}" if name in proof.seconds else "-"
                 for name in ("build", "solution", "verifier")]  # fmt: skip
        remarks = " ".join("; ".join([proof.reason, *proof.notes] if proof.reason else proof.notes).split())
        rows.append((checked.name, proof.status, *counts, *times, remarks))
    return rows


def table_text(results: Sequence[Checked]) -> str:
    rows = table_rows(results)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return "\n".join([*lines, "", summary(results)]) + "\n"


def summary(results: Sequence[Checked]) -> str:
    counts = Counter(checked.proof.status for checked in results)
    found = ", ".join(f"{counts[status]} {status}" for status in Status.ALL if counts[status])
    return f"{len(results)} tasks: {found}" if results else "no task"


def _notes(task: Task, sandbox: SandboxConfig) -> list[str]:
    """Where the task asks for more than the sandbox gives, or says what nobody reads; it was played all the same."""
    asked = {"memory_mb": task.resources.memory_mb, "disk_mb": task.resources.storage_mb}
    unknown = ", ".join(task.metadata.get(UNKNOWN_FIELDS, ()))
    return ([f"unknown fields: {unknown}"] if unknown else []) + [
        f"asks for {wanted} MB, env.sandbox.{name} is {getattr(sandbox, name)}"
        for name, wanted in asked.items()
        if wanted > getattr(sandbox, name)
    ]


def _baseline(checked: Checked) -> Baseline:
    return Baseline(checked.proof.baseline, tuple(checked.proof.names))


def _settings(env: EnvConfig, repeats: int) -> str:
    """Digest of what a result depends on beside the task."""
    sandbox = {name: value for name, value in asdict(env.sandbox).items() if name not in ("scratch_dir", "host_uid")}
    settings = {"version": VERSION, "repeats": repeats, "verifier_s": env.verifier_timeout_s, "sandbox": sandbox}
    return sealed.digest(settings)[:16]


def _read_results(path: Path, settings: str) -> dict[tuple[str, str], Proof]:
    """(task, digest of its files) -> result, the latest of each; a line that was cut short counts for nothing."""
    known: dict[tuple[str, str], Proof] = {}
    if not path.exists():
        return known
    if not path.read_bytes().endswith(b"\n"):
        with open(path, "a") as file:
            file.write("\n")  # so that the next line isn't lost with the one cut short
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            raw: dict[str, Any] = json.loads(line)
            own, name, digest = raw.pop("settings"), raw.pop("name"), raw.pop("sha256")
            if own == settings:
                known[name, digest] = Proof(**raw)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return known
