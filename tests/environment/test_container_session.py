"""The shell of a container when what it reports is forged, or its output ends and it doesn't."""

import asyncio
from asyncio.subprocess import PIPE

import pytest

from megatron_t1.environment.containers.session import GRACE_S, Session

# A shell that answers with one forged report, closes its output, and doesn't end.
SHELL = r"""IFS= read -r -d '' mark; printf 'out\0%s %s\0' "$mark" "$1"; exec >&- 2>&- sleep 100"""


@pytest.mark.parametrize("report", ["end \u00b2 /", "end " + "1" * 5000 + " /", "begin 1.00 9", "end -1 /", "exit x /"])
def test_a_forged_report_ends_with_the_command(report):
    ended = []

    async def spawn(*words):
        return await asyncio.create_subprocess_exec(
            "bash", "-c", SHELL, "bash", report, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )

    async def script(text, *arguments):
        ended.append(text)

    async def main():
        return await asyncio.wait_for(Session(spawn, script, "/", 1000).run("x", 0.2), GRACE_S + 20)

    result = asyncio.run(main())
    assert result.exit_code is None and result.timed_out and result.output.startswith("out")
    assert ended
