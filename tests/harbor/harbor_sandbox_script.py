"""Run by a Python that has Harbor: HarborSandbox on an environment class, as an episode uses it. Prints JSON."""

import asyncio
import json
import sys

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.interface import FileRefused, Sandbox, SandboxLost
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.environment.verifier import verify
from megatron_t1.harbor.sandbox import HarborSandbox

TEST = b"""#!/bin/bash
[ -e /tests/planted ] && exit 1
ps -e | grep -c sleep
setsid sleep 777 > /dev/null 2>&1 &
grep -q done a.txt; echo $((1 - $?)) > /logs/verifier/reward.txt
"""
COMMANDS = [
    "pwd; ls", "cd d; export X=5; f() { echo f$X; }", "f; pwd", "seq 3 >&2; false", "sleep 100 & sleep 200", "echo $X",
    "exit 3", "pwd; echo [$X]", "cat; read x; echo [$x]", "exec sh -c 'exit 4'", "exec >/tmp/x; echo hidden",
    "cat /tmp/x",
    "printf 'a\\0b\\xff'", "head -c 100000 /dev/zero | tr '\\0' x", "(sleep 0.3; echo late) & echo now",
    "sleep 0.8; echo two", "trap '' TERM; while :; do :; done", "pwd", "echo " + "y" * 70000 + " | wc -c",
]  # fmt: skip


async def main(engine: str) -> dict:
    config = SandboxConfig(engine=engine, memory_mb=1000, max_processes=200)
    sandbox = HarborSandbox(config, None, 2000)
    assert isinstance(sandbox, Sandbox)
    tests = {"test.sh": (TEST, 0o755)}
    content = TaskContent(files={"a.txt": (b"hi\n", 0o644)}, directories=("d",), tests=tests)
    task = Task("task", "do it", content=content, baseline=0)
    said: dict = {}
    try:
        await sandbox.start(task)
        said["changes at first"] = [change.path for change in await sandbox.changes()]
        said["commands"] = []
        for command in COMMANDS:
            result = await sandbox.run(command, 1.5)
            said["commands"].append([result.exit_code, result.output, result.timed_out, result.omitted])
        await sandbox.run("mkdir -p /tests; touch /tests/planted; echo 1 > /logs/verifier/reward.txt", 20)
        await sandbox.run("(setsid sleep 1000 &); echo done > /app/a.txt; rm -r /app/d; mkdir /app/n", 20)
        await sandbox.put_files({"/app/n/new/x": (b"abc\xff", 0o640)})
        said["mode"] = (await sandbox.run("stat -c %a /app/n/new/x", 20)).output
        fetched = await sandbox.get_files(["/app/n/new/x", "/none", "/app"], 10)
        said["fetched"] = [{k: v.hex() for k, v in fetched.files.items()}, fetched.problems]
        said["changes"] = sorted([change.path, change.kind] for change in await sandbox.changes())
        verdict = await verify(sandbox, task, 30.0)
        said["verdict"] = [verdict.trusted, verdict.passed, verdict.total, verdict.reason]
        try:
            await sandbox.run("true", 5)
        except SandboxLost:
            said["after"] = "refused"
        await sandbox.resume({})
        await verify(sandbox, task, 30.0)  # after a step in which the agent ran nothing
        await sandbox.resume({})
        said["alive"] = (await sandbox.run("ps -e | grep -c sleep", 20)).output
        try:
            await sandbox.resume({"n": (b"in a directory's place", 0o644)})
        except FileRefused as error:
            said["blocked"] = error.problem
    finally:
        await sandbox.stop()
    return said


print(json.dumps(asyncio.run(main(sys.argv[1]))))
