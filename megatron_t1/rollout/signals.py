"""An event loop that ends by a signal that asks to stop: all is cancelled and cleaned up, and one error says so."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from megatron_t1.errors import T1Error
from megatron_t1.processes import stop_signal_numbers

Result = TypeVar("Result")


def run_until_signal(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run(main)`. Raises T1Error when a signal ended it; a second signal changes nothing."""
    received: list[signal.Signals] = []

    async def guarded() -> Result:
        task = asyncio.current_task()

        def stop(number: signal.Signals) -> None:
            if not received:
                task.cancel()
            received.append(number)

        with _handling(stop):
            return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
    raise T1Error(
        f"stopped by {received[0].name}; finished trajectories are kept", remedy="start the phase again to go on"
    )


@contextlib.contextmanager
def _handling(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handled = []
    for number in stop_signal_numbers():
        with contextlib.suppress(ValueError, RuntimeError):  # outside the main thread there are no handlers
            loop.add_signal_handler(number, stop, number)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
