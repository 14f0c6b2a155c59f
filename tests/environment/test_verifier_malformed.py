"""More than 300 malformed verifier outputs: each is untrusted with a reason that names the file, never a zero."""

import asyncio
import itertools
import json
import threading
import time

import pytest

from megatron_t1.environment import verifier
from megatron_t1.environment.results import (
    CTRF,
    PYTEST,
    READERS,
    REWARD_JSON,
    REWARD_TEXT,
    ResultError,
    passed_by_last_line,
    read_ctrf,
    read_pytest,
)
from megatron_t1.environment.sandbox.interface import VerifierRun
from megatron_t1.environment.sources import expected_files
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.environment.verifier import judge
from megatron_t1.trajectory.record import Verdict

TASK = Task("t", "do", content=TaskContent(tests={"test.sh": (b"true", 0o755)}), baseline=0)
GOOD_CTRF = {"results": {"tool": {"name": "pytest"}, "summary": {"tests": 2, "passed": 1},
                         "tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "failed"}]}}  # fmt: skip
GOOD_XML = (
    '<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="0" failures="1" skipped="1" '
    'tests="3"><testcase classname="t" name="a"/><testcase classname="t" name="b"><failure message="m">x</failure>'
    '</testcase><testcase classname="t" name="c"><skipped type="pytest.skip"/></testcase></testsuite></testsuites>'
)
# What pytest 9 writes: a failed teardown, a failed subtest and a passing one of unittest's are counted, not listed.
UNEVEN_XML = (
    '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="0" tests="6"><testcase classname="t" '
    'name="teardown"><error/></testcase><testcase classname="t" name="subtests"><failure/><failure/></testcase>'
    '<testcase classname="t" name="unit"/></testsuite></testsuites>'
)
ODD = [None, True, 0, -1, 1.5, "", "x", [], [1], {}, {"x": 1}, "\ud800", "a" * 2000]


def ctrf(*statuses):
    tests = [{"name": f"c{index}", "status": status} for index, status in enumerate(statuses)]
    return json.dumps({"results": {"tests": tests}}).encode()


def xml(*statuses):
    kinds = {"passed": "", "failed": "<failure/>", "skipped": "<skipped/>"}
    cases = "".join(
        f'<testcase classname="t" name="c{index}">{kinds[status]}</testcase>' for index, status in enumerate(statuses)
    )
    return f"<testsuite>{cases}</testsuite>".encode()


def task_with(test_sh, **options):
    return Task("t", "do", content=TaskContent(tests={"test.sh": (test_sh.encode(), 0o755)}), baseline=0, **options)


def _with(path, value):
    """GOOD_CTRF with the value at a path of keys replaced."""
    raw = json.loads(json.dumps(GOOD_CTRF))
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(raw).encode()


def _ctrf():
    for path in (["results"], ["results", "tests"], ["results", "tests", 0], ["results", "tests", 1, "status"]):
        yield from (_with(path, value) for value in ODD)
    yield from (_with(["results", "tests", 0, "name"], value) for value in ODD if value not in ("", "x"))
    for field, right in (("tests", 2), ("passed", 1), ("failed", 1), ("skipped", 0), ("pending", 0), ("other", 0)):
        wrong = [value for value in [*ODD, False, 3, 10**30, "2"] if type(value) is not int or value != right]
        yield from (_with(["results", "summary", field], value) for value in wrong)
    yield from (_with(["results", "summary"], value) for value in ODD if not isinstance(value, dict))
    good = json.dumps(GOOD_CTRF).encode()
    yield from (good[:length] for length in range(0, len(good) - 1, 2))
    yield from (b"\xff" + good, good.replace(b"passed", b"\xc3"), b"[" * 100_000, b"NaN", b'{"a":1}{"b":2}', b"\0" * 64)
    yield from (_with(["results", "tests"], [{"name": f"n{i}", "status": "passed"} for i in range(10_001)]),)


def _xml():
    good = GOOD_XML.encode()
    yield from (good[:length] for length in range(0, len(good) - 1, 3))
    for old, new in (
        ('tests="3"', 'tests="2"'), ('tests="3"', 'tests="x"'), ("<testcase", "<case"), ("testsuite", "suite"),
        ('classname="t" name="a"', ""), ("<failure", "<fine"), ("</testsuites>", ""), ("utf-8", "no"),
        ("errors", "errors=0"),
        ("<?xml", "<!DOCTYPE a [<!ENTITY b 'c'>]><?xml"), ("<testsuites>", "<!DOCTYPE a><testsuites>"), ("x<", "\x00<"),
        ("message", "message='1' message"), ('name="a"', f'name="{"n" * 1001}"'), ("x<", "&undefined;<"),
    ):  # fmt: skip
        yield GOOD_XML.replace(old, new).encode()
    yield from (
        b"<testsuites/>",
        b"<testsuite/>",
        b'<testsuite tests="0"></testsuite>',
        b"<a>" * 5000,
        b"{}",
        b"\xff\xfe",
    )
    bomb = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    yield f'<!DOCTYPE x [<!ENTITY e0 "x">{bomb}]><testsuite>&e11;</testsuite>'.encode()


def _reward_json():
    yield from (json.dumps(value).encode() for value in ODD if value != {"x": 1})
    values = [None, True, False, -0.1, 1.1, 1e400, "1", [], {}, [1], 10**400]
    yield from (json.dumps({"a": 1, "b": value}).encode() for value in values)
    yield from (b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1', b"", b" ", b"1", b'{"\\ud800": 1}', b'"a"')


def _reward_text():
    words = ["0_1", "1_0e-1", "1_", ".", "e0", "1e", "1.e_1",
             "", " ", "x", "1 1", "1,0", "nan", "inf", "-inf", "-1", "1.0001", "2", "1e9", "0x1", "True", "one", "1\n0",
             "1/2", "--1", "1e400", "0.5.5", "None", "[1]", "1%"]  # fmt: skip
    yield from (word.encode() for word in words)
    yield from (b"\xef\xbc\x91", b"\xff", b"1\x00", b"\x00" * 8, b"1" * 400)


MALFORMED = [(name, content) for name, made in ((CTRF, _ctrf()), (PYTEST, _xml()), (REWARD_JSON, _reward_json()),
                                                (REWARD_TEXT, _reward_text())) for content in made]  # fmt: skip


def test_there_are_more_than_300():
    assert len({(name, content) for name, content in MALFORMED}) >= 300


@pytest.mark.parametrize("name", sorted(READERS))
def test_malformed_output_is_untrusted_with_its_reason(name):
    contents = [content for own, content in MALFORMED if own == name]
    assert len(contents) > 20
    for content in contents:
        verdict = judge(TASK, VerifierRun(0, "last words", False, {name: content}), 60.0)
        assert (verdict.trusted, verdict.passed, verdict.total) == (False, 0, 0), (name, content[:200])
        assert name in verdict.reason and "last words" in verdict.reason and len(verdict.reason) < 1000


@pytest.mark.parametrize("name", sorted(READERS))
@pytest.mark.parametrize("problem", ["is a symbolic link", "is not a regular file", "is larger than 4194304 bytes"])
def test_what_is_no_readable_file_is_untrusted(name, problem):
    run = VerifierRun(0, "", False, {REWARD_TEXT: b"1"} if name != REWARD_TEXT else {}, {name: problem})
    verdict = judge(TASK, run, 60.0)
    assert not verdict.trusted and f"{name} {problem}" in verdict.reason


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "doubt"),
    [
        *itertools.product((None, 126, 127, 128, 137, 139, 255), (False,), ("",)),
        (0, True, ""),
        (0, False, "the disk was full"),
    ],
)
@pytest.mark.parametrize("files", [{REWARD_TEXT: b"1"}, {CTRF: json.dumps(GOOD_CTRF).encode()}, {}])
def test_a_verifier_that_did_not_end_well_is_untrusted_whatever_it_left(exit_code, timed_out, doubt, files):
    verdict = judge(TASK, VerifierRun(exit_code, "", timed_out, files, doubt=doubt), 60.0)
    assert not verdict.trusted and verdict.reason


def test_the_good_ones_are_read():
    assert read_ctrf(json.dumps(GOOD_CTRF).encode()) == {"a": "passed", "b": "failed"}
    assert read_pytest(GOOD_XML.encode()) == {"t::a": "passed", "t::b": "failed", "t::c": "skipped"}
    verdict = judge(TASK, VerifierRun(1, "", False, {PYTEST: GOOD_XML.encode(), REWARD_TEXT: b"0"}), 60.0)
    assert (verdict.passed, verdict.total, verdict.trusted) == (1, 3, True)
    assert verdict.statuses == {"t::c": "skipped"} and verdict.rewards == {"reward": 0.0}


def test_a_failure_that_fails_again_in_its_teardown_is_one_check():
    """pytest then writes two testcases of the same name, and counts one."""
    twice = GOOD_XML.replace("</testcase><testcase classname=\"t\" name=\"c\">",
                             "</testcase><testcase classname=\"t\" name=\"b\"><error/></testcase>"
                             "<testcase classname=\"t\" name=\"c\">")  # fmt: skip
    assert read_pytest(twice.encode()) == {"t::a": "passed", "t::b": "failed", "t::c": "skipped"}
    passed_first = twice.replace('<failure message="m">x</failure>', "").replace('failures="1"', 'failures="0"')
    assert read_pytest(passed_first.encode())["t::b"] == "failed"


def test_order_of_detail():
    files = {
        CTRF: ctrf("passed", "failed", "skipped"), PYTEST: GOOD_XML.encode(), REWARD_JSON: b'{"q": 0.97, "r": 1}',
        REWARD_TEXT: b"0.5",
    }  # fmt: skip
    for source, total in ((CTRF, 3), (PYTEST, 3), (REWARD_JSON, 2), (REWARD_TEXT, 1)):
        verdict = judge(TASK, VerifierRun(0, "", False, dict(files)), 60.0)
        assert (verdict.source, verdict.total) == (source, total)
        del files[source]
    assert not judge(TASK, VerifierRun(0, "", False, files), 60.0).trusted  # rllm#677


def test_known_names_are_the_checks():
    task = Task("t", "do", content=TaskContent(tests={"test.sh": (b"true", 0o755)}), check_names=("a", "b", "c"))
    raw = {"results": {"tests": [{"name": n, "status": "passed"} for n in ("a", "made up", "also made up")]}}
    verdict = judge(task, VerifierRun(0, "", False, {CTRF: json.dumps(raw).encode()}), 60.0)
    assert (verdict.passed, verdict.total) == (1, 3)
    assert verdict.checks == {"a": True, "b": False, "c": False} and verdict.statuses == {
        "b": "missing",
        "c": "missing",
    }


def test_a_baseline_of_another_verifier_makes_no_zero():
    """Known are pytest's names; then a report of other ones, or a lone reward, comes: nothing can be compared."""
    tests = {"test.sh": (b"true", 0o755)}
    task = Task("t", "do", content=TaskContent(tests=tests), check_names=("t::a", "t::b"))
    passed, failed = (json.dumps({"results": {"tests": [{"name": "t.py", "status": status}]}}).encode()
                      for status in ("passed", "failed"))  # fmt: skip
    for files in ({CTRF: passed}, {REWARD_TEXT: b"0"}, {REWARD_TEXT: b"1"}):
        verdict = judge(task, VerifierRun(0, "", False, files), 60.0)
        assert not verdict.trusted and "none of the 2 checks" in verdict.reason
    not_collected = judge(task, VerifierRun(0, "", False, {CTRF: failed}), 60.0)
    assert (not_collected.trusted, not_collected.passed, not_collected.total) == (True, 0, 2)


def test_graded_scores_are_kept():
    verdict = judge(TASK, VerifierRun(0, "", False, {REWARD_TEXT: b"0.96"}), 60.0)
    assert (verdict.passed, verdict.total, verdict.score) == (0, 1, 0.96)


def test_a_verdict_survives_its_record_and_states_nothing_unused():
    files = {PYTEST: GOOD_XML.encode(), REWARD_TEXT: b"0.5"}
    verdict = judge(TASK, VerifierRun(0, "", False, files), 60.0)
    assert Verdict(**json.loads(json.dumps(verdict.to_json()))) == verdict
    plain = Verdict(1, 2, 0, trusted=True, checks={"a": True, "b": False})
    assert not {"statuses", "source", "rewards"} & set(plain.to_json())  # the digest of a record stays what it was
    assert Verdict(**plain.to_json()) == plain


def test_teardowns_and_subtests_are_counted_without_a_case_of_their_own():
    assert read_pytest(UNEVEN_XML.encode()) == {"t::teardown": "failed", "t::subtests": "failed", "t::unit": "passed"}
    with pytest.raises(ResultError, match="failures=3"):
        read_pytest(UNEVEN_XML.replace('failures="2"', 'failures="3"').encode())


@pytest.mark.parametrize("names", [["a"], ["a", "a #2", "a #3"], [f"a #{index}" for index in range(2, 5000)] + ["a"]])
def test_repeated_names_take_no_time(names):
    names = list(itertools.islice(itertools.chain(names, itertools.repeat(names[-1])), 10_000))
    tests = [{"name": name, "status": "passed"} for name in names]
    started = time.process_time()
    assert len(read_ctrf(json.dumps({"results": {"tests": tests}}).encode())) == 10_000
    with pytest.raises(ResultError, match="at most 10000"):
        read_ctrf(json.dumps({"results": {"tests": tests * 4}}).encode())
    assert time.process_time() - started < 2.0


RUNS = "pytest /tests -rA\necho $? > /logs/verifier/reward.txt\n"
FORGED = ctrf(*["passed"] * 9999, "failed")


@pytest.mark.parametrize(
    ("test_sh", "files", "source", "passed", "total"),
    [
        # a program that the tests start writes what the tests never ask for
        (RUNS, {CTRF: xml("passed", "failed"), PYTEST: xml("passed", "failed")}, None, 0, 0),
        (RUNS, {CTRF: FORGED, PYTEST: xml("passed", "failed"), REWARD_TEXT: b"0"}, None, 0, 0),
        (RUNS, {CTRF: ctrf("passed"), PYTEST: xml("passed", "failed"), REWARD_TEXT: b"0"}, None, 0, 0),
        (RUNS, {CTRF: FORGED, REWARD_TEXT: b"0"}, None, 0, 0),
        (RUNS, {REWARD_JSON: b'{"a": 1, "b": 1}', PYTEST: xml("passed", "failed")}, PYTEST, 1, 2),
        ("grade > /logs/verifier/reward.txt", {CTRF: FORGED, REWARD_TEXT: b"0"}, REWARD_TEXT, 0, 1),
        ("grade > /logs/verifier/reward.txt", {PYTEST: xml("passed"), REWARD_TEXT: b"0"}, REWARD_TEXT, 0, 1),
        ("grade > /logs/verifier/reward.txt", {REWARD_JSON: b'{"a": 1}', REWARD_TEXT: b"0"}, REWARD_TEXT, 0, 1),
        ("grade > /logs/verifier/reward.txt", {REWARD_JSON: b'{"a": 1}'}, None, 0, 0),
        (RUNS.replace("pytest", "true install; pytest"), {REWARD_TEXT: b"1"}, None, 0, 0),
        (RUNS.replace("pytest", "pip install x && pytest"), {REWARD_TEXT: b"1"}, None, 0, 0),
        # what they ask for has to be there, and to agree
        (RUNS + "# --ctrf", {CTRF: FORGED, PYTEST: xml("passed", "failed"), REWARD_TEXT: b"0"}, None, 0, 0),
        (RUNS + "# --ctrf", {CTRF: ctrf("passed"), REWARD_TEXT: b"1"}, None, 0, 0),
        (RUNS + "# --ctrf", {CTRF: b"{", PYTEST: xml("passed"), REWARD_TEXT: b"1"}, None, 0, 0),
        (RUNS + "# --ctrf", {CTRF: ctrf("failed", "passed"), PYTEST: xml("passed", "failed")}, CTRF, 1, 2),
        (RUNS + "# --ctrf --junitxml=x", {CTRF: ctrf("failed", "passed"), REWARD_TEXT: b"0"}, CTRF, 1, 2),
        # an image's own program writes what no test names
        ("/opt/grade", {CTRF: ctrf("failed", "passed")}, CTRF, 1, 2),
        ("/opt/grade", {CTRF: ctrf("failed", "passed"), PYTEST: xml("passed")}, None, 0, 0),
    ],
)  # fmt: skip
def test_a_file_counts_where_the_tests_name_it_and_reports_agree(test_sh, files, source, passed, total):
    verdict = judge(task_with(test_sh), VerifierRun(0, "", False, files), 60.0)
    assert (verdict.trusted, verdict.passed, verdict.total) == (source is not None, passed, total), verdict.reason
    assert verdict.source == (source or "")


def test_what_the_exit_status_says_is_not_outranked_by_a_stray_file():
    task = task_with("/tests/run", metadata={"result": "exit_code"})
    verdict = judge(task, VerifierRun(1, "", False, {REWARD_TEXT: b"1", CTRF: FORGED}), 60.0)
    assert (verdict.trusted, verdict.passed, verdict.total, verdict.source) == (True, 0, 1, "exit_code")


def test_files_that_count_are_found_in_any_test_and_in_the_environment():
    inner = Task(
        "t", "do", content=TaskContent(tests={"test.sh": (b"sh /tests/in", 0o755), "in": (b"--CTRF x", 0o644)})
    )
    assert expected_files(inner) == (CTRF,)
    assert expected_files(task_with("grade $OUT", verifier_env={"OUT": "/logs/verifier/reward.json"})) == (REWARD_JSON,)
    assert expected_files(task_with("/opt/grade")) == ()
    # a check that runs the agent's own tests: each of them would be a check
    check = {
        "test.sh": (b"/tests/check > /logs/verifier/reward.txt", 0o755),
        "check.py": (b"run(['pytest', app])", 0o644),
    }
    assert expected_files(Task("t", "do", content=TaskContent(tests=check))) == (REWARD_TEXT,)


def test_a_number_without_end_in_the_output_is_no_error():
    verdict = judge(
        task_with(RUNS), VerifierRun(0, "9" * 5000 + " passed in 0.1s\n", False, {PYTEST: xml("passed")}), 60.0
    )
    assert verdict.trusted and verdict.passed == 1


def test_where_nothing_could_be_collected_pytest_says_so_and_ctrf_is_empty():
    """An agent that breaks what the tests import gets nothing, and isn't excused."""
    collection = b'<testsuite errors="1" tests="1"><testcase classname="" name="test_y"><error/></testcase></testsuite>'
    run = VerifierRun(0, "1 error in 0.79s", False, {CTRF: ctrf(), PYTEST: collection, REWARD_TEXT: b"0"})
    verdict = judge(task_with(RUNS + "# --ctrf", check_names=("a", "b")), run, 60.0)
    assert (verdict.trusted, verdict.passed, verdict.total) == (True, 0, 2), verdict.reason


LAST = "\x1b[31m=== \x1b[1m1 failed\x1b[0m, \x1b[32m1 passed\x1b[0m, 3 warnings\x1b[31m in 0.12s\x1b[0m ===\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", None), ("1 passed", None), ("== 3 passed in 1.20s ==", 3), ("3 passed in 1.20s", 3), (LAST, 1),
        ("5 passed in 1s\n1 failed in 2s\n", 0), ("6 failed, 2 passed, 1 skipped, 1 subtests passed in 2.07s", 2),
        ("1 passed, 2 xpassed, 1 xfailed in 75.00s (0:01:15)", 3), ("I say 9 passed in 1s", None),
        ("3 tests collected in 0.01s", None), ("=== no tests ran in 0.01s ===", None),
    ],
)  # fmt: skip
def test_the_last_summary_line_is_read(output, said):
    assert passed_by_last_line(output) == said


def test_a_report_that_was_rewritten_contradicts_the_last_line():
    files = {PYTEST: xml("passed", "passed", "failed"), REWARD_TEXT: b"0"}
    forged = judge(task_with(RUNS), VerifierRun(0, LAST, False, files), 60.0)
    assert not forged.trusted and "pytest's last line says 1" in forged.reason
    files[PYTEST] = xml("passed", "failed")
    assert judge(task_with(RUNS), VerifierRun(0, LAST, False, files), 60.0).trusted


def test_what_was_left_is_judged_in_a_thread(monkeypatch):
    """A file that takes long to read must not keep other episodes waiting."""
    judging = []
    monkeypatch.setattr(verifier, "judge", lambda *_: judging.append(threading.current_thread()))

    class Left:
        async def run_verifier(self, task, timeout_s, names):
            return VerifierRun(0, "", False)

    asyncio.run(verifier.verify(Left(), TASK))
    assert judging and judging[0] is not threading.main_thread()
