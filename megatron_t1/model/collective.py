"""Ranks that act together: an error of one becomes an error of all, instead of a hang of the others."""

from __future__ import annotations

from collections.abc import Callable
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
