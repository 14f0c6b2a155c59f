"""Which of the files that a verifier left is its result, and whether they contradict each other.

A program that the tests start runs with the verifier's rights, and can write to /logs/verifier as well as they can. So
a file counts only where the task's tests speak of it, and reports of the same tests have to agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megatron_t1.environment.protection import runs_pytest
from megatron_t1.environment.results import (
    CTRF,
    FAILED,
    PASSED,
    PYTEST,
    RESULT_FILES,
    REWARD_JSON,
    REWARD_TEXT,
    Statuses,
    passed_by_last_line,
)
from megatron_t1.environment.task import Task

REPORTS = (CTRF, PYTEST)
_NAMED = {CTRF: rb"ctrf", PYTEST: rb"py\.?test", REWARD_JSON: rb"reward\.json", REWARD_TEXT: rb"reward\.txt"}


def expected_files(task: Task) -> tuple[str, ...]:
    """Result files that the task's tests or its verifier's environment name, from most to least detail.

    pytest's report where the scripts run pytest: a check that starts it on the agent's own tests names it too.
    """
    named = tuple(name for name in RESULT_FILES if _mentions(task, _NAMED[name]))
    return named if PYTEST not in named or runs_pytest(task) else tuple(name for name in named if name != PYTEST)


def _mentions(task: Task, pattern: bytes) -> bool:
    texts: Iterable[bytes] = (content for content, _ in task.test_files().values())
    found = re.compile(pattern, re.IGNORECASE)
    return any(map(found.search, texts)) or any(found.search(text.encode()) for text in task.verifier_env.values())


def contradiction(reports: Mapping[str, Statuses], output: str = "") -> str:
    """How reports of the same tests contradict each other, or what pytest printed; "" for not at all.

    A file that can't be collected is a failed check of pytest.xml's alone.

    Args:
        reports: of CTRF, PYTEST, or both.
        output: the verifier's, whose last summary line counts; "" where it may be that of other tests.
    """
    if PYTEST not in reports:
        return ""
    said = passed_by_last_line(output)
    passed = _passed(reports[PYTEST])
    if said is not None and passed > said:
        return f"{PYTEST} lists {passed} passed tests, pytest's last line says {said}"
    if CTRF not in reports:
        return ""
    collected = {name: status for name, status in reports[PYTEST].items() if "::" in name or status != FAILED}
    counts = {name: (_passed(own), len(own)) for name, own in ((CTRF, reports[CTRF]), (PYTEST, collected))}
    if counts[CTRF] == counts[PYTEST]:
        return ""
    listed = ", ".join(f"{name} has {own} passed of {total}" for name, (own, total) in counts.items())
    return f"two reports contradict each other: {listed}"


def _passed(statuses: Statuses) -> int:
    return sum(status == PASSED for status in statuses.values())
