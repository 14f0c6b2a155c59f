"""The shell in a Harbor environment: what it answers is somebody else's."""

import asyncio

import pytest

from megatron_t1.harbor.shell import RemoteShell


@pytest.mark.parametrize(("said", "code"), [("7", 7), ("\u00b2", None), ("1" * 5000, None), ("", None)])
def test_a_status_that_is_no_number_is_none(said, code):
    answers = iter(["99", f"100\nend {said} /srv\n0\n\n\n"])

    async def execute(command, timeout_s):
        return next(answers)

    shell = RemoteShell(execute, None, "/", 1000, "1:5 2:7")
    result = asyncio.run(shell.run("true", 1.0))
    assert (result.exit_code, result.timed_out, shell.cwd) == (code, False, "/srv")
