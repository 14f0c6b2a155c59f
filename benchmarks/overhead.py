"""What the loop and its launchers cost between phases, and what the start of each phase consists of.

    python benchmarks/overhead.py RUN [--repeats 5] [--write docs/measurements.md]

RUN is a finished run of plain processes with loop.colocate_roles=false. From its manifest: what passes between the end
of one launch and the start of the next, and of each launch what isn't its phase's own work. Then every piece of a start
is timed by itself, in turn: medians over the repeats, ranges from the least to the most.

The cost of loop and launcher is the first two rows of the second table; all others are the phase's own start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from driving import markdown, write_between

from megatron_t1.config.compose import load_run_config
from megatron_t1.loop.launcher import PhaseCommand
from megatron_t1.loop.local import LocalLauncher
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult

GOAL_S = 2.0
STARTS = ("start", "engine_start")  # timings of a phase that are its start
# Pieces of a start, each a program that does nothing else; what the one before it took is not taken off.
PIECES: dict[str, list[str]] = {
    "interpreter": ["-c", "pass"],
    "import of the rollout phase": ["-c", "import megatron_t1.rollout.phase"],
    "import of vLLM's server": ["-c", "import vllm.entrypoints.openai.api_server"],
    "import of torch": ["-c", "import torch"],
    "import of torch and Megatron-Core": ["-c", "import megatron.core.transformer"],
    "import of the training phases": ["-c", "from megatron_t1.training import critic, actor, export"],
    "torchrun around one rank that does nothing": [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python", "true",
    ],
}  # fmt: skip


def launches(manifest: Manifest) -> list[list[FinishedStep]]:
    """The steps of each launch, in order."""
    found: dict[str, list[FinishedStep]] = defaultdict(list)
    for step in manifest.finished:
        found[step.launch].append(step)
    return list(found.values())


def between(manifest: Manifest) -> list[float]:
    """Seconds from the end of a launch's processes to the start of the next one's, recording and checks included."""
    steps = launches(manifest)
    return [
        after[0].finished_at - before[-1].finished_at - after[0].seconds
        for before, after in zip(steps, steps[1:], strict=False)
    ]


def of_launches(paths: RunPaths, manifest: Manifest) -> list[list[str]]:
    """Of each kind of launch: its wall time, its start by its own clock, its work, and what is neither."""
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for steps in launches(manifest):
        timings = [PhaseResult.read(paths.phase(*step.key)).timings_s for step in steps]
        start = sum(times.get(name, 0.0) for times in timings for name in STARTS)
        work = sum(times["total"] for times in timings) - start
        wall = steps[0].seconds
        found["+".join(step.phase for step in steps)].append((wall, start, work, wall - start - work))
    return [[name, *(f"{median(column):.2f}" for column in zip(*rows, strict=True))] for name, rows in found.items()]


def pieces(repeats: int) -> dict[str, list[float]]:
    """Seconds of each program, in turn."""
    found: dict[str, list[float]] = {name: [] for name in PIECES}
    for _ in range(repeats):
        for name, words in PIECES.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
            found[name].append(time.perf_counter() - began)
    return found


def launcher(run: Path, repeats: int) -> list[float]:
    """Seconds of a launch whose phase is an interpreter that ends at once, without that interpreter's own start."""
    found = []
    local = LocalLauncher(load_run_config(run))
    command = PhaseCommand("nothing", "rollout", "this", environment={"PYTHONSTARTUP": ""})
    with tempfile.TemporaryDirectory() as logs:
        for repeat in range(repeats):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "this"], check=True, capture_output=True)
            alone = time.perf_counter() - began
            ended = local.launch(command, Path(logs) / str(repeat))
            assert ended.code == 0, ended.tail
            found.append(ended.seconds - alone)
    return found


def shown(seconds: list[float]) -> list[str]:
    return [f"{median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between its marks")
    options = parser.parse_args()
    paths = RunPaths.of(options.run)
    manifest = Manifest.read(paths.manifest)
    own = {
        "loop, between two launches": between(manifest),
        "launcher, around a phase": launcher(paths.root, options.repeats),
    }
    total = sum(median(seconds) for seconds in own.values())
    parts = {**own, **pieces(options.repeats)}
    header = ("launch", "wall, s", "start by its own clock, s", "work, s", "interpreters, imports, launcher, s")
    text = "\n\n".join(
        [
            markdown(header, of_launches(paths, manifest)),
            markdown(("piece", "s", "range"), [[name, *shown(seconds)] for name, seconds in parts.items()]),
            f"Loop and launcher together: {total:.2f} s between two phases (at most {GOAL_S:g} s are aimed at).",
        ]
    )
    print(text)
    if options.write:
        write_between(options.write, "overhead", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
