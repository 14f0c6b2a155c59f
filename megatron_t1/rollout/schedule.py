"""Which tasks an iteration plays: a function of seed, iteration and task names, so that a restart plays the same."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megatron_t1.errors import T1Error

Item = TypeVar("Item")
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # its fraction, times 2**64


def tasks_of_iteration(
    sources: Sequence[tuple[Sequence[str], float]], *, seed: int, iteration: int, count: int
) -> list[str]:
    """The `count` tasks of an iteration, from sources by their weights.

    Each source is a walk through shuffled epochs, in which every task comes once. Which source comes next is a low
    discrepancy sequence, so that every stretch of it holds the weights' shares, to about one task. All positions follow
    from `iteration * count`; no cursor is stored (slime#2236).

    Args:
        sources: (names of its tasks, in any order; weight > 0) of each.

    Raises:
        T1Error: a source has no task, or a weight that is not a positive number.
    """
    if not sources or not all(names for names, _ in sources):
        raise T1Error("there is no task to play", where="env.tasks", remedy="generate tasks with `t1 tasks generate`")
    odd = [weight for _, weight in sources if not 0 < weight < math.inf]
    if odd:
        raise T1Error(
            f"a source's weight is {odd[0]}, not a positive number", where="env.weights", remedy="give 1 to each source"
        )
    start = iteration * count
    owners = _owners([weight for _, weight in sources], seed, start + count)
    walks = [
        iter(_walk(names, seed, int((owners[:start] == number).sum()), int((owners[start:] == number).sum())))
        for number, (names, _) in enumerate(sources)
    ]
    return [next(walks[owner]) for owner in owners[start:]]


def _owners(weights: Sequence[float], seed: int, count: int) -> np.ndarray:
    """int64 [count]: which source each position of the run's sequence takes, by Weyl's golden ratio sequence."""
    offset = int(np.random.default_rng([seed, len(weights)]).integers(2**63))
    positions = np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN_RATIO) + np.uint64(offset)  # modulo 2**64
    relative = np.asarray(weights) / np.max(weights)  # so that no sum overflows
    shares = np.cumsum(relative) / np.sum(relative)
    return np.searchsorted(shares[:-1], (positions >> np.uint64(11)) / 2.0**53, side="right")


def _walk(names: Sequence[str], seed: int, position: int, count: int) -> list[str]:
    ordered = sorted(names)
    chosen: list[str] = []
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
