"""Owns the engine's processes: `python supervisor.py COMMAND...`, run as a file, standard library only.

It ends everything below it when it is told to (SIGTERM), when the driver goes away for whatever reason (its end of the
standard input closes; the kernel also signals the parent's death), or when the command itself ends. As a subreaper it
inherits engine processes whose parent died, so that none survives (vllm#55510, vllm#55846). Its exit status is the
command's; 128 + signal when it was killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the package isn't imported, one sibling module is
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import process_death
else:
    from megatron_t1.rollout import process_death

GRACE_S = 3.0  # between SIGTERM and SIGKILL


def main(command: list[str]) -> int:
    process_death.adopt_orphans()
    process_death.die_with_parent(signal.SIGTERM)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    stop = False

    def on_stop(_signal, _frame):
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, on_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides; a terminal's ^C reaches it first
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, process_death.SUPERVISED: str(os.getpid())},
        preexec_fn=process_death.die_with_parent,  # covers a kill -9 of this process
    )
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "driver")
        selector.register(wake_read, selectors.EVENT_READ, "signal")
        while not stop and child.poll() is None:
            for key, _ in selector.select(timeout=1.0):
                if not os.read(key.fd, 4096) and key.data == "driver":
                    stop = True
    end_all(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_all(child: subprocess.Popen) -> None:
    """SIGTERM to every descendant, SIGKILL after the grace time, until none is left."""
    deadline = time.monotonic() + GRACE_S
    signal_number = signal.SIGTERM
    while True:
        alive = [pid for pid in process_death.descendants(os.getpid()) if not _reap(pid, child)]
        if not alive:
            return
        if time.monotonic() > deadline:
            signal_number = signal.SIGKILL
        for pid in alive:
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def _reap(pid: int, child: subprocess.Popen) -> bool:
    """Whether `pid` has ended; takes its exit status where it is ours to take."""
    if pid == child.pid:
        return child.poll() is not None
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False  # a grandchild that still has its own parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
