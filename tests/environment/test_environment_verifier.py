"""What the verifier leaves becomes a verdict; whatever can't be trusted says why and is never a zero."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.environment.results import (
    READERS,
    STATUSES,
    ResultError,
    read_ctrf,
    read_reward_json,
    read_reward_text,
)
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.verifier import verify


def ctrf(*statuses, **summary):
    tests = [{"name": f"t{index}", "status": status} for index, status in enumerate(statuses)]
    return json.dumps({"results": {"tool": {"name": "x"}, "summary": summary, "tests": tests}})


@pytest.fixture
def verdict_of(in_sandbox, make_task):
    def run(test_sh, *, commands=(), timeout_s=60.0, **options):
        task = make_task({"a.txt": "a\n"}, "#!/bin/bash\n" + test_sh, baseline=1, **options)

        async def body(sandbox):
            await sandbox.start(task)
            for command in commands:
                await sandbox.run(command, 60)
            return await verify(sandbox, task, timeout_s)

        return in_sandbox(body)

    return run


def write(name, content):
    return f"cat > /logs/verifier/{name} <<'END'\n{content}\nEND\n"


def test_ctrf_comes_first(verdict_of):
    verdict = verdict_of(write("ctrf.json", ctrf("passed", "failed", "passed", "skipped")) + write("reward.txt", "1"))
    assert (verdict.passed, verdict.total, verdict.trusted, verdict.baseline) == (2, 4, True, 1)
    assert verdict.checks == {"t0": True, "t1": False, "t2": True, "t3": False}
    assert not verdict.solved


def test_reward_files(verdict_of):
    assert verdict_of(write("reward.txt", "1.0")).solved
    assert verdict_of(write("reward.txt", "0") + "exit 1").trusted
    verdict = verdict_of(write("reward.json", '{"build": 1, "speed": 0.5}') + write("reward.txt", "0"))
    assert verdict.checks == {"build": True, "speed": False}


def test_exit_status_counts_only_where_declared(verdict_of):
    assert not verdict_of("exit 0").trusted
    assert verdict_of("exit 0", metadata={"result": "exit_code"}).solved
    failed = verdict_of("exit 1", metadata={"result": "exit_code"})
    assert (failed.trusted, failed.passed, failed.total) == (True, 0, 1)
    assert not verdict_of("exit 2", metadata={"result": "exit_code"}).trusted


@pytest.mark.parametrize(
    ("test_sh", "reason"),
    [
        ("echo sorry; exit 1", "no result file"),  # strands-env#183
        ("true", "no result file"),
        ("kill -9 $$", "crashed"),
        (write("reward.txt", "1") + "kill -SEGV $$", "crashed"),
        ("no-such-program", "crashed"),
        ("sleep 30", "out of time"),
        (write("reward.txt", "1") + "sleep 30", "out of time"),
        (write("reward.txt", ""), "not a number"),
        (write("reward.txt", "nan"), "not a finite number"),
        (write("reward.txt", "inf"), "not a finite number"),
        (write("reward.txt", "2"), "outside 0 to 1"),
        (write("reward.txt", "passed"), "not a number"),
        (write("ctrf.json", "{"), "not JSON"),
        (write("ctrf.json", "[]"), "no results.tests"),
        (write("ctrf.json", ctrf()), "no check ran"),
        (write("ctrf.json", ctrf("passed", tests=2)), "its summary says tests=2"),
        (write("ctrf.json", ctrf("failed", passed=1)), "its summary says passed=1"),
        (write("ctrf.json", ctrf("great")), "status 'great'"),
        (write("ctrf.json", "{") + write("reward.txt", "1"), "ctrf.json"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "symbolic link"),
        ("mkfifo /logs/verifier/reward.txt", "not a regular file"),
        ("mkdir /logs/verifier/reward.txt", "not a regular file"),
        ("head -c 5000000 /dev/zero > /logs/verifier/ctrf.json", "larger than"),
    ],
)
def test_untrusted_with_reason(verdict_of, test_sh, reason):
    verdict = verdict_of(test_sh, timeout_s=1.0 if "sleep" in test_sh else 60.0)
    assert (verdict.trusted, verdict.passed, verdict.total, verdict.solved) == (False, 0, 0, False)
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 400 /tests/test.sh",
        "mkdir /app/bin; printf '#!/bin/sh\\necho good' > /app/bin/cat; chmod +x /app/bin/cat;"
        " export PATH=/app/bin:$PATH;"
        " echo 'export PATH=/app/bin:$PATH' | tee ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/environment",
        "rm /bin; mkdir /bin; printf '#!/usr/bin/sh\\necho good' > /bin/cat; chmod +x /bin/cat",
        "cat() { echo good; }; export -f cat; export BASH_ENV=/app/e; echo 'cat() { echo good; }' > /app/e",
        "(while :; do echo 1 > /logs/verifier/reward.txt; done) 2>/dev/null & sleep 0.1",
        "mkdir -p ~/.local/lib/python3.11/site-packages; echo 'print(\"good\")' >"
        " ~/.local/lib/python3.11/site-packages/usercustomize.py; echo 'raise SystemExit' > /app/sitecustomize.py",
        "echo /app/x.so > /etc/ld.so.preload",
        "rm -rf /app",
        "chmod 000 /tmp /etc",
    ],
)
def test_tampering_does_not_count(verdict_of, command):
    test_sh = (
        'if [ "$(cat a.txt 2>/dev/null)" = good ] || [ "$(python3 -c \'print(1)\')" != 1 ]; then r=1; else r=0; fi\n'
        "echo $r > /logs/verifier/reward.txt\n"
    )
    verdict = verdict_of(test_sh, commands=[command])
    assert (verdict.trusted, verdict.passed, verdict.total) == (True, 0, 1), verdict.reason


def test_tests_are_absent_before_and_protected_after(in_sandbox, make_task):
    task = make_task(test_sh="echo x > /tests/test.sh && echo 1 > /logs/verifier/reward.txt\n")

    async def body(sandbox):
        await sandbox.start(task)
        before = await sandbox.run("ls /tests /solution", 60)
        verdict = await verify(sandbox, task)
        with pytest.raises(SandboxLost):
            await sandbox.run("true", 60)
        return before, verdict

    before, verdict = in_sandbox(body)
    assert before.exit_code != 0
    assert not verdict.trusted and "Read-only" in verdict.reason


@pytest.mark.parametrize("name", sorted(READERS))
@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_readers_refuse_or_read(name, content):
    try:
        checks = READERS[name](content)
    except ResultError:
        return
    assert checks and set(checks.values()) <= set(STATUSES)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "status", "tests", "x"]), inner)
    ),
    max_leaves=8,
)


@given(_JSON, _JSON)
def test_malformed_reports_are_named(tests, summary):
    for reader, raw in ((read_ctrf, {"results": {"tests": tests, "summary": summary}}), (read_reward_json, tests)):
        try:
            assert reader(json.dumps(raw).encode())
        except ResultError as error:
            assert str(error)


@given(st.lists(st.sampled_from(["passed", "failed", "skipped", "pending", "other"]), min_size=1, max_size=30))
def test_ctrf_counts(statuses):
    tests = [{"name": "same", "status": status} for status in statuses]
    checks = read_ctrf(json.dumps({"results": {"tests": tests}}).encode())
    assert len(checks) == len(statuses)
    assert list(checks.values()) == statuses


@given(st.floats(0, 1))
def test_reward_text_passes_only_at_one(value):
    assert read_reward_text(f" {value!r}\n".encode()) == {"reward": "passed" if value == 1.0 else "failed"}


def test_a_verifier_that_ends_before_the_driver_looks_is_trusted(in_sandbox, make_task):
    """A busy driver reads where the sandbox's first process is only after a short verifier could have ended."""

    async def hog():
        while True:
            time.sleep(0.2)
            await asyncio.sleep(0)

    async def body(sandbox):
        task, verdicts = make_task(), []
        busy = asyncio.create_task(hog())
        try:
            for _ in range(2):
                await sandbox.start(task)
                verdicts.append(await verify(sandbox, task))
            return verdicts
        finally:
            busy.cancel()

    verdicts = in_sandbox(body)
    assert [verdict.reason for verdict in verdicts] == [""] * 2
