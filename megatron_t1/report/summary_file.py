"""An evaluation's summary.json, checked: numbers that no evaluation can have are refused before they are averaged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_t1.errors import IncompleteError
from megatron_t1.regular import open_regular

SUMMARY_FILE = "summary.json"
VERSION = 2
NUMBERS = ("passed", "total", "solved", "score")  # lists over attempts, None without a trusted verdict


@dataclass(frozen=True)
class Summary:
    """See `megatron_t1.rollout.summary.evaluation_summary`, which writes it."""

    policy: int
    tasks: dict[str, dict[str, Any]]


def read_summary(directory: str | Path) -> Summary:
    """Read and check DIR/summary.json.

    Raises:
        IncompleteError: absent, unreadable, of another version, or it contradicts itself.
    """
    path = Path(directory) / SUMMARY_FILE
    try:
        with open_regular(path) as file:
            raw = json.loads(file.read())
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            raise ValueError(f"not a summary of version {VERSION}")
        _require(_is_count(raw.get("policy")), "policy", raw.get("policy"))
        _require(isinstance(raw.get("tasks"), dict), "tasks", raw.get("tasks"))
        return Summary(raw["policy"], {name: _checked(name, entry) for name, entry in raw["tasks"].items()})
    except (OSError, ValueError, RecursionError) as error:
        raise IncompleteError(
            f"no readable evaluation summary: {type(error).__name__}: {error}",
            where=str(path),
            remedy="run `t1 eval run.dir=...` or let `t1 run` finish",
        ) from error


def _checked(task: str, entry: Any) -> dict[str, Any]:
    """One task's entry. Raises ValueError."""
    _require(isinstance(entry, dict), f"task {task}", entry)
    lists = [entry.get(name) for name in (*NUMBERS, "ends", "errors")]
    if not all(isinstance(own, list) for own in lists) or len({len(own) for own in lists}) != 1:
        raise ValueError(f"task {task}: {', '.join(NUMBERS)}, ends and errors are no lists of as many attempts")
    for number, values in enumerate(zip(*lists, strict=True)):
        where = f"task {task}, attempt {number}:"
        *numbers, end, error = values
        _require(isinstance(end, str), f"{where} end", end)
        if error is None:
            _check_numbers(where, *numbers)
        else:
            known = isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("kind", "reason"))
            _require(known, f"{where} error", error)
            _require(numbers == [None] * len(NUMBERS), f"{where} beside an error, numbers", numbers)
    baseline = entry.get("baseline")
    _require(
        baseline == -1 and not isinstance(baseline, float) or _is_count(baseline), f"task {task}: baseline", baseline
    )
    for name in ("category", "difficulty"):
        _require(isinstance(entry.get(name), str), f"task {task}: {name}", entry.get(name))
    return entry


def _check_numbers(where: str, passed: Any, total: Any, solved: Any, score: Any) -> None:
    _require(_is_count(total), f"{where} total", total)
    _require(_is_count(passed) and passed <= total, f"{where} of {total} checks, passed", passed)
    _require(isinstance(solved, bool) and solved == (passed == total > 0), f"{where} {passed}/{total}, solved", solved)
    number = isinstance(score, int | float) and not isinstance(score, bool)
    _require(number and 0 <= score <= 1, f"{where} score", score)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(right: bool, what: str, found: Any) -> None:
    if not right:
        raise ValueError(f"{what} is {repr(found)[:80]}")
