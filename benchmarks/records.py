"""Records and exchange logs: how fast they are written and read, and how many bytes a token takes.

    python benchmarks/records.py [--tokens 30000] [--layers 48] [--top-k 8] [--experts 256] [--directory DIR]

Write: a record with its routes, to a file in DIR (complete or absent; the bytes are hashed while they are written).
`no fsync` leaves out waiting for the disk, which is another machine's business. Read: the file is in the page cache;
its routes are mapped and every byte of them is used once (summed). `memcpy`, `SHA-256` and `write bytes` handle as many
bytes, as yardsticks. CPU: of all threads together; a record is hashed in one while another writes, so that on two free
cores it takes the longer of both.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from megatron_t1 import atomic
from megatron_t1.report.show import make_console, make_table
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import ExchangeLog
from megatron_t1.trajectory.exchange_reader import read_exchange, rebuild
from megatron_t1.trajectory.record import EndReason, Header, Origin, Trajectory, Verdict, load, save

TURNS = 300


@dataclass
class Times:
    """Seconds of each repetition."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 30_000), ("layers", 48), ("top-k", 8), ("experts", 256), ("repeat", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory")
    options = parser.parse_args()
    record = make_record(options)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        rows = measure_record(record, Path(scratch), options.repeat)
        log = measure_log(record, Path(scratch), options.repeat)
    console = make_console()
    shape = f"{options.tokens:,} tokens x {options.layers} layers x {options.top_k} of {options.experts}"
    console.print(
        f"routes of {shape}: {record.routes.nbytes / 1e6:.1f} MB; median and best of {options.repeat}", highlight=False
    )
    table = make_table()
    for title in ("step", "ms", "best", "CPU ms", "GB/s of routes", "best", "by CPU"):
        table.add_column(title, justify="left" if title == "step" else "right")
    for name, times in rows.items():
        seconds = (median(times.wall), min(times.wall), median(times.cpu))
        speeds = (f"{record.routes.nbytes / taken / 1e9:.2f}" for taken in seconds)
        table.add_row(name, *(f"{taken * 1e3:.1f}" for taken in seconds), *speeds)
    console.print(table)
    fields = sum(array.nbytes for name, array in record.arrays().items() if name != "routes")
    console.print(
        f"bytes a token: {record.routes.nbytes / len(record):.0f} of routes, {fields / len(record):.0f} of all else; "
        f"exchange log {log['bytes'] / len(record):.1f} ({TURNS} turns)",
        highlight=False,
    )
    console.print(
        f"exchange log: {log['write'] / TURNS * 1e6:.0f} us a turn to write ({log['hash'] / TURNS * 1e6:.0f} to hash), "
        f"{log['read'] * 1e3:.1f} ms to read and rebuild {TURNS} turns",
        highlight=False,
    )


def make_record(options: argparse.Namespace) -> Trajectory:
    """One trajectory of TURNS turns, half of its tokens sampled, with random routes."""
    random = np.random.default_rng(0)
    length = options.tokens
    per_turn = length // TURNS
    place = np.arange(length)
    origin = np.where(place % per_turn < per_turn // 2, Origin.ENVIRONMENT, Origin.SAMPLED).astype(np.uint8)
    origin[: per_turn // 2] = Origin.PROMPT
    turn = np.minimum(place // per_turn, TURNS - 1).astype(np.uint16)
    dtype = np.uint8 if options.experts <= 256 else np.uint16
    contract = SamplingContract(
        1.0, 1.0, "processed", (2,), "0" * 64, "chatml_bash", "vllm", "bfloat16", "bfloat16",
        options.experts, options.top_k, options.layers,
    )  # fmt: skip
    return Trajectory(
        header=Header(
            "task-0", "task", 0, 0, (0,) * TURNS, EndReason.SUBMITTED, Verdict(1, 2, 0, True), {"total": 0.25}, contract
        ),
        ids=random.integers(0, 248_000, length).astype(np.int32),
        origin=origin,
        turn=turn,
        logprobs=np.where(origin == Origin.SAMPLED, -random.random(length), np.nan).astype(np.float32),
        routes=random.integers(0, options.experts, (length, options.layers, options.top_k)).astype(dtype),
        routed=place < length - 1,
    )


def measure_record(record: Trajectory, scratch: Path, repeat: int) -> dict[str, Times]:
    path = scratch / "record.safetensors"
    save(record, path)

    def fresh() -> Trajectory:
        return record.noting(again=time.perf_counter_ns())  # whose digest isn't known yet

    def new_file() -> Path:
        return scratch / f"{time.perf_counter_ns()}.new"

    def clean() -> None:
        for made in scratch.glob("*.new"):
            made.unlink()

    def write() -> None:
        save(fresh(), new_file())

    def write_without_waiting() -> None:
        wait, atomic.fsync_path = atomic.fsync_path, lambda _: None
        try:
            save(fresh(), new_file())
        finally:
            atomic.fsync_path = wait

    def read() -> None:
        load(path).routes.sum(dtype=np.uint64)

    def read_verified() -> None:
        load(path, verify=True)

    def write_bytes() -> None:
        with open(new_file(), "wb", buffering=0) as file:
            file.write(record.routes.data)

    def copy() -> None:
        record.routes.copy()

    steps = {
        "memcpy": copy,
        "SHA-256": lambda: hashlib.sha256(record.routes).digest(),
        "write bytes to a file": write_bytes,
        "write": write,
        "write, no fsync": write_without_waiting,
        "open and map": lambda: load(path),
        "map and use every byte": read,
        "read and compare the digest": read_verified,
    }
    return interleaved(steps, repeat, clean)


def measure_log(record: Trajectory, scratch: Path, repeat: int) -> dict[str, float]:
    sampled = record.origin == Origin.SAMPLED
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False)) + 1
    starts = np.flatnonzero(sampled & ~np.append(False, sampled[:-1]))
    state = {"temperature": 1.0, "top_p": 1.0, "stop_ids": [2], "weights": "default"}
    sizes = []

    def write() -> None:
        with ExchangeLog(scratch) as log:
            session, known = log.session("task-0", 0), 0
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                session.add(
                    record.ids[:start],
                    sampled=record.ids[start:end],
                    logprobs=record.logprobs[start:end],
                    response_sha256="0" * 64,
                    finish_reason="stop",
                    state=state,
                    routes=record.routes[known : end - 1],
                    routes_start=known,
                )
                known = end - 1
        sizes.append(log.path.stat().st_size)
        write.path = log.path

    def digest() -> None:
        for start in starts.tolist():
            hashlib.sha256(record.ids[:start]).digest()
        hashlib.sha256(record.routes).digest()

    def read() -> None:
        for session in read_exchange(write.path).sessions.values():
            rebuild(session)

    times = interleaved({"write": write, "hash": digest, "read": read}, repeat)
    return {**{name: median(taken.wall) for name, taken in times.items()}, "bytes": sizes[-1]}


def interleaved(
    steps: dict[str, Callable[[], None]], repeat: int, clean: Callable[[], None] = lambda: None
) -> dict[str, Times]:
    """Times of each step, without `clean` after it and the first round. Steps take turns: so does a busy moment."""
    times = {name: Times() for name in steps}
    for index in range(repeat + 1):
        for name, step in steps.items():
            began, worked = time.perf_counter(), time.process_time()
            step()
            if index:
                times[name].wall.append(time.perf_counter() - began)
                times[name].cpu.append(time.process_time() - worked)
            clean()
    return times


if __name__ == "__main__":
    main()
