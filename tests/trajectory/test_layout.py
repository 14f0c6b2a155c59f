"""The layout: cutting and reassembling is the identity for every parallel size, against a slow description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.trajectory.layout import TokenLayout

lengths_of = st.lists(st.integers(1, 23), min_size=1, max_size=6)
shapes = st.tuples(
    lengths_of, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([1, 8])
)


def layout_of(shape, context_rank=0, tensor_rank=0):
    lengths, context, tensor, sequence_parallel, multiple = shape
    return TokenLayout(lengths, context, context_rank, tensor, tensor_rank, sequence_parallel, multiple)


def numbered(lengths, trailing=()):
    """Arrays in which every value says where it belongs: 1000 * sequence + position."""
    base = [1000 * (s + 1) + np.arange(length) for s, length in enumerate(lengths)]
    return [np.broadcast_to(a.reshape(-1, *[1] * len(trailing)), (len(a), *trailing)).copy() for a in base]


def slow_local(layout, arrays, fill):
    """The definition: pad each sequence, cut it into 2c chunks, take chunks r and 2c-1-r."""
    out = []
    for array, padded in zip(arrays, layout.padded_lengths, strict=True):
        full = np.concatenate([array, np.full((padded - len(array), *array.shape[1:]), fill, array.dtype)])
        if layout.context_size == 1:
            out.append(full)
        else:
            chunks = np.split(full, 2 * layout.context_size)
            out += [chunks[layout.context_rank], chunks[2 * layout.context_size - 1 - layout.context_rank]]
    return np.concatenate(out)


@given(shapes, st.sampled_from([(), (3, 2)]))
@settings(max_examples=150, deadline=None)
def test_cutting_follows_the_definition_and_reassembles_to_the_same(shape, trailing):
    arrays = numbered(shape[0], trailing)
    pieces = []
    for rank in range(shape[1]):
        layout = layout_of(shape, rank)
        piece = layout.local(arrays, -1)
        assert np.array_equal(piece, slow_local(layout, arrays, -1))
        slices = [layout.at(context_rank=rank, tensor_rank=q).sequence_parallel_rows(piece) for q in range(shape[2])]
        if shape[3]:
            assert np.array_equal(np.concatenate(slices), piece) and len({len(part) for part in slices}) == 1
        else:
            assert all(part is piece for part in slices)
        pieces.append(piece)
    for found, expected in zip(layout_of(shape).scatter(pieces), arrays, strict=True):
        assert np.array_equal(found, expected)


@given(shapes)
@settings(max_examples=100, deadline=None)
def test_every_field_agrees_about_the_place_of_a_token(shape):
    seen = []
    for rank in range(shape[1]):
        layout = layout_of(shape, rank)
        values = layout.local(numbered(shape[0]), 0)
        assert np.array_equal(layout.is_padding, values == 0)
        real = ~layout.is_padding
        assert np.array_equal(values[real], (1000 * (layout.sequence_ids + 1) + layout.position_ids)[real])
        assert len(values) == layout.local_total == layout.total // shape[1]
        seen += values[real].tolist()
    assert sorted(seen) == sorted(np.concatenate(numbered(shape[0])).tolist())


@given(shapes)
@settings(max_examples=100, deadline=None)
def test_totals_meet_the_multiples_without_waste(shape):
    lengths, context, tensor, sequence_parallel, multiple = shape
    layout = layout_of(shape)
    per_sequence = 2 * context if context > 1 else 1
    padded = layout.padded_lengths
    assert np.array_equal(np.diff(layout.cu_seqlens), padded) and layout.cu_seqlens.dtype == np.int32
    assert layout.cu_seqlens[-1] == layout.total and layout.max_seqlen == padded.max()
    assert np.all(padded % per_sequence == 0) and np.all(padded >= lengths)
    assert np.all(padded[:-1] - np.array(lengths[:-1], int) < per_sequence)
    assert layout.total % multiple == 0
    if sequence_parallel:
        assert layout.local_total % tensor == 0
    if context == 1 and not (sequence_parallel and tensor > 1) and multiple == 1:
        assert layout.total == sum(lengths)  # SkyRL#292: packed storage, no padding to the longest


@given(shapes)
@settings(max_examples=100, deadline=None)
def test_what_is_read_one_position_early_comes_back_to_its_token(shape):
    arrays = [array.astype(np.float32) for array in numbered(shape[0])]
    ranks = [layout_of(shape, rank) for rank in range(shape[1])]
    pieces = [layout.local(layout.shift(arrays, np.nan), np.nan) for layout in ranks]
    for found, expected in zip(ranks[0].scatter(pieces, shifted=True), arrays, strict=True):
        assert np.isnan(found[0]) and np.array_equal(found[1:], expected[1:])


def test_shift_by_example():
    layout = TokenLayout([3, 2])
    ids = [np.array([10, 11, 12]), np.array([20, 21])]
    assert layout.local(ids, 0).tolist() == [10, 11, 12, 20, 21]
    assert layout.local(layout.shift(ids, -1), -1).tolist() == [11, 12, -1, 21, -1]
    assert ids[0].tolist() == [10, 11, 12]


def test_zigzag_by_example():
    layout = TokenLayout([7, 2], context_size=2, context_rank=1)
    assert layout.padded_lengths.tolist() == [8, 4]
    assert layout.local([np.arange(1, 8), np.array([21, 22])], 0).tolist() == [3, 4, 5, 6, 22, 0]
    assert layout.position_ids.tolist() == [2, 3, 4, 5, 1, 2]


def test_small_dtypes_stay_small():  # SkyRL#1910
    layout = TokenLayout([5, 3], context_size=2)
    routes = [np.ones((5, 4, 2), np.uint8), np.ones((3, 4, 2), np.uint8)]
    assert layout.local(routes, 0).dtype == np.uint8


def test_fill_can_be_a_row():
    layout = TokenLayout([1, 1], context_size=2)
    rows = layout.local([np.full((1, 2), 9), np.full((1, 2), 9)], np.array([4, 5]))
    assert rows.tolist() == [[9, 9], [4, 5], [9, 9], [4, 5]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"lengths": []},
        {"lengths": [3, 0]},
        {"lengths": [3], "context_size": 2, "context_rank": 2},
        {"lengths": [3], "total_multiple": 0},
    ],
)
def test_impossible_layouts_are_refused(arguments):
    with pytest.raises(ValueError):
        TokenLayout(**arguments)


def test_arrays_of_another_micro_batch_are_refused():
    layout = TokenLayout([3, 2])
    with pytest.raises(ValueError, match=r"\[3, 3\] rows"):
        layout.local([np.zeros(3), np.zeros(3)], 0)
    with pytest.raises(ValueError, match="expected 1 piece"):
        layout.scatter([np.zeros(4)])


@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 4])
def test_context_order_is_the_one_megatron_rotates_by(context):
    rope = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    torch = pytest.importorskip("torch")
    lengths = [13, 8, 1]
    for rank in range(context):
        layout = TokenLayout(lengths, context_size=context, context_rank=rank)
        theirs = []
        for padded in layout.padded_lengths.tolist():
            rows, positions = torch.empty(padded // context), torch.arange(padded)
            theirs += rope._get_thd_freqs_on_this_cp_rank(rank, context, rows, positions).tolist()
        assert layout.position_ids.tolist() == theirs
