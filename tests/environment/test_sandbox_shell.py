"""The persistent shell: whatever a command does, something sane comes back and the next command works."""

import asyncio
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.interface import SandboxLost
from megatron_t1.environment.sandbox.output import OutputBuffer


@pytest.fixture
def session(in_sandbox, make_task):
    """Run commands in one session; each is text or (text, timeout_s)."""

    def run(*commands, **options):
        async def body(sandbox):
            await sandbox.start(make_task({"a.txt": "hello\n"}))
            results = []
            for command in commands:
                text, timeout_s = command if isinstance(command, tuple) else (command, 60.0)
                results.append(await sandbox.run(text, timeout_s))
            return results

        return in_sandbox(body, **options)

    return run


def test_directory_variables_and_functions_stay(session):
    *_, last = session("cd /tmp", "export A=1 B='x y'", "f() { echo f $1; }", "pwd; echo $A $B; f 2")
    assert (last.exit_code, last.output) == (0, "/tmp\n1 x y\nf 2\n")


@pytest.mark.parametrize(
    ("command", "exit_code", "output"),
    [
        ("cat a.txt", 0, "hello\n"),
        ("(exit 7)", 7, ""),
        ("printf abc", 0, "abc"),
        ("echo out; echo err >&2; echo out", 0, "out\nerr\nout\n"),
        ("cat; echo after", 0, "after\n"),
        ("cat <<'END'\nhi $A\nEND", 0, "hi $A\n"),
        ("printf 'a\\0b'", 0, "ab"),
        ("printf '\\377\\376'", 0, "��"),
        ("echo one & wait; echo two", 0, "one\ntwo\n"),
        ('read x; echo "got $x"', 0, "got \n"),
        ("python3 -I -c 'import sys; print(sys.stdin.read() == \"\")'", 0, "True\n"),
        ("exec echo replaced", 0, "replaced\n"),
        ("echo last; exit 3", 3, "last\n"),
        ("set -e; false; echo not here", 1, ""),
        ("kill -9 $$", 137, ""),
        ("printf() { :; }; read() { :; }; unset PWD; true", 0, ""),
        ("exec >/tmp/elsewhere 2>&1; echo lost", 0, ""),
        ("exec 0<&- 1>&- 2>&-", 0, ""),
        ("printf '0 /\\0' >&8", 1, "bash: line 1: 8: Bad file descriptor\n"),
        ("x='" + "a" * 100_000 + "'; echo ${#x}", 0, "100000\n"),
        ("", 0, ""),
        ("true\0", 0, ""),
        ("cat -", 0, ""),
        ("read -p 'sure? ' answer; echo \"[$answer]\"", 0, "[]\n"),
        ("python3 -I -c 'input(\"name: \")' 2>&1 | tail -n 1", 0, "EOFError: EOF when reading a line\n"),
        ("cat <<END 2>/dev/null; exec 2>&1\nEND\n", 0, ""),
        ("head -c 3000000 /dev/zero | tr '\\0' x | wc -c", 0, "3000000\n"),
        ("(setsid sleep 300 </dev/null >/dev/null 2>&1 &) ; echo daemon", 0, "daemon\n"),
        ("test -t 0 || test -t 1 || echo 'no terminal'", 0, "no terminal\n"),
        ("trap 'echo trapped' EXIT; trap 'echo d' DEBUG; trap - DEBUG", 0, "d\n"),
        ("alias echo=false; shopt -s expand_aliases; unalias echo; \\echo kept", 0, "kept\n"),
        ("stty -a 2>/dev/null || clear 2>/dev/null || echo none", 0, None),
        ("IFS=x; set -f; set -- a b; true", 0, ""),
        ("eval 'echo \"$(echo nested)\"'; (cd /; exit 4) || echo $?", 0, "nested\n4\n"),
    ],
)
def test_odd_commands(session, command, exit_code, output):
    first, second = session(command, "echo alive")
    assert (first.exit_code, first.timed_out) == (exit_code, False)
    assert output is None or first.output == output
    assert (second.exit_code, second.output) == (0, "alive\n")


def test_status_can_not_be_forged(as_normal_user):
    """A driver that isn't root and its sandbox are one user, so the sandbox may open what its shell holds."""
    output = as_normal_user(r"""
import asyncio
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.task import Task, TaskContent
forge = "for fd in /proc/$$/fd/*; do (printf '77 /etc\\0' > $fd) 2>/dev/null; done; true"
inject = "for fd in /proc/$$/fd/*; do (printf 'cd /usr; (exit 78)\\0' > $fd) 2>/dev/null; done; true"
async def main():
    sandbox = BubblewrapSandbox(SandboxConfig())
    try:
        await sandbox.start(Task("t", "", content=TaskContent()))
        for command in ("cd /tmp", forge, inject, "(exit 5)", "pwd"):
            result = await sandbox.run(command, 60)
            print(result.exit_code, sandbox._shell.cwd)
    finally:
        await sandbox.stop()
asyncio.run(main())
""")
    assert output == "0 /tmp\n0 /tmp\n0 /tmp\n5 /tmp\n0 /tmp\n"


def test_syntax_errors_are_reported_and_survived(session):
    first, second = session("echo 'unterminated", "echo alive")
    assert first.exit_code == 2
    assert "unexpected EOF" in first.output
    assert second.output == "alive\n"


@pytest.mark.parametrize(
    "command",
    ["echo part; sleep 600", "echo part; bash -c \"trap '' INT TERM; sleep 600\"", "echo part; while :; do :; done",
     "echo part; exec sleep 600", "echo part; yes >/dev/null", "echo part; setsid sleep 600",
     "echo part; cat <(sleep 600)",
     "echo part; set -n"],
)  # fmt: skip
def test_time_limit_keeps_partial_output(session, command):
    _, slow, after = session("cd /tmp", (command, 1.5), ("pwd", 60))
    assert slow.timed_out and slow.exit_code is None
    assert slow.output.startswith("part\n")
    assert after.output == "/tmp\n"


def test_time_limit_keeps_state_and_earlier_background_jobs(session):
    *_, last = session("export A=1; sleep 77 & sleep 0.05", ("sleep 60", 0.3), "echo $A; jobs -r")
    assert last.output.startswith("1\n")
    assert "sleep 77" in last.output


def test_background_output_is_not_waited_for(session):
    wait = "while [ ! -e {0} ]; do sleep 0.05; done"
    first, second, third = session(
        (f"({wait.format('asked')}; echo late; touch said) & echo now", 60),
        (f"touch asked; {wait.format('said')}", 60),
        "echo end",
    )
    assert (first.output, second.output, third.output) == ("now\n", "late\n", "end\n")


def test_long_output_keeps_head_and_tail(session):
    result, after = session("echo first; yes | head -c 20000000; echo last", "echo ok", output_limit=200)
    assert result.exit_code == 0
    assert result.output.startswith("first\n") and result.output.endswith("last\n")
    assert len(result.output) <= 200
    assert result.omitted == 20_000_011 - (200 - len(f"\n[... {result.omitted} bytes omitted ...]\n"))
    assert after.output == "ok\n"


def test_removed_directory_falls_back(session):
    *_, last = session("mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d", "exit 1", "pwd")
    assert last.output == "/\n"


def test_sessions_do_not_mix(make_task):
    async def main():
        sandboxes = [BubblewrapSandbox(SandboxConfig(), None, 1000) for _ in range(8)]

        async def episode(sandbox, number):
            try:
                await sandbox.start(make_task())
                for step in range(20):
                    result = await sandbox.run(f"export X={step}; echo $X {number}", 60)
                    assert result.output == f"{step} {number}\n"
            finally:
                await sandbox.stop()

        await asyncio.gather(*(episode(sandbox, number) for number, sandbox in enumerate(sandboxes)))

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) == before


def test_killed_from_outside_is_lost_not_a_result(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        await sandbox.run("true", 60)
        asyncio.get_running_loop().call_later(0.2, sandbox._shell._process.process.kill)
        with pytest.raises(SandboxLost, match="killed from outside"):
            await sandbox.run("sleep 30", 20)

    in_sandbox(body)


def test_cancelled_command_leaves_a_usable_sandbox(in_sandbox, make_task):
    async def body(sandbox):
        await sandbox.start(make_task())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run("sleep 30", 20), 0.3)
        return await sandbox.run("echo alive", 60)

    assert in_sandbox(body).output == "alive\n"


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(0, 200))
@example([b"\1" * 14 + b"\0" * 28 + b"\1" * 13], 54)  # making room for the marker makes its number longer
def test_output_buffer_keeps_what_fits(blocks, limit):
    buffer = OutputBuffer(limit)
    for block in blocks:
        buffer.feed(block)
    data = b"".join(blocks)
    text, omitted = buffer.text()
    expected = data.decode(errors="replace").replace("\0", "")
    if len(data) <= limit:
        assert (text, omitted) == (expected, 0)
    else:
        assert omitted >= len(data) - limit
        assert len(text) <= limit


def test_one_line_of_many_megabytes(session):
    first, second = session("head -c 30000000 /dev/zero | tr '\\0' x", "echo alive", output_limit=1000)
    assert first.exit_code == 0 and first.output.count("x") > 900 and first.omitted > 29_000_000
    assert second.output == "alive\n"


def test_a_full_disk_is_survived(session):
    first, second, third = session(
        "head -c 60000000 /dev/zero > /tmp/fill; cat <<END > /tmp/here\nx\nEND\nmkdir /tmp/more; echo end",
        "echo alive; rm /tmp/fill",
        "cat <<END > /tmp/here && cat /tmp/here\nback\nEND",
        disk_mb=16,
    )
    assert "No space left" in first.output and first.output.endswith("end\n")
    assert second.output == "alive\n" and third.output == "back\n"


def test_no_background_writer_answers_a_later_command(session):
    """A subshell keeps the shell's own descriptors; what it writes there carries no later command's mark."""
    message = "7 /forged\\0\\0%s 7 /forged\\0"
    forge = f"for f in /proc/$$/fd/*; do n=${{f##*/}}; [ $n -gt 8 ] && printf '{message}' \"$__mark\" >&$n; done"
    results = session(
        f"(while :; do {forge}; sleep 0.02; done) 2>/dev/null & sleep 0.1; echo started",
        "sleep 0.3; echo A",
        "echo B; sleep 0.2; pwd",
        "printf -v x '%0100000d' 0; PWD=/$x; echo long",
        "echo C",
    )
    assert [result.exit_code for result in results[1:]] == [0, 0, 0, 0]
    assert all(word in result.output for word, result in zip(["A", "B", "long", "C"], results[1:], strict=True))
    assert results[2].output.rstrip().endswith("/app")


def test_what_a_thread_started_ends_at_the_time_limit(session):
    code = (
        "import subprocess, threading; t = threading.Thread(target=subprocess.run, args=(['sleep', '77'],)); t.start()"
    )
    (script,) = [f'python3 -c "{code}; t.join()"']
    late, left = session((script, 1.0), "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert late.timed_out
    assert "sleep 77" not in left.output.replace("tr", "")
