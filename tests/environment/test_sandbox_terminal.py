"""Typing into a terminal."""

import asyncio
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.config.targets import SANDBOX_METHODS
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost
from megatron_t1.environment.sandbox.terminal import TerminalSandbox, key_words

needs_tmux = pytest.mark.skipif(not shutil.which("tmux", path="/usr/bin:/usr/local/bin"), reason="no tmux below /usr")


@pytest.fixture
def terminal(make_task):
    def run(*texts, timeout_s=20.0):
        async def main():
            sandbox = TerminalSandbox(SandboxConfig())
            try:
                await sandbox.start(make_task({"a.txt": "hello\n"}))
                results = [await sandbox.run(text, timeout_s) for text in texts]
                return results, await sandbox.changes()
            finally:
                await sandbox.stop()

        return asyncio.run(main())

    return run


def test_what_is_typed():
    assert key_words("ls -l") == ["lls -l", "kEnter"]
    assert key_words("<C-c>") == ["kC-c"]
    assert key_words("iab<Escape>:wq<Enter>") == ["liab", "kEscape", "l:wq", "kEnter"]
    assert key_words("cat <file >out") == ["lcat <file >out", "kEnter"]
    assert key_words("") == []


@given(st.text(max_size=30))
def test_nothing_typed_is_lost(text):
    words = key_words(text)
    shown = "".join(word[1:] if word[0] == "l" else f"<{word[1:]}>" for word in words)
    assert shown in (text, f"{text}<Enter>")


@needs_tmux
@pytest.mark.slow
def test_a_terminal(terminal):
    texts = [
        "cat a.txt; test -t 0 && echo tty", "cd /tmp; false", "echo $?; pwd", "python3 -q", "1+1", "<C-d>",
        "read -p 'name: ' x", "me", "echo got $x",
    ]  # fmt: skip
    results, changes = terminal(*texts)
    shown = [(result.exit_code, result.output.splitlines()[1:]) for result in results]
    assert shown[0] == (0, ["hello", "tty", "$"])
    assert shown[1] == (1, ["$"])
    assert shown[2] == (0, ["1", "/tmp", "$"])
    assert shown[3] == (None, [">>>"])
    assert shown[4] == (None, ["2", ">>>"])
    assert shown[5][0] == 0
    assert results[6].exit_code is None and results[6].output.endswith("name:\n")
    assert shown[8][1] == ["got me", "$"]
    assert not any("t1" in change.path for change in changes)


@needs_tmux
@pytest.mark.slow
def test_time_limit_leaves_the_program_and_a_key_ends_it(terminal):
    results, _ = terminal(
        "x" * 200_000, "seq 1000000000000", "<C-c>", "clear; seq 100 | tail -2", "exit", "echo new", timeout_s=2.0
    )
    assert results.pop(0).output.startswith("too much to type")
    assert results[0].timed_out and results[0].exit_code is None
    assert results[1].exit_code == 130
    assert "100" in results[2].output
    assert results[4].output.splitlines()[1:] == ["new", "$"]


def test_without_tmux(terminal, monkeypatch):
    real = TerminalSandbox.__mro__[1].run

    async def run(self, command, timeout_s):
        return await real(self, command.replace("tmux", "no-such-tmux"), timeout_s)

    monkeypatch.setattr(TerminalSandbox.__mro__[1], "run", run)
    with pytest.raises(SandboxLost, match="needs tmux"):
        terminal("true")


@needs_tmux
@pytest.mark.slow
def test_the_driver_does_not_type(make_task):
    """What begins a step (setup.sh, a healthcheck) may be silent for longer than a terminal waits for input."""

    async def main():
        sandbox = TerminalSandbox(SandboxConfig())
        try:
            await sandbox.start(make_task({"a.txt": "hello\n"}))
            await sandbox.run("cd /tmp", 20.0)
            await sandbox.resume({"b.txt": (b"new", 0o644)})
            slow = await sandbox.execute("sleep 1.3; cat b.txt; exit 3", 20.0)
            return slow, await sandbox.run("pwd", 20.0)
        finally:
            await sandbox.stop()

    slow, typed = asyncio.run(main())
    assert (slow.exit_code, slow.output) == (3, "new") and "/app" in typed.output.splitlines()


def test_it_is_a_sandbox():
    assert all(hasattr(TerminalSandbox, name) for name in SANDBOX_METHODS)


@pytest.mark.parametrize("noted", ["", "1 \u00b2", "1 " + "9" * 5000, "1", "\x1e"])
def test_what_the_prompt_noted_is_somebody_elses(monkeypatch, noted):
    """The file that says it belongs to the agent."""

    async def run(self, command, timeout_s):
        return CommandResult(0, f"$\x1e0 {noted}")

    monkeypatch.setattr(BubblewrapSandbox, "run", run)
    result = asyncio.run(TerminalSandbox(SandboxConfig()).run("x", 1.0))
    assert result.exit_code is None and not result.timed_out
