"""A phase's process ends when another launch of the phase has begun: its node was cut off, and it doesn't know.

Slurm starts a job that lost a node again on others, while the processes on a node that only its controller can't reach
go on and reach the run's files. Each launch is named in the phase's launch.json before it starts; who finds another
name there stops as if told to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from megatron_t1 import sealed

LAUNCH_FILE = "launch.json"
LOOK_EVERY_S = 5.0


def superseded(directory: Path, launch: str) -> bool:
    """Whether the phase of `directory` has been launched anew since; False where nothing is known."""
    try:
        current = sealed.read(directory / LAUNCH_FILE).get("launch")
    except (OSError, ValueError):
        return False
    return current is not None and current != launch


def watch(directory: Path, launch: str, *, every_s: float = LOOK_EVERY_S) -> threading.Thread:
    """Look from time to time, in a thread of its own, and send this process SIGTERM once it is superseded."""

    def look() -> None:
        while not superseded(directory, launch):
            time.sleep(every_s)
        print("error: this phase was started again elsewhere; it stops here", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look, name="fence", daemon=True)
    thread.start()
    return thread
