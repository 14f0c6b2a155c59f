"""What a run measured: metrics.jsonl (a line for each finished phase) and TensorBoard events.

A phase that is repeated adds another line, and the last one counts; TensorBoard then gets a new file of what counts.

A line is {"iteration", "phase", "seconds", "time", "metrics": {"group/name": number or null}, "timings_s": {...},
"sha256": of the rest}.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_t1 import sealed
from megatron_t1.errors import IncompleteError, naming
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.regular import open_regular
from megatron_t1.trajectory.typed import check, integer, nothing, number, text

MEASURED = {None: (number, nothing)}
LINE = {"iteration": integer, "phase": text, "seconds": number, "time": number, "metrics": MEASURED,
        "timings_s": MEASURED}  # fmt: skip


class MetricsWriter:
    """Appends to a run's metrics. A line torn by a kill is cut off; the same result is not written twice."""

    def __init__(self, paths: RunPaths):
        self.paths = paths
        self._lines = _newest(_repaired(paths.metrics))
        self._events: Any = None

    def append(self, result: PhaseResult, *, seconds: float) -> bool:
        """Add one phase; returns False when this very result was there already."""
        line = _line(result, seconds=seconds, now=time.time())
        key = (result.iteration, result.phase)
        before = self._lines.get(key)
        if before is not None and _measured(before) == _measured(line):
            return False
        self._lines[key] = line
        if before is None:
            self._write_events(line)
        self.paths.metrics.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.paths.metrics), open(self.paths.metrics, "ab") as file:
            file.write(sealed.line(line))
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            self._rewrite_events()
        return True

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The last line of each phase."""
        return list(self._lines.values())

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):  # of a disk that is full, which was said when it was written to
                self._events.close()
            self._events = None

    def _rewrite_events(self) -> None:
        """An event can't be taken back: a new file of all that counts takes the place of the earlier ones."""
        self.close()
        earlier = list(self.paths.tensorboard.glob("events.out.tfevents.*"))
        for line in self._lines.values():
            self._write_events(line)
        for path in earlier:
            path.unlink(missing_ok=True)

    def _write_events(self, line: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._events is None:
            self.paths.tensorboard.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._events = RecordWriter(open(self.paths.tensorboard / name, "xb"))
            self._events.write(Event(wall_time=line["time"], file_version="brain.Event:2").SerializeToString())
        scalars = {**line["metrics"], f"time/{line['phase']}_s": line["seconds"]}
        scalars.update({f"time/{line['phase']}/{name}_s": value for name, value in line["timings_s"].items()})
        values = [
            Summary.Value(tag=_tag(line["phase"], name), simple_value=value)
            for name, value in scalars.items()
            if value is not None
        ]
        event = Event(wall_time=line["time"], step=line["iteration"], summary=Summary(value=values))
        with naming(self.paths.tensorboard):
            self._events.write(event.SerializeToString())
            self._events.flush()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The last complete line of each phase in a run's metrics.jsonl, in the order in which they first finished.

    A finished step without one (the file was lost, or begun anew) is taken from the manifest and the step's own result.
    """
    paths = RunPaths.of(run_dir)
    lines = _newest(_parsed(paths.metrics)[0]) if paths.metrics.exists() else {}
    order = []
    for step in _finished(paths.manifest):
        key = step.key
        order.append(key)
        if key not in lines:
            try:
                result = PhaseResult.read(paths.phase(*key))
            except IncompleteError:
                continue
            lines[key] = _line(result, seconds=step.seconds, now=step.finished_at)
    return [lines[key] for key in dict.fromkeys([*(key for key in order if key in lines), *lines])]


def contradictions(run_dir: str | Path, results: Iterable[PhaseResult]) -> list[str]:
    """A line for each phase of which metrics.jsonl has other numbers than its result.

    Raises:
        IncompleteError: a line of metrics.jsonl can't be read.
    """
    paths = RunPaths.of(run_dir)
    if not paths.metrics.exists():  # nothing is lost by that: the results have it
        return []
    lines = _newest(_parsed(paths.metrics)[0])
    return [
        f"{paths.metrics.name}: {result.phase} of iteration {result.iteration} isn't what its result says"
        for result in results
        if _measured(lines.get((result.iteration, result.phase), {})) != _measured(_line(result, seconds=0.0, now=0.0))
    ]


def _finished(manifest: Path) -> list[FinishedStep]:
    """The steps that a manifest calls finished; nothing where there is none to read."""
    try:
        return Manifest.read(manifest).finished
    except IncompleteError:
        return []


def _line(result: PhaseResult, *, seconds: float, now: float) -> dict[str, Any]:
    return {
        "iteration": result.iteration,
        "phase": result.phase,
        "seconds": round(seconds, 3),
        "time": round(now, 3),
        "metrics": {name: _finite(value) for name, value in sorted(result.metrics.items())},
        "timings_s": {name: _finite(value) for name, value in sorted(result.timings_s.items())},
    }


def series(lines: list[dict[str, Any]], phase: str, *names: str) -> dict[int, float]:
    """iteration -> value of the first of `names` that the phase measured."""
    found: dict[int, float] = {}
    for line in lines:
        if line["phase"] != phase:
            continue
        value = next((line["metrics"][name] for name in names if line["metrics"].get(name) is not None), None)
        if value is not None:
            found[line["iteration"]] = value
    return found


def _newest(lines: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(line["iteration"], line["phase"]): line for line in lines}


def _measured(line: dict[str, Any]) -> tuple[Any, Any]:
    return line.get("metrics"), line.get("timings_s")


def _tag(phase: str, name: str) -> str:
    """Groups that several phases report (batch/...) are told apart by the phase."""
    group = name.partition("/")[0]
    return f"{phase}/{name}" if group == "batch" else name


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _parsed(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Complete lines and the number of bytes they take."""
    lines, size = [], 0
    with open_regular(path) as file:
        *whole, _ = file.read().split(b"\n")
    for row, raw in enumerate(whole, 1):
        try:
            lines.append(check(sealed.opened(raw), LINE, f"line {row}"))
        except ValueError as error:
            raise IncompleteError(
                f"line {row} is not a metrics line: {error}",
                where=str(path),
                remedy="move the file away; a new one is begun, and the phases' results keep their own numbers",
            ) from error
        size += len(raw) + 1
    return lines, size


def _repaired(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines, size = _parsed(path)
    if size != path.stat().st_size:
        os.truncate(path, size)
    return lines
