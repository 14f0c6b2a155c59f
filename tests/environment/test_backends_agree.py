"""The same task in bubblewrap and in Podman: built from the same base, verified with the same result.

With T1_HARBOR_TASKS, a directory of real tasks, each of them is built and verified after doing nothing in both. Only
their base image is replaced: by a small system that has what their tests need (python3, pytest) and is declared to have
what their Dockerfiles install besides.
"""

import asyncio
import os
import random
import shutil
from dataclasses import replace

import pytest
from container_fixtures import podman  # noqa: F401

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.containers.container import ContainerSandbox
from megatron_t1.environment.generate.families import FAMILIES
from megatron_t1.environment.generate.pools import POOLS
from megatron_t1.environment.generate.tasks import make_task as generate
from megatron_t1.environment.loading import load_tasks
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.verifier import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LIMITS = {"memory_mb": 1024, "max_processes": 256}


@pytest.fixture(scope="module")
def backends(podman, tmp_path_factory):  # noqa: F811
    """Makers of a sandbox of each backend, on one base."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    base = podman.base
    if os.geteuid() == 0:  # bubblewrap's base belongs to the user that sandboxes run as
        base = tmp_path_factory.mktemp("bases") / "owned"
        shutil.copytree(podman.base, base, symlinks=True)
        owner = SandboxConfig().host_uid
        for folder, names, leaves in os.walk(base):
            for name in (*names, *leaves, "."):
                os.chown(os.path.join(folder, name), owner, owner, follow_symlinks=False)
    for folder in (base, *base.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    return {
        "bubblewrap": lambda: BubblewrapSandbox(SandboxConfig(base=str(base), **LIMITS), None, 4000),
        "podman": lambda: ContainerSandbox(podman.config(**LIMITS), None, 4000),
    }


async def verdicts(backends, played):
    """Verdict of every (task, commands), by backend: {backend: [verdict]}; two sandboxes of each work side by side."""

    async def work(make, numbers, found):
        sandbox = make()
        try:
            for number in numbers:
                task, commands = played[number]
                await sandbox.start(task)
                for command in commands:
                    await sandbox.run(command, 30.0)
                found[number] = await verify(sandbox, task)
        finally:
            await sandbox.stop()

    results = {name: [None] * len(played) for name in backends}
    workers = []
    for name, make in backends.items():
        numbers = iter(range(len(played)))
        workers += [work(make, numbers, results[name]) for _ in range(2)]
    await asyncio.gather(*workers)
    return results


def same(results):
    for ours, theirs in zip(results["bubblewrap"], results["podman"], strict=True):
        assert ours.trusted and theirs.trusted, (ours.reason, theirs.reason)
        assert (ours.passed, ours.total, ours.checks) == (theirs.passed, theirs.total, theirs.checks)
    return results["podman"]


def test_generated_tasks_get_the_same_verdict(backends):
    made = [
        generate(f"t-{name}", random.Random(f"7/{name}"), POOLS["small"], (name,), 1) for name in sorted(FAMILIES)[:2]
    ]
    played = [(one.task, commands) for one in made for commands in ([], [part.command for part in one.parts])]
    found = same(asyncio.run(verdicts(backends, played)))
    for nothing, solved in zip(found[::2], found[1::2], strict=True):
        assert nothing.passed < solved.passed == solved.total


@pytest.mark.skipif(not os.environ.get("T1_HARBOR_TASKS"), reason="T1_HARBOR_TASKS names no directory of real tasks")
def test_real_tasks_get_the_same_verdict_for_doing_nothing(backends):
    tasks = load_tasks(os.environ["T1_HARBOR_TASKS"])
    found = same(asyncio.run(verdicts(backends, [(replace(task), []) for task in tasks])))
    assert len(found) >= 16 and all(verdict.total >= 2 for verdict in found)
    assert sum(verdict.passed == verdict.total for verdict in found) == 0
