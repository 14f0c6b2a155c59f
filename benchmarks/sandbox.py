"""Bubblewrap sandboxes: latency, many sessions at once, a long episode, memory, many open.

    python benchmarks/sandbox.py [--repeats N] [--commands N] [--sessions N] [--turns N] [--open N] [--base DIRECTORY]

Latency: median wall-clock milliseconds of one sandbox after another; beside them, in the same loop, what the bare bwrap
takes to run `true` in the same namespaces, which is what a slow or busy machine is told from. Output is checked command
by command: what a session says carries its number and its turn. Memory is the driver's resident set by session.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Awaitable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.process import find_bwrap
from megatron_t1.environment.task import Task, TaskContent

TASK = Task("benchmark", "", content=TaskContent({"a.txt": (b"hello\n", 0o644)}))
AIMS_MS = {"create": 15.0, "exec": 25.0, "destroy": 60.0}
AIM_MEMORY_MB = 5.0
BARE = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink",
        "usr/lib64", "/lib64", "--unshare-all", "--proc", "/proc", "--dev", "/dev", "/bin/true"]  # fmt: skip
STARTS_AT_ONCE = 16


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def timed(times: list[float], work: Awaitable) -> object:
    began = time.perf_counter()
    try:
        return await work
    finally:
        times.append((time.perf_counter() - began) * 1e3)


async def latency(config: SandboxConfig, repeats: int) -> dict[str, list[float]]:
    """create: start; exec: the first command, which starts the processes; command: one in a session; destroy: stop."""
    times: dict[str, list[float]] = {"create": [], "exec": [], "command": [], "destroy": [], "bare bwrap": []}
    for _ in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run([find_bwrap(), *BARE], check=True)
        times["bare bwrap"].append((time.perf_counter() - began) * 1e3)
        sandbox = BubblewrapSandbox(config)
        await timed(times["create"], sandbox.start(TASK))
        first = await timed(times["exec"], sandbox.run("cat a.txt", 60))
        assert first.output == "hello\n", first
        for _ in range(5):
            await timed(times["command"], sandbox.run("cat a.txt", 60))
        await timed(times["destroy"], sandbox.stop())
    return {name: found[1:] for name, found in times.items()}  # the first one warms caches


async def sessions(config: SandboxConfig, count: int, commands: int) -> tuple[float, int]:
    """Seconds, and commands whose output was lost or another's, of `count` sessions at once."""
    wrong = 0

    async def episode(number: int) -> None:
        nonlocal wrong
        sandbox = BubblewrapSandbox(config)
        try:
            await sandbox.start(TASK)
            for turn in range(commands):
                result = await sandbox.run(f"T={turn}; echo {number} $T $((T * {number}))", 120)
                wrong += result.output != f"{number} {turn} {turn * number}\n" or result.exit_code != 0
        finally:
            await sandbox.stop()

    began = time.perf_counter()
    await asyncio.gather(*(episode(number) for number in range(count)))
    return time.perf_counter() - began, wrong


async def long_episode(config: SandboxConfig, turns: int) -> tuple[float, float, int]:
    """Seconds, growth of the driver in MB, and wrong turns, of an episode that edits, reads, fails and recovers."""
    script = (
        "echo {n} >> log; wc -l < log",
        "cd /tmp; pwd",
        "false",
        "seq {n} | tail -n 1",
        "exit 3",
        "cd /app; cat a.txt",
    )
    sandbox, wrong = BubblewrapSandbox(config), 0
    await sandbox.start(TASK)
    began, before = time.perf_counter(), resident_mb()
    lines = 0
    for turn in range(turns):
        command = script[turn % len(script)].format(n=turn + 1)
        result = await sandbox.run(command, 120)
        lines += "log" in command
        expected = {
            0: (0, f"{lines}\n"), 1: (0, "/tmp\n"), 2: (1, ""), 3: (0, f"{turn + 1}\n"), 4: (3, ""), 5: (0, "hello\n"),
        }[turn % len(script)]  # fmt: skip
        wrong += (result.exit_code, result.output) != expected
    seconds, growth = time.perf_counter() - began, resident_mb() - before
    await sandbox.stop()
    return seconds, growth, wrong


async def many_open(config: SandboxConfig, count: int) -> tuple[float, float, int]:
    """Seconds to open, the driver's memory in MB by session, and sandboxes that answer when all are open."""
    before, gate = resident_mb(), asyncio.Semaphore(STARTS_AT_ONCE)
    opened = [BubblewrapSandbox(config) for _ in range(count)]

    async def start(number: int) -> None:
        async with gate:
            await opened[number].start(TASK)
            await opened[number].run(f"N={number}", 120)

    async def stop(sandbox: BubblewrapSandbox) -> None:
        async with gate:
            await sandbox.stop()

    try:
        began = time.perf_counter()
        await asyncio.gather(*(start(number) for number in range(count)))
        seconds, memory = time.perf_counter() - began, (resident_mb() - before) / count
        answers = await asyncio.gather(*(sandbox.run("echo $N", 120) for sandbox in opened))
        return seconds, memory, sum(answer.output == f"{number}\n" for number, answer in enumerate(answers))
    finally:
        await asyncio.gather(*(stop(sandbox) for sandbox in opened))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--commands", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--open", type=int, default=512)
    parser.add_argument("--base", default="", help="a base that `t1 tasks base` wrote")
    options = parser.parse_args()
    config = SandboxConfig(base=options.base)
    table = Table(
        title="Bubblewrap sandboxes", caption=f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    )
    for name, justify in (("what", "left"), ("measured", "right"), ("aim", "right")):
        table.add_column(name, justify=justify)
    for name, found in asyncio.run(latency(config, options.repeats)).items():
        high = statistics.quantiles(found, n=10)[8]
        aim = f"{AIMS_MS[name]:g} ms" if name in AIMS_MS else ""
        shown = f"{statistics.median(found):.1f} ms ({min(found):.1f}, {high:.1f})"
        table.add_row(f"{name}, median (fastest, 90th percentile)", shown, aim)
    seconds, wrong = asyncio.run(sessions(config, options.sessions, options.commands))
    total = options.sessions * options.commands
    table.add_row(f"{options.sessions} sessions x {options.commands} commands", f"{total / seconds:.0f} commands/s", "")
    table.add_row("  lost or mixed outputs", f"{wrong} of {total}", "0")
    seconds, growth, wrong = asyncio.run(long_episode(config, options.turns))
    table.add_row(
        f"episode of {options.turns} turns", f"{seconds:.1f} s, {wrong} wrong, driver {growth:+.1f} MB", "0 wrong"
    )
    seconds, memory, answered = asyncio.run(many_open(config, options.open))
    table.add_row(f"{options.open} open at once", f"{answered} answer, opened in {seconds:.1f} s", f"{options.open}")
    table.add_row("  memory in the driver, each", f"{memory:.2f} MB", f"{AIM_MEMORY_MB:g} MB")
    table.add_row("  driver's peak", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB", "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
