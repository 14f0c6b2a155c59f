"""Where every token of a micro-batch is: packing, padding, context-parallel order, sequence-parallel split, shift.

Ids, masks, log-probs, values, advantages and routes of a micro-batch are all cut by one `TokenLayout`, so that they
can't disagree about the place of a token. Everything is numpy; arrays enter as one per sequence and are never padded
to the longest one.

    stream of the micro-batch   | sequence 0 . pad | sequence 1 . pad |      `total` positions
    context rank r of c         each sequence is cut into 2c equal chunks; the rank has chunks r and 2c-1-r (zig-zag:
                                every rank gets an early and a late one, so that causal attention costs the same)
    tensor rank q of t          with sequence parallelism the rank's router sees the q-th of t equal slices of that

Padding follows its own sequence, where causal attention keeps it from being seen by real tokens. What is still
missing to a multiple the parallel sizes need is added to the last sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class TokenLayout:
    """The layout of one micro-batch, as seen by one rank.

    Args:
        lengths: tokens of each sequence, at least 1 each.
        context_size, context_rank: context parallelism.
        tensor_size, tensor_rank: tensor parallelism; matters only with `sequence_parallel`.
        total_multiple: `total` is also a multiple of this (fixed-shape kernels).

    Raises:
        ValueError: no sequence, an empty one, or a rank outside its size.
    """

    lengths: tuple[int, ...]
    context_size: int = 1
    context_rank: int = 0
    tensor_size: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False
    total_multiple: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(int(length) for length in self.lengths))
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a micro-batch needs sequences of at least one token, got lengths {list(self.lengths)}")
        for name in ("context", "tensor"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank {rank} isn't in 0..{size - 1}")
        if self.total_multiple < 1:
            raise ValueError(f"total_multiple must be positive, got {self.total_multiple}")

    def at(self, *, context_rank: int = 0, tensor_rank: int = 0) -> TokenLayout:
        """The same micro-batch as another rank sees it."""
        return replace(self, context_rank=context_rank, tensor_rank=tensor_rank)

    @staticmethod
    def sequence_multiple(context_size: int) -> int:
        """What each sequence is padded to a multiple of."""
        return 2 * context_size if context_size > 1 else 1

    @cached_property
    def padded_lengths(self) -> np.ndarray:
        """int64 [S]: positions each sequence takes."""
        multiple = self.sequence_multiple(self.context_size)
        padded = -(-np.asarray(self.lengths, np.int64) // multiple) * multiple
        slices = self.context_size * (self.tensor_size if self.sequence_parallel else 1)
        needed = math.lcm(multiple, slices, self.total_multiple)
        padded[-1] += -padded.sum() % needed
        return padded

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """int32 [S+1]: where each sequence starts in the whole stream, padding included, over all context ranks."""
        return np.concatenate([[0], np.cumsum(self.padded_lengths)]).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        return int(self.padded_lengths.max())

    @property
    def total(self) -> int:
        """Positions of the whole stream, over all context ranks."""
        return int(self.padded_lengths.sum())

    @property
    def local_total(self) -> int:
        """Positions of this context rank."""
        return self.total // self.context_size

    @cached_property
    def _chunks(self) -> list[tuple[int, int, int, int]]:
        """(sequence, first position in it, first local position, positions) of what this context rank holds."""
        chunks, local = [], 0
        halves = [(0, 1)] if self.context_size == 1 else [(self.context_rank, 2), (-1 - self.context_rank, 2)]
        for sequence, padded in enumerate(self.padded_lengths.tolist()):
            for half, parts in halves:
                size = padded // (parts * self.context_size)
                start = (half % (parts * self.context_size)) * size
                chunks.append((sequence, start, local, size))
                local += size
        return chunks

    def local(self, arrays: Sequence[np.ndarray], fill) -> np.ndarray:
        """Cut one token-aligned field to this context rank.

        Args:
            arrays: one [length, ...] array for each sequence, of one dtype and trailing shape.
            fill: value of padding positions; broadcast over the trailing shape.

        Returns:
            [local_total, ...], a new array.

        Raises:
            ValueError: another number of arrays or rows than the layout has.
        """
        self._check(arrays)
        out = np.empty((self.local_total, *arrays[0].shape[1:]), arrays[0].dtype)
        for sequence, start, local, size in self._chunks:
            piece = arrays[sequence][start : start + size]
            out[local : local + len(piece)] = piece
            out[local + len(piece) : local + size] = fill
        return out

    def sequence_parallel_rows(self, local: np.ndarray) -> np.ndarray:
        """The rows of `local` [local_total, ...] that this tensor rank's router sees (a view); all without SP."""
        if not self.sequence_parallel:
            return local
        rows = self.local_total // self.tensor_size
        return local[self.tensor_rank * rows : (self.tensor_rank + 1) * rows]

    @cached_property
    def position_ids(self) -> np.ndarray:
        """int64 [local_total]: position of each token in its own sequence; padding counts on."""
        return np.concatenate([np.arange(start, start + size) for _, start, _, size in self._chunks])

    @cached_property
    def sequence_ids(self) -> np.ndarray:
        """int64 [local_total]: which sequence each position belongs to."""
        return np.repeat([chunk[0] for chunk in self._chunks], [chunk[3] for chunk in self._chunks])

    @cached_property
    def is_padding(self) -> np.ndarray:
        """bool [local_total]."""
        return self.position_ids >= np.asarray(self.lengths)[self.sequence_ids]

    def shift(self, arrays: Sequence[np.ndarray], fill) -> list[np.ndarray]:
        """Move every row to the position it is predicted at: row p becomes that of token p+1 of the same sequence.

        The log-prob and the value of token t are read at position t-1. What is shifted (targets, masks, advantages,
        sampler log-probs) then aligns with what the model puts out; the last position of a sequence gets `fill`. Cut
        after shifting: across context ranks the next token often lies on another rank.
        """
        self._check(arrays)
        shifted = []
        for array in arrays:
            moved = np.empty_like(array)
            moved[:-1] = array[1:]
            moved[-1] = fill
            shifted.append(moved)
        return shifted

    def scatter(self, pieces: Sequence[np.ndarray], *, shifted: bool = False, fill=np.nan) -> list[np.ndarray]:
        """Undo `local`: put the [local_total, ...] pieces of all context ranks, in rank order, back into sequences.

        Args:
            pieces: one array for each context rank (without context parallelism: a list of one).
            shifted: also undo `shift`: row t of the result was read at position t-1, row 0 becomes `fill`.

        Returns:
            one [length, ...] array for each sequence; padding is dropped.
        """
        if len(pieces) != self.context_size or any(len(piece) != self.local_total for piece in pieces):
            found = [len(piece) for piece in pieces]
            raise ValueError(f"expected {self.context_size} piece(s) of {self.local_total} rows, got {found}")
        out = [np.empty((length, *pieces[0].shape[1:]), pieces[0].dtype) for length in self.lengths]
        for rank, piece in enumerate(pieces):
            for sequence, start, local, size in self.at(context_rank=rank)._chunks:
                first = start + (1 if shifted else 0)
                target = out[sequence][first : first + size]
                target[:] = piece[local : local + len(target)]
        if shifted:
            for array in out:
                array[0] = fill
        return out

    def _check(self, arrays: Sequence[np.ndarray]) -> None:
        found = tuple(len(array) for array in arrays)
        if found != self.lengths:
            raise ValueError(f"the arrays have {list(found)} rows, the sequences {list(self.lengths)} tokens")
