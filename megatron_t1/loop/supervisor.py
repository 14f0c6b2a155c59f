"""The process between the loop and a phase: whatever happens to the loop, nothing of the phase stays behind.

    python supervisor.py PARENT_PID GRACE_S LOG_FILE COMMAND...

It leads a session of its own, is the subreaper of everything the phase starts, and is told by the kernel when the
loop dies (also by SIGKILL). On SIGTERM, SIGINT, the loop's death or the end of the command it ends every descendant:
SIGTERM, grace, SIGKILL. Exit status: the command's; 128 + N when the command died of signal N.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from megatron_t1.processes import become_subreaper, die_with_parent, end_descendants, reap

END_GRACE_S = 2.0  # for what a command that ended by itself leaves behind


def main(arguments: list[str]) -> int:
    parent, grace_s, log_file, command = int(arguments[0]), float(arguments[1]), arguments[2], arguments[3:]
    stop_requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stop_requests.append(received))
    become_subreaper()
    die_with_parent(signal.SIGTERM, parent=parent)
    with open(log_file, "ab", buffering=0) as log:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            log.write(f"error: the phase could not be started: {command[0]}: {error.strerror}\n".encode())
            return 127
        status = _wait(child.pid, stop_requests)
        stopped = status is None
        killed = end_descendants(os.getpid(), grace_s if stopped else END_GRACE_S)
        if killed:
            with contextlib.suppress(OSError):  # a disk that is full
                log.write(f"supervisor: {killed} processes had to be killed\n".encode())
    if stopped:
        return 128 + stop_requests[0]
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _wait(pid: int, stop_requests: list[int]) -> int | None:
    """Wait status of the command, or None when a stop was requested first. Reaps adopted orphans meanwhile."""
    while not stop_requests:
        ended = reap()
        if pid in ended:
            return ended[pid]
        time.sleep(0.05)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
