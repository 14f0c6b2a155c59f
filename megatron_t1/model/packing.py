"""How the Hugging Face tensors of one Megatron parameter are cut over tensor-parallel ranks and laid out in it.

Every packing works in both directions and reads only the slices its rank holds. `size` ranks are the tensor-parallel
ones, or the expert-tensor-parallel ones for experts. Shapes and shares need no torch.

Shapes: H hidden, A query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Read = Callable[[int, int, int, int], "Tensor"]  # (tensor of the parameter, dimension, first, last) -> slice


class Packing(Protocol):
    """The rules of one parameter."""

    @property
    def shapes(self) -> list[Shape]:
        """Full shapes of the Hugging Face tensors, in the order of the table."""

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        """The parameter of rank `rank` of `size`."""

    def unpack(self, shards: list[Tensor]) -> list[list[Tensor]]:
        """The Hugging Face tensors, each as consecutive blocks of rows, from the parameters of all ranks in rank order.

        Blocks are views where the layout allows it: a vocabulary of gigabytes isn't put together in memory.
        """

    def share(self, rank: int, size: int) -> Fraction:
        """What part of its tensors a rank answers for; of `size` ranks the shares add up to 1."""


@dataclass(frozen=True)
class Whole:
    """The same on every rank (norms, router).

    Attributes:
        offset: added to the stored numbers, taken off again at export, both in fp32. -1 for a norm that is stored as w
            and computed as 1 + w. Exact both ways for stored numbers of at least 0.5; `load_hf` counts the others.
    """

    shape: Shape
    offset: float = 0.0

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        value = read(0, 0, 0, self.shape[0])
        return value.float() + self.offset if self.offset else value

    def unpack(self, shards: list[Tensor]) -> list[list[Tensor]]:
        return [[shards[0].float() - self.offset if self.offset else shards[0]]]

    def share(self, rank: int, size: int) -> Fraction:
        return Fraction(rank == 0)


@dataclass(frozen=True)
class Rows:
    """Cut along dimension 0, padded with zero rows so that every rank has the same number (embedding, output).

    Attributes:
        padded: rows of all ranks together; 0: as few as the ranks allow.
    """

    shape: Shape
    padded: int = 0

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape]

    def _range(self, rank: int, size: int) -> tuple[int, int, int]:
        """(rows of every rank, first and last row of the tensor that this rank has)."""
        rows = -(-max(self.shape[0], self.padded) // size)
        return rows, min(rank * rows, self.shape[0]), min((rank + 1) * rows, self.shape[0])

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        rows, first, last = self._range(rank, size)
        part = read(0, 0, first, last)
        if len(part) == rows:
            return part
        return _joined([part, part.new_zeros(rows - len(part), *self.shape[1:])])

    def unpack(self, shards: list[Tensor]) -> list[list[Tensor]]:
        left, blocks = self.shape[0], []
        for shard in shards:
            blocks.append(shard[:left])
            left -= len(blocks[-1])
        return [blocks]

    def share(self, rank: int, size: int) -> Fraction:
        _, first, last = self._range(rank, size)
        return Fraction(last - first, self.shape[0])


@dataclass(frozen=True)
class Columns:
    """Cut along dimension 1 (attention output, expert down projection)."""

    shape: Shape

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        columns = self.shape[1] // size
        return read(0, 1, rank * columns, (rank + 1) * columns)

    def unpack(self, shards: list[Tensor]) -> list[list[Tensor]]:
        return [[shards[0] if len(shards) == 1 else _joined(shards, dim=1)]]

    def share(self, rank: int, size: int) -> Fraction:
        return Fraction(1, size)


@dataclass(frozen=True)
class Stacked:
    """Sections stacked along dimension 0, each of which is cut over the ranks, so that a rank has a part of every one.

    Attributes:
        sections: rows of each section, grouped by the tensor they are stored in: ((I,), (I,)) is gate over up of an
            expert in two tensors, ((I, I),) the same in one.
        tail: the other dimensions, alike in all tensors.
    """

    sections: tuple[tuple[int, ...], ...]
    tail: Shape

    @property
    def shapes(self) -> list[Shape]:
        return [(sum(rows), *self.tail) for rows in self.sections]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        parts = []
        for tensor, sections in enumerate(self.sections):
            start = 0
            for rows in sections:
                first = start + rank * (rows // size)
                parts.append(read(tensor, 0, first, first + rows // size))
                start += rows
        return _joined(parts)

    def unpack(self, shards: list[Tensor]) -> list[list[Tensor]]:
        local = [rows // len(shards) for sections in self.sections for rows in sections]
        of_ranks = [shard.split(local) for shard in shards]
        whole = iter(zip(*of_ranks, strict=True))  # of each section, the ranks' parts
        return [[part for _ in sections for part in next(whole)] for sections in self.sections]

    def share(self, rank: int, size: int) -> Fraction:
        return Fraction(1, size)


@dataclass(frozen=True)
class GroupedQkv:
    """q [A*D, H], k [G*D, H], v [G*D, H], with one group of query heads for each key/value head.

    In Megatron: [q heads of group 0 | k 0 | v 0 | q heads of group 1 ...], cut into equal rows; with more ranks than
    groups a rank holds a part of a group.

    Attributes:
        gated: q is [A*2*D, H], for each head its query over its output gate; in Megatron the gates of a group follow
            its queries: [q heads | gates of these heads | k | v].
    """

    heads: int
    groups: int
    head_dim: int
    hidden: int
    gated: bool = False

    @property
    def shapes(self) -> list[Shape]:
        query = self.heads * (2 if self.gated else 1)
        return [(count * self.head_dim, self.hidden) for count in (query, self.groups, self.groups)]

    @property
    def _rows(self) -> list[int]:
        """Rows of q (with gates), k and v in one group."""
        return [shape[0] // self.groups for shape in self.shapes]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        in_group = sum(self._rows)
        rows = self.groups * in_group // size
        first_group, last_group = rank * rows // in_group, -(-(rank + 1) * rows // in_group)
        count, parts = last_group - first_group, []
        for tensor, part_rows in enumerate(self._rows):
            part = read(tensor, 0, first_group * part_rows, last_group * part_rows)
            parts.append(part.reshape(count, part_rows, self.hidden))
        if self.gated:
            parts[0] = self._exchange(parts[0], (self.heads // self.groups, 2))
        packed = _joined(parts, dim=1).reshape(-1, self.hidden)
        start = rank * rows - first_group * in_group
        return packed[start : start + rows]

    def unpack(self, shards: list[Tensor]) -> list[list[Tensor]]:
        whole = shards[0] if len(shards) == 1 else _joined(shards)
        grouped = whole.reshape(self.groups, sum(self._rows), self.hidden)
        query, key, value = grouped.split(self._rows, dim=1)
        if self.gated:
            query = self._exchange(query, (2, self.heads // self.groups))
        return [[part.reshape(-1, self.hidden)] for part in (query, key, value)]

    def share(self, rank: int, size: int) -> Fraction:
        return Fraction(1, size)

    def _exchange(self, query: Tensor, outer: tuple[int, int]) -> Tensor:
        """[groups, a*b*D, H] with dimensions a and b, given as `outer`, exchanged."""
        parts = query.reshape(len(query), *outer, self.head_dim, self.hidden).transpose(1, 2)
        return parts.reshape(len(query), -1, self.hidden)


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(parts, dim=dim)


def divides(packing: Packing, size: int) -> bool:
    """Whether `size` ranks can share the parameter."""
    match packing:
        case Columns():
            return packing.shape[1] % size == 0
        case Stacked():
            return all(rows % size == 0 for sections in packing.sections for rows in sections)
        case GroupedQkv():
            in_groups = packing.groups % size == 0 or size % packing.groups == 0
            return in_groups and sum(rows for rows, _ in packing.shapes) % size == 0
        case _:
            return True
