"""Which trajectories are computed together: one global plan for all data-parallel ranks, and mini-batches.

A micro-batch has a hard token capacity. With expert parallelism all ranks wait for each other at every layer, so every
rank gets the same number of micro-batches, and the micro-batches that run at the same time (a slot) should cost the
same. Plans are pure functions of lengths and seed: every rank computes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.errors import ConfigError, T1Error

Item = TypeVar("Item")


@dataclass(frozen=True)
class SequenceCost:
    """Time of one sequence in units of one token's matrix multiplications: length + quadratic * length**2.

    The default quadratic part is that of a dense transformer of hidden size 4096 (attention over the whole sequence
    against 24 * hidden per token); `of_architecture` knows better.
    """

    quadratic: float = 1 / 24576

    @classmethod
    def of_architecture(cls, architecture: ArchitectureConfig) -> SequenceCost:
        """The cost in a given MoE: multiplications of causal attention over those of the parameters a token meets."""
        a = architecture
        query, other = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
        experts = a.num_experts_per_tok * a.moe_intermediate_size + a.shared_expert_intermediate_size
        met = a.hidden_size * (2 * query + 2 * other + 3 * experts + a.num_experts) * a.num_hidden_layers
        # Scores and weighted values, each over half of the sequence on average, in the layers that attend to all of it.
        attended = query * (a.num_hidden_layers // max(1, a.full_attention_interval))
        return cls(attended / met)

    def of(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, np.float64)
        return lengths + self.quadratic * lengths**2


@dataclass(frozen=True)
class MicroBatch:
    """Indices of the sequences computed together. A dummy has none: its rank gets a sequence of zero weight, because it
    has to take part in the collectives of its slot but has nothing left to do."""

    sequences: tuple[int, ...]

    @property
    def is_dummy(self) -> bool:
        return not self.sequences


@dataclass(frozen=True)
class PackingPlan:
    """`ranks[rank][slot]`: the micro-batches of each data-parallel rank, equally many for all.

    Attributes:
        fill: share of the capacity of all real micro-batches that holds tokens.
        imbalance: time of all slots, each as slow as its slowest rank, over the time with perfect balance (>= 1).
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
    fill: float
    imbalance: float

    @property
    def slots(self) -> int:
        return len(self.ranks[0])

    @property
    def bins(self) -> int:
        """Micro-batches over all ranks, dummies included."""
        return self.slots * len(self.ranks)

    def groups(self, rank: int, sequences: Sequence[Item]) -> list[list[Item]]:
        """What stands in each of a rank's micro-batches, of the sequences that were packed; nothing in a dummy."""
        return [[sequences[index] for index in batch.sequences] for batch in self.ranks[rank]]


def plan_packing(
    lengths: Sequence[int],
    *,
    data_parallel: int = 1,
    capacity: int,
    multiple: int = 1,
    cost: SequenceCost | None = None,
    seed: int | None = None,
    names: Sequence[str] | None = None,
) -> PackingPlan:
    """Pack sequences into micro-batches for all data-parallel ranks.

    The number of micro-batches is that of first-fit-decreasing, rounded up to a multiple of `data_parallel`.

    Args:
        lengths: tokens of each sequence.
        capacity: tokens of one micro-batch, padding included: never exceeded.
        multiple: each sequence is padded to this (`TokenLayout.sequence_multiple`).
        seed: order of the slots; None: the costliest first, so that a lack of memory shows at once.
        names: what to call a sequence in an error.

    Raises:
        T1Error: nothing to pack, an empty sequence, or one that exceeds the capacity, which is named (ROLL#298).
        ConfigError: lengths that are no integers; a multiple or data_parallel below 1.
    """
    cost = cost or SequenceCost()
    tokens = _checked(lengths, capacity, multiple, names)
    if data_parallel < 1:
        raise ConfigError(f"data_parallel must be positive, got {data_parallel}")
    costs = cost.of(tokens)
    order = np.lexsort((np.arange(len(tokens)), -tokens))
    packed = _first_fit_decreasing(tokens, order, capacity)
    count = -(-len(packed) // data_parallel) * data_parallel
    bins = (
        _balanced(tokens, costs, order, count, capacity)
        or _levelled(tokens, order, count, capacity)
        or _spread(packed, costs, count)
    )
    return _arrange(bins, tokens, costs, data_parallel, capacity, seed)


def _checked(lengths: Sequence[int], capacity: int, multiple: int, names: Sequence[str] | None) -> np.ndarray:
    raw = np.asarray(lengths)
    if raw.ndim != 1 or len(raw) == 0:
        raise T1Error("there is no sequence to train on", remedy="see why every trajectory was excluded")
    if raw.dtype.kind not in "iu" or multiple < 1:
        raise ConfigError(f"lengths are integers (found {raw.dtype}) and multiple is positive (found {multiple})")
    raw = raw.astype(np.int64)
    tokens = -(-raw // multiple) * multiple
    for problem, wrong in (
        ("has no token", raw < 1),
        (f"exceeds the capacity of {capacity} tokens", tokens > capacity),
    ):
        if wrong.any():
            first = int(wrong.argmax())
            raise T1Error(
                f"sequence {names[first] if names is not None else first} with {raw[first]} tokens "
                f"(padded: {tokens[first]}) {problem}; {int(wrong.sum())} such sequence(s)",
                where="train.capacity",
                remedy="raise train.capacity, or lower rollout.max_context below it",
            )
    return tokens


def _first_fit_decreasing(tokens: np.ndarray, order: np.ndarray, capacity: int) -> list[list[int]]:
    room = np.zeros(len(tokens), np.int64)
    bins: list[list[int]] = []
    for index, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        fits = room[: len(bins)] >= size
        place = int(fits.argmax()) if len(bins) else 0
        if not len(bins) or not fits[place]:
            place = len(bins)
            bins.append([])
            room[place] = capacity
        bins[place].append(index)
        room[place] -= size
    return bins


def _balanced(
    tokens: np.ndarray, costs: np.ndarray, order: np.ndarray, count: int, capacity: int
) -> list[list[int]] | None:
    """`count` bins of like cost: each sequence, longest first, goes to the cheapest bin with room. None: no fit."""
    room = np.full(count, capacity, np.int64)
    load = np.zeros(count)
    bins: list[list[int]] = [[] for _ in range(count)]
    for index, size, price in zip(order.tolist(), tokens[order].tolist(), costs[order].tolist(), strict=True):
        place = int(np.where(room >= size, load, np.inf).argmin())
        if room[place] < size:
            return None
        bins[place].append(index)
        room[place] -= size
        load[place] += price
    return bins


def _levelled(tokens: np.ndarray, order: np.ndarray, count: int, capacity: int) -> list[list[int]] | None:
    """First-fit-decreasing into `count` bins that are all equally full: with a capacity just above the mean fill."""
    mean = tokens.sum() / count
    for slack in (1.001, 1.004):
        lowered = int(np.ceil(mean * slack))
        if tokens.max() <= lowered < capacity:
            bins = _first_fit_decreasing(tokens, order, lowered)
            if len(bins) == count:
                return bins
    return None


def _spread(bins: list[list[int]], costs: np.ndarray, count: int) -> list[list[int]]:
    """Fill up to `count` bins by splitting the costliest one that has more than one sequence."""
    bins = [list(members) for members in bins]
    while len(bins) < count:
        splittable = [number for number, members in enumerate(bins) if len(members) > 1]
        if not splittable:
            bins += [[] for _ in range(count - len(bins))]
            break
        number = max(splittable, key=lambda n: (float(costs[bins[n]].sum()), -n))
        halves: tuple[list[int], list[int]] = ([], [])
        load = [0.0, 0.0]
        for index in sorted(bins[number], key=lambda i: (-costs[i], i)):
            side = 0 if load[0] <= load[1] else 1
            halves[side].append(index)
            load[side] += float(costs[index])
        bins[number] = halves[0]
        bins.append(halves[1])
    return bins


def _arrange(
    bins: list[list[int]], tokens: np.ndarray, costs: np.ndarray, ranks: int, capacity: int, seed: int | None
) -> PackingPlan:
    """Bins of neighbouring cost form a slot; inside it the rank with the least work so far gets the costliest."""
    load = np.array([costs[members].sum() for members in bins])
    by_cost = np.lexsort((np.arange(len(bins)), -load))
    slots = by_cost.reshape(-1, ranks)
    imbalance = float(load[slots].max(axis=1).sum() / load[slots].mean(axis=1).sum())
    if seed is not None:
        slots = slots[np.random.default_rng(seed).permutation(len(slots))]
    plan: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    work = np.zeros(ranks)
    for slot in slots:
        for rank, number in zip(np.argsort(work, kind="stable").tolist(), slot.tolist(), strict=True):
            plan[rank].append(MicroBatch(tuple(sorted(bins[number]))))
            work[rank] += load[number]
    real = sum(1 for members in bins if members)
    fill = float(tokens.sum() / (real * capacity))
    return PackingPlan(tuple(tuple(batches) for batches in plan), fill, imbalance)


def minibatches(count: int, parts: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Split `count` trajectories into `parts` mini-batches (optimizer steps) whose sizes differ by at most one.

    With fewer trajectories than parts there are only as many mini-batches as trajectories: none is empty
    (OpenRLHF#1287).

    Returns:
        int64 index arrays, shuffled by `seed` and `epoch`, sorted inside; together each index exactly once.

    Raises:
        T1Error: no trajectory, or `parts` not positive.
    """
    if count < 1 or parts < 1:
        raise T1Error(f"can't split {count} trajectories into {parts} mini-batches")
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return [np.sort(part) for part in np.array_split(order, min(parts, count))]
