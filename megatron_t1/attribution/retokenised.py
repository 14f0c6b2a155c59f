"""The stream that decoding, parsing, rendering and encoding again would have made of a trajectory, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_t1.audit.baseline import rerendered
from megatron_t1.audit.compare import align
from megatron_t1.rollout.formats import ChatFormat
from megatron_t1.trajectory.record import Trajectory


@dataclass(frozen=True)
class Retokenised:
    """A re-rendered stream of T' tokens.

    Attributes:
        ids: int32 [T'].
        source: int64 [T'], position in the record of the same token, -1 for tokens that only this stream has.
    """

    ids: np.ndarray
    source: np.ndarray

    def counterparts(self, length: int) -> np.ndarray:
        """int64 [length]: position in this stream of each token of the record, -1 where it has none."""
        found = np.full(length, -1, np.int64)
        known = self.source >= 0
        found[self.source[known]] = np.flatnonzero(known)
        return found


def retokenise(trajectory: Trajectory, chat: ChatFormat) -> Retokenised | None:
    """The re-rendered stream; None where every id comes out as it was.

    Spans of one length correspond place by place where their ids are equal; of others, the longest common prefix and
    then suffix do.
    """
    ids, sources = [], []
    for span, again in rerendered(trajectory, chat):
        before = trajectory.ids[span.start : span.stop]
        source = np.full(len(again), -1, np.int64)
        here, there = align(again, before).pairs(len(again), len(before))
        same = again[here] == before[there]
        source[here[same]] = span.start + there[same]
        ids.append(again)
        sources.append(source)
    joined = np.concatenate(ids).astype(np.int32)
    if np.array_equal(joined, trajectory.ids):
        return None
    return Retokenised(joined, np.concatenate(sources))
