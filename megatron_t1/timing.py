"""Where the time of a phase goes: seconds by name, added up over its passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the body to `seconds[name]`, also when it raises.

    What a GPU computes is waited for where a number is read, so there a name has the time of the thread that asks.
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
