"""A phase's process ends when another launch of the phase has begun: its node was cut off, and it doesn't know.

Slurm starts a job that lost a node again on others, while the processes on a node that only its controller can't reach
go on and reach the run's files. Each launch is named in the phase's launch.json before it starts; who finds another
name there stops as if told to. A network file system may show the file of the launch before for a while: only another
name after the own one counts, or one that stays.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from megatron_t1 import sealed
from megatron_t1.errors import warn
from megatron_t1.processes import LAUNCH_MARK

LAUNCH_FILE = "launch.json"
LOOK_EVERY_S = 5.0
PATIENCE_S = 120.0  # for the own name to appear


def named(directory: Path) -> str | None:
    """The launch that the phase of `directory` was begun by last; None where nothing is known."""
    try:
        return sealed.read(directory / LAUNCH_FILE).get("launch")
    except (OSError, ValueError):
        return None


def watch(directory: Path, launch: str, *, every_s: float = LOOK_EVERY_S) -> threading.Thread:
    """Look from time to time, in a thread of its own, and send this process SIGTERM once it is superseded."""

    def look() -> None:
        seen, deadline = False, time.monotonic() + PATIENCE_S
        while (found := named(directory)) in (None, launch) or not (seen or time.monotonic() > deadline):
            seen = seen or found == launch
            time.sleep(every_s)
        warn("error: this phase was started again elsewhere; it stops here")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look, name="fence", daemon=True)
    thread.start()
    return thread


def watch_own(directory: Path) -> None:
    """`watch` the launch that this process is part of, where it is part of one."""
    if launch := os.environ.get(LAUNCH_MARK):
        watch(directory, launch)
