"""What benchmarks share that drive whole commands: `t1`, training phases on stored rollouts, tables in documents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_t1.config.compose import load_run_config
from megatron_t1.paths import RunPaths, number_of, numbered
from megatron_t1.phase import RESULT_FILE, PhaseResult


def t1(*arguments: str, log: Path | None = None) -> None:
    """Run one `t1` command to its end; exit with its last lines when it fails. What it says is added to `log`."""
    run([sys.executable, "-m", "megatron_t1.cli", *arguments], log, f"t1 {' '.join(arguments)}")


def run(command: Sequence[str], log: Path | None, name: str) -> None:
    """Run a command; a SIGTERM to this process ends it first, so that a phase stops cleanly."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with open(log or os.devnull, "a+", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        received: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            received.append(number)
            process.send_signal(signal.SIGTERM)  # waited for below: waiting twice would lock up

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            status = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])
    if status:
        tail = log.read_text(encoding="utf-8")[-3000:] if log else ""
        sys.exit(f"{name} failed with status {status}{f'; {log} ends with:' if log else ''}\n{tail}")


def copy_rollouts(run: Path, target: Path, only: int | None = None) -> list[int]:
    """Give a new directory a run's configuration and finished rollouts, with what their makers recorded.

    Args:
        only: the one iteration to copy; None: all.

    Returns:
        The iterations that were copied.
    """
    source, paths = RunPaths.of(run), RunPaths.of(target)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(source.config, paths.config)
    iterations = []
    for records in numbered(source.root / "rollouts"):
        iteration = number_of(records)
        result = source.phase(iteration, "rollout") / RESULT_FILE
        if not result.is_file() or only not in (None, iteration):
            continue
        shutil.copytree(records, paths.rollouts(iteration))
        paths.phase(iteration, "rollout").mkdir(parents=True)
        shutil.copy(result, paths.phase(iteration, "rollout"))
        iterations.append(iteration)
    if not iterations:
        sys.exit(f"{run} has no finished rollout" + (f" {only}" if only is not None else ""))
    return iterations


def train(target: Path, iteration: int, roles: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, PhaseResult]:
    """Training phases of one iteration in one process group, on what lies in `target`; the result of each role."""
    processes = load_run_config(target).layout.processes
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "megatron_t1.training.main", "--", "--run", str(target), "--iteration", str(iteration),
        "--roles", ",".join(roles), f"run.dir={target}", *overrides,
    ]  # fmt: skip
    run(command, target / "log.txt", f"{' and '.join(roles)} of iteration {iteration} in {target}")
    return {role: PhaseResult.read(RunPaths.of(target).phase(iteration, role)) for role in roles}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; numbers are up to the caller."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands in `path` between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
