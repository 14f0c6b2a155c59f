"""Many episodes in one event loop: workers that each own a sandbox and take the next attempt when they are free."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from megatron_t1.config.schema import Config, EnvConfig
from megatron_t1.config.targets import reward_options
from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.environment.task import Task
from megatron_t1.errors import ConfigError, T1Error

Job = TypeVar("Job")
SHOWN_REFUSALS = 20


async def run_pool(
    jobs: Iterable[Job],
    play: Callable[[Job, Sandbox], Awaitable[None]],
    *,
    workers: int,
    make_sandbox: Callable[[], Sandbox],
    teardown_timeout_s: float = 60.0,
) -> None:
    """Play every job, at most `workers` at once. The first error ends the others and is raised; no sandbox is left.

    Args:
        jobs: consumed lazily, in order.
        play: plays one job in a sandbox that is its own for that time.
        teardown_timeout_s: how long the sandboxes may take to stop, all together, before they are left behind.
    """
    source = iter(jobs)

    owned: list[Sandbox] = []

    async def work() -> None:
        sandbox = None
        for job in source:  # shared by the workers of one event loop, so each job is taken once
            if sandbox is None:
                sandbox = make_sandbox()
                owned.append(sandbox)
            await play(job, sandbox)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in finished:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Last and by themselves: cancelling a worker must not cut the end of its sandbox short.
        stops = asyncio.gather(*(sandbox.stop() for sandbox in owned), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stops, teardown_timeout_s)


def load_class(target: str, option: str) -> Any:
    """The class or function that `_target_` names. Raises ConfigError when there is none."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{option}={target!r} can't be imported: {error}", where=option, remedy="name it as package.module.Class"
        ) from error


def sandbox_maker(env: EnvConfig, made: list[Sandbox] | None = None) -> Callable[[], Sandbox]:
    """A maker of sandboxes of the configured class; each removes what it wrote when it stops.

    Args:
        made: gets every sandbox that is made.
    """
    sandbox_class = load_class(env.sandbox._target_, "env.sandbox._target_")
    scratch = Path(env.sandbox.scratch_dir or tempfile.gettempdir())
    scratch.mkdir(parents=True, exist_ok=True)

    def make() -> Sandbox:
        sandbox = sandbox_class(env.sandbox, scratch, env.output_limit)
        if made is not None:
            made.append(sandbox)
        return sandbox

    return make


def require_buildable(tasks: Iterable[Task], env: EnvConfig) -> None:
    """What the configured sandbox knows of tasks before anything starts, where it has a `refusal(task, config)`.

    Raises:
        T1Error: it would refuse some; the first few are listed.
    """
    refusal = getattr(load_class(env.sandbox._target_, "env.sandbox._target_"), "refusal", None)
    if refusal is None:
        return
    refused = [f"{task.name}: {why}" for task in tasks if (why := refusal(task, env.sandbox))]
    if refused:
        more = f"\n  and {len(refused) - SHOWN_REFUSALS} more" if len(refused) > SHOWN_REFUSALS else ""
        raise T1Error(
            f"{len(refused)} tasks can't be built here:\n  " + "\n  ".join(refused[:SHOWN_REFUSALS]) + more,
            where=env.sandbox._target_,
            remedy="make a base with these packages (t1 tasks base), or leave the tasks out: `t1 tasks check` writes a "
            "list without them",
        )


def make_reward(config: Config) -> Callable:
    """The configured reward: a callable from a verdict and a baseline to its components."""
    return load_class(config.reward._target_, "reward._target_")(**reward_options(config))
