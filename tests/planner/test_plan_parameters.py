"""Parameters and bytes by arithmetic: the 122B's published numbers, and what must hold for any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.config.compose import compose
from megatron_t1.config.schema import LayoutConfig
from megatron_t1.planner.parameters import (
    Chunk,
    active_parameters,
    chunk_parameters,
    chunks_of,
    place_of,
    rank_bytes,
    total_parameters,
)
from tests.tiny_model import ARCHITECTURE

GIB = 2**30
LARGE = compose(["experiment=ppo_122b"]).model.architecture


def test_the_122b_has_the_parameters_its_name_says():
    assert total_parameters(LARGE) == 122_111_526_912
    critic = total_parameters(LARGE, "value")
    assert total_parameters(LARGE) - critic == LARGE.vocab_size * LARGE.hidden_size - LARGE.hidden_size - 1
    assert active_parameters(LARGE) + LARGE.vocab_size * LARGE.hidden_size == pytest.approx(9.77e9, rel=1e-3)


@pytest.mark.parametrize(
    "sizes, ends, inner",
    [  # GiB of first and last, and of the other stages: from real DDP buffers and optimizer shards on the meta device
        ((48, 2, 6, 8, 1), 46.95, 43.75),
        ((64, 2, 4, 16, 8), 37.11, 34.44),
        ((128, 2, 4, 32, 8), 21.25, None),
        ((256, 2, 4, 32, 8), 15.85, None),
    ],
)
def test_bytes_of_the_122b_are_those_of_built_ranks(sizes, ends, inner):
    processes, tensor, pipeline, expert, context = sizes
    layout = LayoutConfig(
        processes=processes,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        context=context,
        distributed_optimizer=True,
    )
    per_stage = processes // pipeline
    found = [
        rank_bytes(LARGE, layout, "bfloat16", "policy", stage * per_stage).static_bytes / GIB
        for stage in range(pipeline)
    ]
    assert found[0] == pytest.approx(ends, abs=0.006) and found[-1] == pytest.approx(ends, abs=0.006)
    if inner is not None:
        assert found[1:-1] == pytest.approx([inner] * (pipeline - 2), abs=0.006)


@st.composite
def layouts(draw):
    tensor, context, expert = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2), (1, 2, 4)))
    pipeline, virtual = draw(st.sampled_from(((1, 1), (2, 1), (2, 2), (4, 1))))
    data = draw(st.sampled_from((1, 2, 3, 4)))
    replicas = tensor * context * data
    while replicas % expert:
        replicas *= 2
    return LayoutConfig(
        processes=replicas * pipeline, tensor=tensor, context=context, expert=expert, pipeline=pipeline,
        virtual_pipeline=virtual, expert_tensor=tensor if expert == 1 else 1, distributed_optimizer=draw(st.booleans()),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from(("policy", "value")), st.sampled_from(("float32", "bfloat16")))
def test_ranks_together_hold_the_model(layout, role, dtype):
    """Every stage's chunks cover the layers once; shards of the optimizer add up to every parameter of the ranks."""
    a = replace(ARCHITECTURE, vocab_size=68)
    layers = [
        layer for stage in range(layout.pipeline) for chunk in chunks_of(a, layout, stage) for layer in chunk.layers
    ]
    assert sorted(layers) == list(range(a.num_hidden_layers))
    ranks = [rank_bytes(a, layout, dtype, role, rank) for rank in range(layout.processes)]
    per_number = 8 if dtype == "float32" else 12
    for stage in range(layout.pipeline):
        inside = [each for each in ranks if place_of(layout, each.rank).stage == stage]
        optimizer = sum(each.optimizer_bytes for each in inside)
        if layout.distributed_optimizer:
            dense = inside[0].dense_parameters * layout.tensor
            experts = inside[0].expert_parameters * layout.expert * layout.expert_tensor
            assert optimizer == per_number * (dense + experts)
        else:
            assert optimizer == per_number * sum(each.parameters for each in inside)
        assert len({each.weight_bytes for each in inside}) == 1
        assert inside[0].gradient_bytes >= 4 * inside[0].parameters


def test_splitting_a_model_over_tensor_ranks_loses_nothing():
    whole = Chunk(range(4), True, True)
    sizes = {}
    for tensor in (1, 2):
        layout = LayoutConfig(processes=2, tensor=tensor, expert=1, expert_tensor=tensor)
        found = list(chunk_parameters(replace(LARGE, num_hidden_layers=4), layout, "policy", whole))
        sizes[tensor] = {each.name: each.size for each in found}
    copied = {name for name, size in sizes[1].items() if sizes[2][name] == size}
    assert all("norm" in name or "router" in name or "gate_weight" in name for name in copied)
    assert all(sizes[2][name] * 2 == size for name, size in sizes[1].items() if name not in copied)
