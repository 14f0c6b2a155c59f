"""A checkout pads its vocabulary further than the ranks need (--make-vocab-size-divisible-by)."""

from __future__ import annotations

import torch

from megatron_t1.model.mapping import Rows


def test_padded_rows_are_zero_and_dropped_again():
    full = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3) + 1
    rows = Rows((7, 3), padded=16)
    shards = [rows.pack(lambda part, dim, first, last: full[first:last], rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [4, 4, 4, 4]
    assert torch.equal(torch.cat(shards)[:7], full) and not torch.cat(shards)[7:].any()
    (blocks,) = rows.unpack(shards)
    assert torch.equal(torch.cat(blocks), full)
    assert len(Rows((7, 3)).pack(lambda part, dim, first, last: full[first:last], 1, 4)) == 2
