"""Read what a verifier left, from bytes to the status of each check; anything odd is refused with its reason.

From most to least detail: CTRF (ctrf.io), the JUnit report that pytest itself writes, reward.json, reward.txt.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

CTRF, PYTEST, REWARD_JSON, REWARD_TEXT = "ctrf.json", "pytest.xml", "reward.json", "reward.txt"
RESULT_FILES = (CTRF, PYTEST, REWARD_JSON, REWARD_TEXT)  # from most to least detail
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
STATUSES = (PASSED, FAILED, SKIPPED, "pending", "other")  # CTRF's; only `passed` counts
MAX_CHECKS = 10_000
MAX_NAME = 1_000  # characters of a check's name
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")  # what float() takes is more: "0_1"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COUNT = r"[0-9]{1,9} (?:subtests )?(?:passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun)"
_LAST_LINE = re.compile(rf"^(?:=+ )?({_COUNT}(?:, {_COUNT})*) in [0-9.]+s\b", re.MULTILINE)
_PASSED = re.compile(r"([0-9]{1,9}) x?passed")

Statuses = dict[str, str]  # check name -> one of STATUSES


class ResultError(ValueError):
    """A result file that doesn't say what it must."""


class EmptyReport(ResultError):
    """A report of no check at all."""


def read_ctrf(content: bytes) -> Statuses:
    """Status of each test of a Common Test Report. A name that comes again gets a number."""
    report = _json(content)
    try:
        results = report["results"]
        tests, summary = results["tests"], results.get("summary", {})
        _require_count(len(tests))
        statuses = [(test["name"], test["status"]) for test in tests]
    except (TypeError, KeyError, AttributeError) as error:
        raise ResultError(f"no results.tests with name and status ({error!r})") from error
    checks: Statuses = {}
    seen: Counter[str] = Counter()
    for name, status in statuses:
        if not isinstance(name, str) or status not in STATUSES:
            raise ResultError(f"check {_short(name)} has status {_short(status)}")
        unique = name
        while unique in checks:  # a number is tried once for each name, so that many of one name don't take long
            seen[name] += 1
            unique = f"{name} #{seen[name] + 1}"
        checks[unique] = status
    _require_sane(checks)
    _require_summary(summary, Counter(checks.values()))
    return checks


def _require_summary(summary: object, found: Counter[str]) -> None:
    """Every count that a CTRF summary gives must be that of its list."""
    if not isinstance(summary, dict):
        raise ResultError(f"its summary is {_short(summary)}")
    for field, count in (("tests", found.total()), *((status, found[status]) for status in STATUSES)):
        said = summary.get(field, count)
        if isinstance(said, bool) or not isinstance(said, int | float) or said != count:
            raise ResultError(f"its summary says {field}={_short(said)}, its list of checks {count}")


def read_pytest(content: bytes) -> Statuses:
    """Status of each test of a JUnit report as pytest writes it, under `class::name`.

    A file that can't be collected is one failed check. A test that failed and then failed again while it was torn down
    comes twice there, and is one check.
    """
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content or b"\0" in content:  # NUL: UTF-16, which could hide them
        raise ResultError("declares entities, or isn't UTF-8")
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an encoding nobody knows
        raise ResultError(f"not XML: {str(error)[:100]}") from error
    suites = [root] if root.tag == "testsuite" else root.findall("testsuite") if root.tag == "testsuites" else []
    if not suites:
        raise ResultError(f"no testsuite in <{root.tag[:40]}>")
    checks: Statuses = {}
    _require_count(sum(len(suite) for suite in suites))
    for suite in suites:
        cases = suite.findall("testcase")
        names = [_case_name(case) for case in cases]
        for name, case in zip(names, cases, strict=True):
            status = _case_status(case)
            checks[name] = status if checks.get(name, PASSED) == PASSED else checks[name]
        # A failed teardown and each subtest are counted too, without a testcase of their own.
        if (said := _said(suite, "tests", len(names))) < len(set(names)):
            raise ResultError(f"a suite says tests={said}, it lists {len(names)}")
        for field, tag in (("failures", "failure"), ("errors", "error")):
            listed = sum(len(case.findall(tag)) for case in cases)
            if (said := _said(suite, field, listed)) > listed:
                raise ResultError(f"a suite says {field}={said}, it lists {listed}")
    _require_sane(checks)
    return checks


def _said(suite: ElementTree.Element, field: str, otherwise: int) -> int:
    """A count among a suite's attributes."""
    text = suite.get(field)
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ResultError(f"a suite says {field}={_short(text)}")
    return int(text)


def passed_by_last_line(output: str) -> int | None:
    """Tests that passed (xpassed too, as pytest.xml has it) by the last summary line of pytest's; None without one."""
    lines = _LAST_LINE.findall(_COLOUR.sub("", output))
    return sum(map(int, _PASSED.findall(lines[-1]))) if lines else None


def read_reward_json(content: bytes) -> Statuses:
    """A flat object of finite numbers from 0 to 1; each is one check, passed at 1."""
    rewards = _json(content)
    if not isinstance(rewards, dict) or not rewards:
        raise ResultError("not an object of named rewards")
    checks = {str(name): _status(_share(value, name) >= 1.0) for name, value in rewards.items()}
    _require_sane(checks)
    return checks


def read_reward_text(content: bytes) -> Statuses:
    """One finite number from 0 to 1: a single check, passed at 1."""
    return {"reward": _status(_share(_number(content), "reward") >= 1.0)}


READERS: dict[str, Callable[[bytes], Statuses]] = {
    CTRF: read_ctrf, PYTEST: read_pytest, REWARD_JSON: read_reward_json, REWARD_TEXT: read_reward_text,
}  # fmt: skip


def own_rewards(files: dict[str, bytes]) -> dict[str, float]:
    """Numbers of reward.json, else of reward.txt; {} where neither is there and sane."""
    try:
        if REWARD_JSON in files:
            return {str(name): _share(value, name) for name, value in json.loads(files[REWARD_JSON]).items()}
        return {"reward": _share(_number(files[REWARD_TEXT]), "reward")} if REWARD_TEXT in files else {}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _case_name(case: ElementTree.Element) -> str:
    parts = [case.get("classname") or "", case.get("name") or ""]
    name = "::".join(part for part in parts if part)
    if not name:
        raise ResultError("a testcase without a name")
    return name


def _case_status(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return FAILED if tags & {"failure", "error"} else SKIPPED if "skipped" in tags else PASSED


def _status(passed: bool) -> str:
    return PASSED if passed else FAILED


def _require_sane(checks: Statuses) -> None:
    if not checks:
        raise EmptyReport("no check ran")
    _require_count(len(checks))
    for name in checks:
        if len(name) > MAX_NAME:
            raise ResultError(f"a check's name has {len(name)} characters, at most {MAX_NAME}")
        try:
            name.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a character, which no record can hold
            raise ResultError(f"check name {_short(name)} is no text") from error


def _require_count(count: int) -> None:
    if count > MAX_CHECKS:
        raise ResultError(f"{count} checks, at most {MAX_CHECKS}")


def _number(content: bytes) -> float:
    """A plain decimal number, or one of the words that `_share` refuses by name."""
    text = content.decode("ascii", "replace").strip()
    if _NUMBER.fullmatch(text) or text.lstrip("+-").lower() in ("nan", "inf", "infinity"):
        return float(text)
    raise ResultError(f"{content[:40]!r} is not a number")


def _share(value: object, name: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == math.inf:
        raise ResultError(f"{_short(name)} is {_short(value)}, not a finite number")
    if not 0.0 <= value <= 1.0:
        raise ResultError(f"{_short(name)} is {_short(value)}, outside 0 to 1")
    return float(value)


def _short(value: object) -> str:
    return repr(value)[:80]


def _json(content: bytes) -> object:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ResultError(f"not JSON: {str(error)[:100]}") from error
