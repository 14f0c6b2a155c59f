"""More than 300 malformed verifier outputs: each is untrusted with a reason that names the file, never a zero."""

import itertools
import json

import pytest

from megatron_t1.environment.results import CTRF, PYTEST, READERS, REWARD_JSON, REWARD_TEXT, read_ctrf, read_pytest
from megatron_t1.environment.sandbox.interface import VerifierRun
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
ODD = [None, True, 0, -1, 1.5, "", "x", [], [1], {}, {"x": 1}, "\ud800", "a" * 2000]


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
    for field, right in (("tests", 2), ("passed", 1)):
        wrong = [value for value in [*ODD, 3, 10**30, "2"] if value != right or value is True and field == "tests"]
        yield from (_with(["results", "summary", field], value) for value in wrong if value != right)
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
    words = ["", " ", "x", "1 1", "1,0", "nan", "inf", "-inf", "-1", "1.0001", "2", "1e9", "0x1", "True", "one", "1\n0",
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
    passed_first = twice.replace('<failure message="m">x</failure>', "")
    assert read_pytest(passed_first.encode())["t::b"] == "failed"


def test_order_of_detail():
    files = {
        CTRF: json.dumps(GOOD_CTRF).encode(), PYTEST: GOOD_XML.encode(), REWARD_JSON: b'{"q": 0.97, "r": 1}',
        REWARD_TEXT: b"0.5",
    }  # fmt: skip
    for source, total in ((CTRF, 2), (PYTEST, 3), (REWARD_JSON, 2), (REWARD_TEXT, 1)):
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
