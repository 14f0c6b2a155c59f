"""One loop for each run directory: a lock file with its owner and a heartbeat; a dead owner's lock is taken over.

Works on a shared file system without lock daemons: creation is exclusive, staleness is judged by the owner's process
where it is visible; elsewhere by its Slurm job, or else by its heartbeat, the file's modification time. A clock may
have jumped since the last one, so a heartbeat that looks old, or comes from the future, is watched for some beats
before its lock is taken away; so is one of a machine that was restarted since, or is another one of the same name, and
one in a copy of a run that a loop works on. An owner that was thought dead (a machine that slept) notices, and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_t1.errors import T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.processes import start_ticks

LOCK_FILE = "loop.lock"
HEARTBEAT_S = 10.0
STALE_AFTER_S = 120.0  # without a heartbeat, of an owner whose process can't be seen from here
WATCHED_BEATS = 3  # without a change, before such a lock is taken away


class OtherLoop(T1Error):
    """Another loop has the run directory."""


class RunLock:
    """Context manager; raises OtherLoop naming the owner when another loop holds the run directory.

    Attributes:
        lost: SIGTERM once another loop has taken the lock away, 0 before.
        former: the owner from whom this loop took it, where that isn't known to be gone.
    """

    def __init__(self, run_dir: str | Path, *, heartbeat_s: float = HEARTBEAT_S, stale_after_s: float = STALE_AFTER_S):
        self.path = Path(run_dir) / LOCK_FILE
        self.heartbeat_s, self.stale_after_s = heartbeat_s, stale_after_s
        self.token = uuid.uuid4().hex
        self.lost = 0
        self.former: dict[str, Any] = {}
        self.job_start: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.job_start = _job_start()
        for _ in range(5):
            if self._create():
                self._sweep()
                self._thread = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
                self._thread.start()
                return self
            self._take_away_if_stale()
        raise T1Error("several loops are taking over the same run directory", where=str(self.path), remedy="try again")

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._read().get("token") == self.token:
            self.path.unlink(missing_ok=True)
        elif self.lost and (kind is None or not issubclass(kind, T1Error)):
            self.require_held()

    def require_held(self) -> None:
        """To be called before what only the run's one loop may write.

        Raises:
            OtherLoop: it has taken the lock away.
        """
        if self.lost or not self._holds():
            self.lost = signal.SIGTERM
            owner = self._read()
            raise OtherLoop(
                "another loop has taken over this run"
                + (f": process {owner['pid']} on {owner['host']}" if owner else "")
                + "; this one has stopped",
                where=str(self.path),
                remedy="let it go on; it thought this one dead, which may have slept for a while",
            )

    def _holds(self) -> bool:
        """Whether the lock is still this one's; one that somebody deleted is taken again, unless another was faster."""
        owner = self._read()
        if not owner and not self.path.exists():
            return self._create()
        return owner.get("token", self.token) == self.token

    def _create(self) -> bool:
        temporary = self.path.with_name(f"{LOCK_FILE}.{self.token}")
        try:
            temporary.touch()
            own = {"slurm_start": self.job_start, "token": self.token, "inode": temporary.stat().st_ino}
            temporary.write_text(json.dumps({**this_process(), **own}))
            os.link(temporary, self.path)  # exclusive, and never half-written
        except FileExistsError:
            return self._read().get("token") == self.token  # NFS may repeat a request whose answer was lost
        except OSError as error:
            raise T1Error(
                f"the run directory can't be locked: {error.strerror or error}",
                where=str(self.path),
                remedy="the directory must be writable, its disk not full, and its file system know hard links",
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return True

    def _read(self) -> dict[str, Any]:
        return _read_owner(self.path)

    def _take_away_if_stale(self) -> None:
        owner = self._read()
        if not self._is_stale(self.path):
            if not self.path.exists():  # given back a moment ago
                return
            if not owner:
                raise T1Error(
                    "the lock doesn't say who holds it: it is damaged",
                    where=str(self.path),
                    remedy="when no loop works on this run, delete the file; it is also taken over when it is "
                    f"{self.stale_after_s:.0f} s old, as long as no loop keeps it fresh",
                )
            raise OtherLoop(
                f"another loop works on this run: process {owner['pid']} on {owner['host']}"
                + (f", Slurm job {owner['slurm_job']}" if owner.get("slurm_job") else ""),
                where=str(self.path),
                remedy="wait for it or stop it; choose another run.dir for a second run",
            )
        aside = self.path.with_name(f"{LOCK_FILE}.stale.{self.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read_owner(aside).get("token") != owner.get("token"):  # a faster loop has replaced it: give it back
            with contextlib.suppress(FileExistsError):  # a third one was faster still
                os.link(aside, self.path)
        elif owner_alive(owner) is None or (owner_alive(owner) and not _is_copy(aside, owner)):
            self.former = owner
        aside.unlink()

    def wait_for_former(self, grace_s: float, stop_requested: Callable[[], int] = lambda: 0) -> None:
        """After a lock was taken away from a loop that may be alive: until that is gone, or has had the time to be.

        A loop whose node Slurm has lost may go on there; it notices by its next heartbeat, and ends its phase.

        Args:
            grace_s: how long a loop needs to end its phase.
        """
        deadline = time.monotonic() + self.heartbeat_s + grace_s
        while self.former and owner_alive(self.former) is not False and time.monotonic() < deadline:
            if stop_requested():
                return
            time.sleep(0.2)

    def _is_stale(self, path: Path) -> bool:
        """Whether the process that wrote this file is gone, as far as can be known."""
        owner = _read_owner(path)
        alive = owner_alive(owner)
        if alive is False or slurm_job_ended(owner):  # also where it can be seen: a lost slurmd leaves its processes
            return True
        doubtful = _is_copy(path, owner) or _is_of_another_boot(owner)
        return (alive is None or doubtful) and self._is_silent(path, at_once=doubtful)

    def _is_silent(self, path: Path, *, at_once: bool) -> bool:
        """Whether no heartbeat comes. Unless `at_once`, one of a likely age isn't waited for."""
        if not at_once and -self.heartbeat_s <= self._age(path) < self.stale_after_s:
            return False
        before, deadline = _last_beat(path), time.monotonic() + WATCHED_BEATS * self.heartbeat_s
        while time.monotonic() < deadline:
            time.sleep(self.heartbeat_s / 10)
            if _last_beat(path) != before:
                return False
        return True

    def _sweep(self) -> None:
        """Remove what loops left beside the lock that were killed while they took it."""
        for path in self.path.parent.glob(f"{LOCK_FILE}.*"):
            alive = owner_alive(_read_owner(path))
            if alive is False or (alive is None and self._age(path) >= self.stale_after_s):
                path.unlink(missing_ok=True)

    def _age(self, path: Path) -> float:
        """Seconds since the last heartbeat, both ends measured by the file system's clock."""
        probe = self.path.with_name(f"{LOCK_FILE}.clock.{self.token}")
        try:
            probe.touch()
            return probe.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat_s):
            with contextlib.suppress(OSError, T1Error):  # a file system that is away for a while
                if not self._holds():
                    self.lost = signal.SIGTERM
                    return
                os.utime(self.path)


def lock_owner(run_dir: str | Path) -> dict[str, Any]:
    """Who holds a run directory: `this_process()` of its loop, as far as it isn't known to be over; else {}."""
    owner = _read_owner(Path(run_dir) / LOCK_FILE)
    return {} if owner_alive(owner) is False or slurm_job_ended(owner) else owner


def _last_beat(path: Path) -> tuple[int, int] | None:
    """What the next heartbeat changes. The file is opened, so that a network file system doesn't answer from memory."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            return status.st_ino, status.st_mtime_ns
    except OSError:
        return None


def _read_owner(path: Path) -> dict[str, Any]:
    """What a lock file says about its owner; empty when it can't be read or doesn't name a process and a host."""
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    named = isinstance(owner, dict) and type(owner.get("pid")) is int and isinstance(owner.get("host"), str)
    return owner if named else {}


def this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "boot": _boot(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
        "slurm_cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
        "slurm_restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _job_start() -> float | None:
    """When Slurm started this process's job, in seconds since the epoch; None outside a job, or where it can't say."""
    try:
        shown = slurm_jobs.find(job) if (job := slurm_jobs.own_job()) is not None else None
    except T1Error:
        return None
    return shown.when("StartTime") if shown else None


def owner_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the lock's owner still runs; None when it can't be seen from here: another host, namespace or boot."""
    here = this_process()
    if any(owner.get(place) != here[place] for place in ("host", "boot", "namespace")):
        return None
    return owner.get("start_ticks") is not None and start_ticks(owner["pid"]) == owner["start_ticks"]


def _is_of_another_boot(owner: dict[str, Any]) -> bool:
    """Whether the owner's machine was restarted since, or is another one of this one's name."""
    here = this_process()
    return owner.get("host") == here["host"] and owner.get("boot") != here["boot"]


def _is_copy(path: Path, owner: dict[str, Any]) -> bool:
    """Whether a lock file was copied with its directory: its owner made another file."""
    try:
        return "inode" in owner and path.stat().st_ino != owner["inode"]
    except OSError:
        return False


def slurm_job_ended(owner: dict[str, Any]) -> bool:
    """Whether the owner's Slurm job is known to be over; False also where Slurm can't be asked.

    A job that lost a node is started again on others, under its own number, within seconds.
    """
    here, job = this_process(), str(owner.get("slurm_job") or "")
    if not job.isdigit() or owner.get("slurm_cluster") != slurm_jobs.cluster_name():
        return False
    if job == here["slurm_job"] and owner.get("slurm_restart", 0) < here["slurm_restart"]:
        return True
    try:
        shown = slurm_jobs.find(int(job))
    except T1Error:
        return False
    if job == here["slurm_job"]:
        # A controller that lost a job's start in a crash ends that one and starts the job again, without counting it.
        begun, now = owner.get("slurm_start"), shown.when("StartTime") if shown else None
        return begun is not None and now is not None and begun < now
    return shown is None or not shown.alive  # None: forgotten, some minutes after its end


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
