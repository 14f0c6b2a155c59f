"""What a launch looks at on each node before its phase: nothing of the run's earlier launches lives, GPUs are free.

The launcher ends what it starts; but a node may have been cut off while it did, and a killed engine may hold its GPU's
memory for a while (vllm#55510, AReaL#622). So the phase's own script asks here first, on the node and in the
environment in which the phase will run:

    python -m megatron_t1.loop.ground    environment: RUN_MARK, LAUNCH_MARK, FREE_SHARE, GRACE; LOCAL_RANK under Slurm

Standard library only: it runs in each process's start-up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_t1.errors import T1Error
from megatron_t1.processes import LAUNCH_MARK, RUN_MARK, marked, send, start_ticks

GRACE, FREE_SHARE = "T1_GROUND_GRACE_S", "T1_GPU_FREE_SHARE"
KILLED_S = 10.0  # from SIGKILL to a process's end; longer only where it hangs in the kernel
MEMORY_S = 60.0  # from a process's end until its GPU's memory is free
SMI_S = 60.0  # for an answer of nvidia-smi
SMI = ("nvidia-smi", "--format=csv,noheader,nounits")


def leftovers(run: str, launch: str) -> list[int]:
    """Processes of other launches of this run that can be seen from here."""
    own = set(marked(LAUNCH_MARK, launch))
    return [pid for pid in marked(RUN_MARK, run) if pid not in own]


def clear(run: str, launch: str, grace_s: float) -> int:
    """End what is left of earlier launches: wait, then SIGKILL; returns how many had to be killed.

    Raises:
        T1Error: one doesn't end; names it.
    """
    _wait_until(lambda: not leftovers(run, launch), grace_s)
    left = leftovers(run, launch)
    send(left, signal.SIGKILL)
    _wait_until(lambda: not any(start_ticks(pid) for pid in left), KILLED_S)
    stuck = [pid for pid in left if start_ticks(pid)]
    if stuck:
        raise T1Error(
            f"a process of an earlier launch doesn't end: {stuck[0]} ({_command_line(stuck[0])})",
            where=_here(),
            remedy="it hangs in the kernel (a file system or a GPU that doesn't answer): take the node out of use",
        )
    return len(left)


def own_gpus(environment: dict[str, str]) -> list[str]:
    """What this process may use, as nvidia-smi names it: its rank's one, or all it sees; none named: all there are."""
    visible = [word for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    rank = environment.get("LOCAL_RANK", "")
    if not rank.isdigit():
        return visible
    return visible[int(rank) : int(rank) + 1] or visible or [rank]  # Slurm may have left each task its own one


def require_free(gpus: list[str], share: float) -> None:
    """Wait until `share` of each GPU's memory is free.

    Raises:
        T1Error: it isn't within a minute; names the GPU and who holds it.
    """
    if not share or shutil.which(SMI[0]) is None:
        return
    deadline = time.monotonic() + MEMORY_S
    while full := [line for line in memory(gpus) if line[2] - line[1] < share * line[2]]:
        if time.monotonic() > deadline:
            gpu, used, total = full[0]
            holders = _smi("--query-compute-apps=pid,used_memory", [gpu])
            raise T1Error(
                f"GPU {gpu} is in use before the phase starts: {used:.0f} of {total:.0f} MiB"
                + (f"; held by process {', '.join(row[0] for row in holders)}" if holders else ""),
                where=_here(),
                remedy=f"end what holds it, or set cluster.gpu_free_share (now {share:g}) lower; 0: don't ask",
            )
        time.sleep(1.0)


def memory(gpus: list[str]) -> list[tuple[str, float, float]]:
    """(index, used MiB, total MiB) of each GPU that says so."""
    rows = _smi("--query-gpu=index,memory.used,memory.total", gpus)
    numbers = [row for row in rows if len(row) == 3 and all(word.replace(".", "", 1).isdigit() for word in row[1:])]
    return [(index, float(used), float(total)) for index, used, total in numbers]


def _smi(query: str, gpus: list[str]) -> list[list[str]]:
    line = [SMI[0], query, *SMI[1:], *([f"--id={','.join(gpus)}"] if gpus else [])]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [[word.strip() for word in row.split(",")] for row in done.stdout.splitlines()] if not done.returncode else []
    )


def _wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120].strip()
    except OSError:
        return "?"


def _here() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def main() -> int:
    environment = dict(os.environ)
    run, launch = environment.get(RUN_MARK, ""), environment.get(LAUNCH_MARK, "")
    try:
        if run and launch:
            killed = clear(run, launch, float(environment.get(GRACE, 0)))
            if killed:
                print(f"{killed} processes of an earlier launch were still alive on {_here()}: ended", flush=True)
        require_free(own_gpus(environment), float(environment.get(FREE_SHARE, 0)))
    except T1Error as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
