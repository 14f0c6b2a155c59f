"""Owns the engine's processes: `python supervisor.py COMMAND...`, run as a file, standard library only.

It ends everything below it when it is told to (SIGTERM), when the driver goes away for whatever reason (its end of the
standard input closes; the kernel also signals the parent's death), or when the command itself ends. As a subreaper it
inherits engine processes whose parent died, so that none survives (vllm#55510, vllm#55846). Its exit status is the
command's; 128 + signal when it was killed.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the package isn't imported, one module of it is
    _spec = importlib.util.spec_from_file_location("processes", Path(__file__).resolve().parents[2] / "processes.py")
    processes = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(processes)
else:
    from megatron_t1 import processes

SUPERVISED = "MEGATRON_T1_SUPERVISED"  # set in the engine's environment: its processes die with their parent
GRACE_S = 3.0  # between SIGTERM and SIGKILL


def main(command: list[str]) -> int:
    processes.become_subreaper()
    processes.die_with_parent(signal.SIGTERM)
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
        env={**os.environ, SUPERVISED: str(os.getpid())},
        preexec_fn=processes.die_with_parent,  # covers a kill -9 of this process
    )
    ended: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "driver")
        selector.register(wake_read, selectors.EVENT_READ, "signal")
        while not stop and child.pid not in ended:
            for key, _ in selector.select(timeout=1.0):
                if not os.read(key.fd, 4096) and key.data == "driver":
                    stop = True
            ended |= processes.reap()
    processes.end_descendants(os.getpid(), GRACE_S, ended)
    code = os.waitstatus_to_exitcode(ended.get(child.pid, signal.SIGKILL))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
