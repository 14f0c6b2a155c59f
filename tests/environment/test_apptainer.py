"""The Apptainer backend against a stand-in of the program (apptainer_stub.py): its command lines, in their order."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers.apptainer import ISOLATION, ApptainerSandbox
from megatron_t1.environment.loading import load_task
from megatron_t1.environment.sandbox.interface import Sandbox, SandboxLost
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error
from tests.environment.step_tasks import check_three_steps, write_steps

VERIFIER = """#!/bin/bash
echo "$GREETING"; ls /tests; python3 -V; touch /tests/x && exit 3
grep -q done /app/a.txt; echo $((1 - $?)) > /logs/verifier/reward.txt
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A sandbox over the stand-in, and the list of its calls."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    home = tmp_path / "stub"
    home.mkdir()
    program = tmp_path / "apptainer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__).with_name("apptainer_stub.py")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("STUB_HOME", str(home))

    def run(body, **options):
        async def main():
            config = SandboxConfig(engine=str(program), **{"base": "/images/base.sif", **options})
            sandbox = ApptainerSandbox(config, tmp_path, 4000)
            try:
                return await asyncio.wait_for(body(sandbox), 60)
            finally:
                await sandbox.stop()

        result = asyncio.run(main())
        assert [path.name for path in home.iterdir()] == ["calls"]  # no instance is left
        assert list(tmp_path.glob("t1-sandboxes-*/t1-sandbox-*")) == []
        return result

    run.calls = lambda: [json.loads(line) for line in (home / "calls").read_text().splitlines()]
    return run


def test_a_task_of_several_steps(stub, tmp_path):
    task = load_task(write_steps(tmp_path / "steps-task", {"steps/build/workdir/json.py": "# the task's own\n"}))
    stub(lambda sandbox: check_three_steps(sandbox, task))


def test_an_episode_from_start_to_verdict(stub, make_task):
    task = make_task({"a.txt": "hi\n"}, VERIFIER, env={"GREETING": "hello there"}, baseline=0)

    async def body(sandbox):
        assert isinstance(sandbox, Sandbox)
        await sandbox.start(task)
        assert (await sandbox.run("cat a.txt; echo $GREETING; export X=1", 20)).output == "hi\nhello there\n"
        assert (await sandbox.run("echo $X; false", 20)).exit_code == 1
        await sandbox.put_files({"/app/new/b": (b"b", 0o640)})
        assert (await sandbox.run("stat -c %a new/b; echo done > a.txt; ln -s a.txt link", 20)).output == "640\n"
        fetched = await sandbox.get_files(["/app/link", "/app", "/none"], 100)
        assert fetched.files == {"/app/link": b"done\n"} and set(fetched.problems) == {"/app", "/none"}
        kinds = {change.path: change.kind for change in await sandbox.changes()}
        assert kinds["/app/a.txt"] == "modified" and kinds["/app/new/b"] == "added"
        verdict = await verify(sandbox, task)
        assert (verdict.trusted, verdict.passed) == (True, 1), verdict.reason
        with pytest.raises(SandboxLost):
            await sandbox.run("true", 5)

    stub(body)
    calls = stub.calls()
    starts = [call for call in calls if call[:2] == ["instance", "start"]]
    assert len(starts) == 2 and all(call[2 : 2 + len(ISOLATION)] == list(ISOLATION) for call in starts)
    assert "/images/base.sif" in starts[0] and not any(word.endswith("/tests:ro") for word in starts[0])
    binds = [word for word in starts[1] if ":/" in word]
    assert [bind.split(":", 1)[1] for bind in binds] == ["/tests:ro", "/logs/verifier"]
    first_stop = next(number for number, call in enumerate(calls) if call[:2] == ["instance", "stop"])
    assert first_stop < calls.index(starts[1])  # the agent's processes are dead before the tests come in
    assert calls.index(starts[1]) < max(number for number, call in enumerate(calls) if "find /" in " ".join(call))
    limits = next(word for call in calls if call[0] == "exec" for word in call if word.startswith("ulimit"))
    assert "ulimit -v 524288" in limits and "ulimit -u 128" in limits


def test_a_dockerfile_is_followed_inside(stub, write_harbor_task):
    task = write_harbor_task("FROM ubuntu:24.04\nENV A=b\nWORKDIR /srv/x\nRUN echo $A > made; test -d /srv/x\n")

    async def body(sandbox):
        await sandbox.start(task)
        assert (await sandbox.run("pwd; cat made", 20)).output == "/srv/x\nb\n"

    stub(body, images={"ubuntu:*": "/images/ubuntu.sif"})
    assert "/images/ubuntu.sif" in stub.calls()[0]


def test_a_failing_step_says_which(stub, write_harbor_task):
    async def body(sandbox):
        with pytest.raises(SandboxLost, match="RUN 'echo why; exit 4': exit status 4: why"):
            await sandbox.start(write_harbor_task("FROM a\nRUN echo why; exit 4\n"))

    stub(body)


def test_without_a_base_the_image_is_pulled_by_its_name(stub, write_harbor_task):
    async def body(sandbox):
        await sandbox.start(write_harbor_task("FROM ghcr.io/lab/image:2\n"))

    stub(body, base="")
    assert "docker://ghcr.io/lab/image:2" in stub.calls()[0]


def test_a_missing_program_is_named():
    with pytest.raises(T1Error, match="apptainer-that-is-not-there"):
        ApptainerSandbox(SandboxConfig(engine="/none/apptainer-that-is-not-there"))
