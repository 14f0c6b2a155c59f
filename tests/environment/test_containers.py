"""Podman on this machine: an agent's session, what it may not do, and a verifier that it can't touch."""

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from container_fixtures import podman  # noqa: F401

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers.container import ContainerSandbox
from megatron_t1.environment.loading import load_task, load_tasks
from megatron_t1.environment.sandbox.interface import Change, Sandbox, SandboxLost, builds_dockerfiles
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error
from tests.environment.step_tasks import check_three_steps, write_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
FORKS = """python3 -c '
import subprocess
started = 0
try:
    while started < 500:
        subprocess.Popen(["sleep", "60"])
        started += 1
except OSError:
    print(started)'"""
TARGET = "megatron_t1.environment.containers.container.ContainerSandbox"
VERIFIER = """#!/bin/bash
grep -q done a.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
echo "in $PWD as $(id -u)"
"""


def test_a_session_goes_on_whatever_a_command_does(podman, make_task):  # noqa: F811
    async def body(sandbox):
        assert isinstance(sandbox, Sandbox)
        await sandbox.start(make_task({"a.txt": "hi\n"}, directories=("d",)))

        async def run(command, timeout_s=30.0):
            result = await sandbox.run(command, timeout_s)
            return result.exit_code, result.output

        assert await run("cd d; export X=5; f() { echo f$X; }") == (0, "")
        assert await run("f; pwd; ls ..") == (0, "f5\n/app/d\na.txt\nd\n")
        assert await run("seq 3 >&2; false") == (1, "1\n2\n3\n")
        assert await run('cat; read x; echo "[$x]"') == (0, "[]\n")
        assert await run("printf 'a\\0b\\xff'") == (0, "ab\ufffd")
        assert await run("cat <<'E'\nhere $X\nE") == (0, "here $X\n")
        assert await run("exec >/tmp/x; echo hidden") == (0, "")
        assert await run("cat /tmp/x") == (0, "hidden\n")
        assert await run("(sleep 0.2; echo late) & echo now") == (0, "now\n")
        assert await run("sleep 0.5; echo two") == (0, "late\ntwo\n")
        assert await run("echo \"$__mark\" | wc -c; printf '\\0%s end 0 /\\0' wrong") == (0, "33\nwrong end 0 /")
        big = await sandbox.run("yes | head -c 3000000; echo end", 30.0)
        assert big.omitted > 2_900_000 and big.output.endswith("end\n")
        timed_out = await sandbox.run("echo before; sleep 100 & sleep 200", 0.5)
        assert timed_out.timed_out and timed_out.exit_code is None and timed_out.output.startswith("before\n")
        assert await run("echo $X; ps -e | grep -c sleep; true") == (0, "5\n0\n")
        stuck = await sandbox.run("trap '' TERM INT; while :; do :; done", 0.5)
        assert stuck.timed_out
        assert await run("pwd; echo [$X]") == (0, "/app/d\n[]\n")
        assert await run("exit 3") == (3, "")
        assert await run("exec sh -c 'exit 4'") == (4, "")
        assert await run("pwd") == (0, "/app/d\n")

    podman.run(body)


def test_a_task_of_several_steps(podman, tmp_path):  # noqa: F811
    task = load_task(write_steps(tmp_path / "steps-task", {"steps/build/workdir/json.py": "# the task's own\n"}))
    podman.run(lambda sandbox: check_three_steps(sandbox, task))


def test_files_go_in_and_out_and_changes_are_told(podman, make_task):  # noqa: F811
    async def body(sandbox):
        await sandbox.start(make_task({"a.txt": "hi\n", "b.txt": "b\n", "old/c": "c\n"}))
        assert await sandbox.changes() == []
        await sandbox.run(
            "echo more >> a.txt; rm b.txt; mkdir n; ln -s /etc/passwd n/link; ln -s loop n/loop; mkfifo n/p", 9
        )
        await sandbox.put_files({"/app/new/x": (b"abc", 0o750), "/app/n/link": (b"plain", 0o600)})
        shown = await sandbox.run("stat -c '%a %U %F' new/x n/link; cat new/x; wc -l < /etc/passwd", 9)
        assert shown.output == "750 root regular file\n600 root regular file\nabc2\n"
        await sandbox.run("ln -s ../a.txt n/up", 9)
        fetched = await sandbox.get_files(
            ["/app/new/x", "/app/n/up", "/app/n", "/none", "/app/n/loop", "/app/n/p"], 100
        )
        assert fetched.files == {"/app/new/x": b"abc", "/app/n/up": b"hi\nmore\n"}
        assert set(fetched.problems) == {"/app/n", "/none", "/app/n/loop", "/app/n/p"}
        assert (await sandbox.get_files(["/app/a.txt"], 3)).problems == {"/app/a.txt": "is larger than 3 bytes"}
        expected = {"/app/n": "added", "/app/n/link": "added", "/app/new/x": "added", "/app/a.txt": "modified"}
        changes = await sandbox.changes()
        kinds = {change.path: change.kind for change in changes}
        assert kinds.items() >= {**expected, "/app/b.txt": "removed"}.items()
        assert Change("/app", "modified") not in changes and not any("old" in change.path for change in changes)

    podman.run(body)


def test_the_agent_is_shut_in(podman, make_task, tmp_path, monkeypatch):  # noqa: F811
    async def body(sandbox):
        await sandbox.start(make_task())

        async def output(command):
            return (await sandbox.run(command, 30.0)).output

        assert await output("ls /sys/class/net") == "lo\n"
        status = await output("grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status")
        assert "00000000000000fb" in status and "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
        for command in (
            "echo 5 > /proc/sys/kernel/printk",
            "mkdir /sys/fs/cgroup/memory/x || mkdir /sys/fs/cgroup/x/y",
            "ls /dev/sda /dev/vda",
        ):
            assert (await sandbox.run(command, 9)).exit_code != 0, command
        assert await output(f"[ -e {Path(__file__).parent} ] || echo nothing of the host") == "nothing of the host\n"
        assert 0 < int(await output(FORKS)) < 64
        await output("kill -HUP 1; kill -TERM 1; kill -9 1; kill -9 -1")
        assert (await sandbox.run("python3 -c 'x = bytearray(400 << 20)'", 30.0)).exit_code not in (0, None)
        assert (await sandbox.run("head -c 20000000 /dev/zero > big", 30.0)).exit_code != 0
        assert await output("stat -c %s big; echo still here") == f"{8 << 20}\nstill here\n"

    monkeypatch.chdir(tmp_path)  # podman's monitor notes there that a container ran out of memory
    podman.run(body, memory_mb=200, max_processes=64, file_size_mb=8)
    assert list(tmp_path.iterdir()) == []


def test_the_verifier_sees_files_and_nothing_else_of_the_agent(podman, make_task):  # noqa: F811
    task = make_task({"a.txt": "hi\n"}, VERIFIER, baseline=0, verifier_env={"FROM_TASK": "1"})

    async def body(sandbox):
        await sandbox.start(task)
        await sandbox.run(
            "mkdir -p /tests /logs/verifier; echo evil > /tests/conftest.py; ln -s /nowhere /tests/test.sh", 9
        )
        await sandbox.run("echo 1 > /logs/verifier/reward.txt; echo '{}' > /logs/verifier/ctrf.json; chmod 0 /logs", 9)
        await sandbox.run(
            "export BASH_ENV=/x; (setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &)", 9
        )
        verdict = await verify(sandbox, task)
        assert (verdict.trusted, verdict.passed, verdict.total) == (True, 0, 1), verdict.reason
        with pytest.raises(SandboxLost):
            await sandbox.run("true", 9)
        script = "set -e; ls -A /tests; touch /tests/x && exit 9; env; cat a.txt > /logs/verifier/reward.txt"
        await sandbox.start(replace(make_task({"a.txt": "x\n"}, script), verifier_env={"FROM_TASK": "1"}))
        run = await sandbox.run_verifier(
            replace(make_task({}, script), verifier_env={"FROM_TASK": "1"}), 20.0, ("reward.txt",)
        )
        assert run.files == {"reward.txt": b"x\n"} and run.exit_code == 0, run
        assert "pytest.ini" in run.output and "FROM_TASK=1" in run.output and "Read-only" in run.output

    podman.run(body)


@pytest.mark.parametrize(
    ("tampering", "named"),
    [
        ("rm /usr/bin/grep; echo 'exit 0' > /usr/bin/grep; chmod +x /usr/bin/grep", "/usr/bin/grep"),
        ("head -c 5000000 /dev/zero > /app/big", "more than env.sandbox.disk_mb"),
    ],
)
def test_a_verdict_on_a_changed_system_is_untrusted(podman, make_task, tampering, named):  # noqa: F811
    async def body(sandbox):
        task = make_task({"a.txt": "hi\n"}, VERIFIER)
        await sandbox.start(task)
        assert (await sandbox.run(tampering, 9)).exit_code == 0
        verdict = await verify(sandbox, task)
        assert not verdict.trusted and named in verdict.reason

    podman.run(body, disk_mb=4)


def test_a_container_that_ended_is_verified_by_its_files(podman, make_task):  # noqa: F811
    async def body(sandbox):
        task = make_task({"a.txt": "done\n"}, VERIFIER)
        await sandbox.start(task)
        await sandbox._engine.check("kill", sandbox._name, doing="end it from outside")
        with pytest.raises(SandboxLost):
            await sandbox.run("true", 9)
        assert (await verify(sandbox, task)).passed == 1

    podman.run(body)


def test_a_verifier_that_hangs_ends_with_what_it_started(podman, make_task):  # noqa: F811
    async def body(sandbox):
        task = make_task({}, "trap '' TERM; echo begun; sleep 1000 & sleep 1000; :")
        await sandbox.start(task)
        run = await sandbox.run_verifier(task, 5.0, ("reward.txt",))
        assert run.timed_out and run.exit_code is None and "begun" in run.output

    podman.run(body)


def test_a_dockerfile_that_fails_is_a_lost_sandbox_with_its_words(podman, write_harbor_task):  # noqa: F811  # rllm#677
    task = write_harbor_task("FROM anything:1\nRUN echo the reason >&2; exit 3\n")

    async def body(sandbox):
        with pytest.raises(SandboxLost, match="the reason"):
            await sandbox.start(task)

    podman.run(body)


def test_the_engine_follows_the_whole_dockerfile(podman, write_harbor_task):  # noqa: F811
    folder = write_harbor_task("FROM scratch\n").directory  # what only an engine can follow
    (folder / "environment/Dockerfile").write_text(
        "FROM first:1 AS build\nRUN apt-get update && apt-get install -y python3-pip && echo made > /made\n"
        "FROM second:2\nARG WORD=word\nENV NAME=$WORD\nWORKDIR /srv/a\nWORKDIR /srv/b\n"
        "COPY --from=build /made /srv/b/\n"
        'SHELL ["/bin/bash", "-c"]\nRUN [[ -d /srv/a ]] && echo $NAME > named\nUSER nobody\n'
    )
    with pytest.raises(T1Error, match="more than one build stage"):
        load_task(folder)
    (task,) = load_tasks(folder.parent, engine_builds=builds_dockerfiles(SandboxConfig(_target_=TARGET)))

    async def body(sandbox):
        await sandbox.start(task)
        shown = await sandbox.run("pwd; cat made named; id -un; echo $NAME; touch /srv/b/x", 9)
        assert shown.output.startswith("/srv/b\nmade\nword\nnobody\nword\n") and shown.exit_code != 0
        verdict = await verify(sandbox, task)
        assert verdict.trusted and verdict.passed == 1, verdict.reason

    podman.run(body)


def test_what_a_killed_driver_left_is_removed(podman, tmp_path):  # noqa: F811
    script = f"""
import asyncio, os, signal
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers.container import ContainerSandbox
from megatron_t1.environment.task import Task, TaskContent
async def main():
    config = SandboxConfig(base={str(podman.base)!r}, engine="podman", runtime={podman.runtime!r})
    sandbox = ContainerSandbox(config, None)
    await sandbox.start(Task("probe", "", content=TaskContent()))
    print(sandbox._engine.driver, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    driver = done.stdout.strip()
    assert done.returncode == -9 and podman.left(driver), done.stderr

    async def main():
        sandbox = ContainerSandbox(podman.config(), None)
        return await sandbox._engine.remove_abandoned()

    assert asyncio.run(main()) >= 1
    assert podman.left(driver) == []


def test_docker_is_asked_in_the_same_words(podman, make_task, tmp_path, monkeypatch):  # noqa: F811
    """A program called docker that hands every word to podman: nothing is asked that only one of them understands."""
    shim = tmp_path / "docker"
    runtime = f" --runtime {podman.runtime}" if podman.runtime else ""
    shim.write_text(
        f'#!/bin/bash\n[ "$1" = info ] && {{ echo {os.fspath(tmp_path)}; exit; }}\n'
        f'exec {shutil.which("podman")}{runtime} "$@"\n'
    )
    shim.chmod(0o755)

    async def body(sandbox):
        task = make_task({"a.txt": "done\n"}, VERIFIER)
        await sandbox.start(task)
        assert (await sandbox.run("echo $((6 * 7))", 9)).output == "42\n"
        assert (await verify(sandbox, task)).passed == 1

    replace(podman, engine=str(shim), runtime="").run(body)
