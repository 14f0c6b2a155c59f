"""Which tasks an iteration plays: a function of seed, iteration and task names, so that a restart plays the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megatron_t1.errors import T1Error

Item = TypeVar("Item")


def tasks_of_iteration(names: Sequence[str], *, seed: int, iteration: int, count: int) -> list[str]:
    """The `count` tasks of an iteration: a walk through shuffled epochs, in which every task comes once.

    The position in the walk is `iteration * count`, never a stored cursor (slime#2236).

    Args:
        names: of all tasks; their order doesn't matter.

    Raises:
        T1Error: there is no task.
    """
    ordered = sorted(names)
    if not ordered:
        raise T1Error("there is no task to play", where="env.tasks", remedy="generate tasks with `t1 tasks generate`")
    chosen: list[str] = []
    position = iteration * count
    while len(chosen) < count:
        epoch, offset = divmod(position, len(ordered))
        order = np.random.default_rng([seed, epoch]).permutation(len(ordered))
        taken = order[offset : offset + count - len(chosen)]
        chosen += [ordered[index] for index in taken]
        position += len(taken)
    return chosen


def attempts_of(chosen: Sequence[str], samples_per_task: int) -> list[tuple[str, int]]:
    """(task, attempt) pairs; a task that was chosen twice gets further attempt numbers."""
    seen: Counter[str] = Counter()
    pairs = []
    for name in chosen:
        pairs += [(name, seen[name] + sample) for sample in range(samples_per_task)]
        seen[name] += samples_per_task
    return pairs


def share(items: Sequence[Item], rank: int, world_size: int) -> list[Item]:
    """What worker `rank` of `world_size` plays."""
    if not 0 <= rank < world_size:
        raise T1Error(f"worker {rank} of {world_size} doesn't exist", remedy="check RANK and WORLD_SIZE")
    return list(items[rank::world_size])


def turn_seed(run_seed: int, trajectory: str, turn: int) -> int:
    """Sampling seed of one turn, below 2**63."""
    digest = hashlib.sha256(f"{run_seed}/{trajectory}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
