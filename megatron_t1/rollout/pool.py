"""Many episodes in one event loop: workers that each own a sandbox and take the next attempt when they are free."""

from __future__ import annotations

import asyncio
import importlib
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from megatron_t1.config.schema import Config, EnvConfig
from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.errors import ConfigError

Job = TypeVar("Job")


async def run_pool(
    jobs: Iterable[Job],
    play: Callable[[Job, Sandbox], Awaitable[None]],
    *,
    workers: int,
    make_sandbox: Callable[[], Sandbox],
) -> None:
    """Play every job, at most `workers` at once. The first error ends the others and is raised; no sandbox is left.

    Args:
        jobs: consumed lazily, in order.
        play: plays one job in a sandbox that is its own for that time.
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
        await asyncio.gather(*(sandbox.stop() for sandbox in owned), return_exceptions=True)


def load_class(target: str, option: str) -> Any:
    """The class or function that `_target_` names. Raises ConfigError when there is none."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{option}={target!r} can't be imported: {error}", where=option, remedy="name it as package.module.Class"
        ) from error


def sandbox_maker(env: EnvConfig) -> Callable[[], Sandbox]:
    """A maker of sandboxes of the configured class; each removes what it wrote when it stops."""
    sandbox_class = load_class(env.sandbox._target_, "env.sandbox._target_")
    scratch = Path(env.sandbox.scratch_dir or tempfile.gettempdir())
    scratch.mkdir(parents=True, exist_ok=True)
    return lambda: sandbox_class(env.sandbox, scratch, env.output_limit)


def make_reward(config: Config) -> Callable:
    """The configured reward: a callable from a verdict to its components."""
    return load_class(config.reward._target_, "reward._target_")(scale=config.reward.scale)
