"""Read what a verifier left: CTRF, reward.json, reward.txt. From bytes to checks; anything odd is refused."""

from __future__ import annotations

import json
import math

CTRF, REWARD_JSON, REWARD_TEXT = "ctrf.json", "reward.json", "reward.txt"
RESULT_FILES = (CTRF, REWARD_JSON, REWARD_TEXT)  # from most to least detail
CTRF_STATUSES = ("passed", "failed", "skipped", "pending", "other")
MAX_CHECKS = 10_000


class ResultError(ValueError):
    """A result file that doesn't say what it must."""


def read_ctrf(content: bytes) -> dict[str, bool]:
    """Check name -> passed, from a Common Test Report (ctrf.io). What is skipped or pending doesn't pass."""
    report = _json(content)
    try:
        results = report["results"]
        tests, summary = results["tests"], results.get("summary", {})
        statuses = [(test["name"], test["status"]) for test in tests]
    except (TypeError, KeyError, AttributeError) as error:
        raise ResultError(f"no results.tests with name and status ({error!r})") from error
    if not statuses:
        raise ResultError("no check ran")
    if len(statuses) > MAX_CHECKS:
        raise ResultError(f"{len(statuses)} checks, at most {MAX_CHECKS}")
    checks: dict[str, bool] = {}
    for name, status in statuses:
        if not isinstance(name, str) or status not in CTRF_STATUSES:
            raise ResultError(f"check {name!r} has status {status!r}")
        unique, number = name, 2
        while unique in checks:
            unique, number = f"{name} #{number}", number + 1
        checks[unique] = status == "passed"
    for field, found in (("tests", len(checks)), ("passed", sum(checks.values()))):
        said = summary.get(field, found) if isinstance(summary, dict) else None
        if said != found:
            raise ResultError(f"its summary says {field}={said!r}, its list of checks {found}")
    return checks


def read_reward_json(content: bytes) -> dict[str, bool]:
    """A flat object of finite numbers from 0 to 1; each is one check, passed at 1."""
    rewards = _json(content)
    if not isinstance(rewards, dict) or not rewards:
        raise ResultError("not an object of named rewards")
    return {str(name): _share(value, name) >= 1.0 for name, value in rewards.items()}


def read_reward_text(content: bytes) -> dict[str, bool]:
    """One finite number from 0 to 1: a single check, passed at 1."""
    try:
        value = float(content.decode("ascii").strip())
    except ValueError as error:
        raise ResultError(f"{content[:40]!r} is not a number") from error
    return {"reward": _share(value, "reward") >= 1.0}


READERS = {CTRF: read_ctrf, REWARD_JSON: read_reward_json, REWARD_TEXT: read_reward_text}


def _share(value: object, name: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ResultError(f"{name} is {value!r}, not a finite number")
    if not 0.0 <= value <= 1.0:
        raise ResultError(f"{name} is {value!r}, outside 0 to 1")
    return float(value)


def _json(content: bytes) -> object:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ResultError(f"not JSON: {str(error)[:100]}") from error
