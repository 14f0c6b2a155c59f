"""Ranks that act together: an error of one becomes an error of all, instead of a hang of the others."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron_t1.errors import T1Error

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def together(action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return all results in rank order.

    The action may use collectives only if it can't fail between them on some ranks alone.

    Raises:
        T1Error: the error of the lowest rank that failed, on every rank.
    """
    failure: BaseException | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    shared = (
        failure if failure is None or isinstance(failure, T1Error) else T1Error(f"{type(failure).__name__}: {failure}")
    )
    for rank, (error, _) in enumerate(outcomes := gather_objects((shared, result))):
        if error is None:
            continue
        if failure is not None:
            raise failure
        raise type(error)(f"rank {rank} failed: {error.problem}", where=error.where, remedy=error.remedy)
    return [value for _, value in outcomes]  # type: ignore[misc]


def on_first_rank(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; its failure is everybody's."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    together(action if rank == 0 else lambda: None)


# What gloo, NCCL and torch's store say when the other side of a connection is gone, or doesn't answer in time.
_GONE = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Connection was likely closed|Connection refused|"
    "remote process exited|ncclRemoteError|Socket (?:closed|Timeout)|Network error"
)
_TOO_LATE = re.compile(
    "Timed out waiting|timed out after|wait timeout after|operation timeout|collective timeout|"
    "timeout caused pair closure"
)
_MADE_OF_ANOTHER = re.compile(r"^(?:rank \d+ failed: )?(?:RuntimeError|Dist\w*Error): ")
_KEY = "t1/waits/"


def lost_others(error: BaseException) -> str:
    """Whether an error only says that other ranks are "gone" or came "late"; "" for any other.

    A T1Error speaks for itself, but for one that `together` made of another error.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, T1Error) and not _MADE_OF_ANOTHER.search(seen.problem):
            return ""
        if isinstance(seen, RuntimeError | T1Error):
            if _TOO_LATE.search(str(seen)):
                return "late"
            if _GONE.search(str(seen)):
                return "gone"
        seen = seen.__cause__ or seen.__context__
    return ""


def ranks_that_never_came(patience_s: float = 5.0) -> list[int] | None:
    """After a collective that timed out: the ranks that don't wait in vain too; None where they can't be asked."""
    found: list[list[int]] = []

    def ask() -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=patience_s))
        store.set(f"{_KEY}{dist.get_rank()}", b"1")
        deadline = time.monotonic() + patience_s
        while True:
            late = [rank for rank in range(dist.get_world_size()) if not store.check([f"{_KEY}{rank}"])]
            if not late or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        found.append(late)

    asking = threading.Thread(target=_quietly, args=(ask,), daemon=True)  # a store in a stopped process never answers
    asking.start()
    asking.join(2 * patience_s)
    return found[0] if found else None


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        return
