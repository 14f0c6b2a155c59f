"""A phase for tests: real files, a real result, and ways to fail on request. Run by the launchers as a module."""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.errors import readable
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, WrittenFile


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--phases")
    parser.add_argument("--behave", default="")
    options = parser.parse_args()
    paths = RunPaths.of(options.run)
    rank = int(os.environ.get("RANK") or os.environ.get("T1_WORKER") or 0)
    for phase in options.phases.split(","):
        with open(paths.root / "executions.jsonl", "a") as log:
            log.write(json.dumps([options.iteration, phase, rank]) + "\n")
        if options.behave == f"linger:{phase}":  # until somebody makes that file
            while not (paths.root / "hurry").exists():
                time.sleep(0.1)
        if options.behave in ("crash once", "lose engine once") and rank == 0 and not (paths.root / "failed").exists():
            (paths.root / "failed").touch()
            if options.behave == "lose engine once":
                print("error: the engine was lost", file=sys.stderr, flush=True)
                os._exit(75)
            os.kill(os.getpid(), signal.SIGKILL)
        behave(options.behave, rank)
        if rank == 0:
            target = paths.root / "outputs" / f"{options.iteration}-{phase}"
            atomic.write_text(target, f"{phase} of {options.iteration}")
            value = float(os.environ.get("DUMMY_VALUE", 0.5))
            written = WrittenFile(f"outputs/{target.name}", target.stat().st_size, atomic.sha256_file(target))
            result = PhaseResult(phase, options.iteration, {f"{phase}/value": value}, {"total": 0.1}, [written])
            result.write(paths.phase(options.iteration, phase))
        print(f"{phase} finished", flush=True)


def behave(how, rank):
    if how == "fail" and rank == int(os.environ.get("FAILING_RANK", 0)):
        print(
            "loading\nerror: the frobnicator is missing\n  where:  /frob\n  remedy: install it",
            file=sys.stderr,
            flush=True,
        )
        os._exit(3)
    if how == "fail":
        time.sleep(60)
    if how == "quota":
        print(
            f"error: {readable(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), '/run/file'))}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "silent":
        os._exit(0)
    if how == "tree":  # children that leave the session and ignore SIGTERM
        marker = Path(os.environ["PID_FILE"])
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        children = [
            subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True),
            subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True),
        ]
        time.sleep(0.3)
        marker.write_text(" ".join(str(child.pid) for child in children) + f" {os.getpid()}")
        time.sleep(600)


if __name__ == "__main__":
    main()
