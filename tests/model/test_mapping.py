"""The tables of both families and the packings, in one process: ranks are visited one after another."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.model.mapping import WeightMapping
from megatron_t1.model.names import CheckpointNames, names_in
from megatron_t1.model.packing import Columns, GroupedQkv, Rows, Stacked, Whole
from tests.hybrid_model import HYBRID

NAMES = [CheckpointNames(prefix, fused) for prefix in ("model.", "model.language_model.") for fused in (False, True)]


def reader(tensors, slot=None):
    def read(part, dimension, first, last):
        tensor = tensors[part] if slot is None else tensors[part][slot]
        return tensor.narrow(dimension, first, last - first)

    return read


packings = st.one_of(
    st.builds(Rows, st.tuples(st.integers(1, 9), st.just(2)), st.sampled_from([0, 12])),
    st.builds(Columns, st.tuples(st.just(3), st.sampled_from([4, 8]))),
    st.builds(Whole, st.tuples(st.integers(1, 5), st.just(2))),
    st.builds(Stacked, st.sampled_from([((4, 8, 4), (8,), (4,)), ((4, 4),), ((8,), (8,)), ((4,),)]), st.just((3,))),
    st.builds(Stacked, st.just(((4,),)), st.just(())),
    st.builds(GroupedQkv, st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]), st.just(8), st.just(3), st.booleans()),
)


@settings(max_examples=80, deadline=None)
@given(packings, st.sampled_from([1, 2, 4]))
def test_every_packing_gives_back_the_bits_it_took_from_any_number_of_ranks(packing, size):
    start, tensors = 1, []
    for shape in packing.shapes:
        count = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + count, dtype=torch.float32).reshape(shape))
        start += count
    shards = [packing.pack(reader(tensors), rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(tensors, packing.unpack(shards), strict=True))
    assert sum(packing.share(rank, size) for rank in range(size)) == 1
    assert all(isinstance(packing.share(rank, size), Fraction) for rank in range(size))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.5, 1e4, width=32), min_size=1, max_size=20))
def test_a_norm_without_its_one_is_exact_from_a_half_upwards(numbers):
    packing, stored = Whole((len(numbers),), offset=-1.0), torch.tensor(numbers)
    assert torch.equal(packing.unpack([packing.pack(reader([stored]), 0, 1)])[0][0], stored)


def test_gated_attention_and_delta_net_are_laid_out_as_megatron_reads_them():
    """Against plain index arithmetic: which row of which tensor stands where."""
    heads, groups, size = 4, 2, 3
    query = [f"{kind}{head}{row}" for head in range(heads) for kind in ("q", "g") for row in range(size)]
    key, value = ([f"{kind}{group}{row}" for group in range(groups) for row in range(size)] for kind in "kv")
    numbers = {name: number for number, name in enumerate([*query, *key, *value])}
    tensors = [torch.tensor([[numbers[name]] for name in part]) for part in (query, key, value)]
    expected = []
    for group, members in ((0, (0, 1)), (1, (2, 3))):
        expected += [f"{kind}{head}{row}" for kind in "qg" for head in members for row in range(size)]
        expected += [f"{kind}{group}{row}" for kind in "kv" for row in range(size)]
    packing = GroupedQkv(heads, groups, size, 1, gated=True)
    for ranks in (1, 2, 4):
        packed = torch.cat([packing.pack(reader(tensors), rank, ranks) for rank in range(ranks)])
        assert packed.flatten().tolist() == [numbers[name] for name in expected]

    mapping = WeightMapping(HYBRID)
    in_proj = mapping.source("decoder.layers.0.self_attention.in_proj.weight", 0, 0)
    assert [name.rsplit(".", 2)[1] for name in in_proj.names] == [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    tensors = [torch.rand(shape) for shape in in_proj.shapes]
    keys, values = 2 * 16, 4 * 16
    q, k, v = tensors[0].split([keys, keys, values])
    for rank in (0, 1):
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v, *tensors[1:])])
        assert torch.equal(in_proj.packing.pack(reader(tensors), rank, 2), expected)


@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert", "expert_tensor"),
    [(t, p, e, x) for t in (1, 2) for p in (1, 2) for e in (1, 2) for x in (1, 2)],
)
def test_round_trip_over_every_rank_is_bit_exact(names, tensor, pipeline, expert, expert_tensor):
    """Megatron-LM#5844, Megatron-Bridge#1871: every tensor is there again, to the bit, once."""
    mapping = WeightMapping(HYBRID, names)
    generator = torch.Generator().manual_seed(3)
    stored = {name: 1 + torch.rand(shape, generator=generator) for name, shape in mapping.tensors()}
    restored: dict[str, list] = {}
    shares: dict[str, Fraction] = {}
    layers, experts = HYBRID.num_hidden_layers // pipeline, HYBRID.num_experts // expert
    for stage in range(pipeline):
        for expert_rank in range(expert):
            first_layer, first_expert = stage * layers, expert_rank * experts
            held = range(first_layer, first_layer + layers), range(first_expert, first_expert + experts)
            for name, source in mapping.parameters(*held):
                if not source.is_expert and expert_rank:
                    continue
                size = expert_tensor if source.is_expert else tensor
                number = re.match(r"decoder\.layers\.(\d+)", name)
                layer = first_layer + int(number[1]) if number else 0
                assert mapping.source(name, layer, first_expert) == source
                read = reader([stored[tensor] for tensor in source.names], source.slot)
                shards = [source.packing.pack(read, rank, size) for rank in range(size)]
                for tensor_name, blocks in zip(source.names, source.packing.unpack(shards), strict=True):
                    restored.setdefault(tensor_name, []).append(torch.cat(blocks))
                    shares[tensor_name] = shares.get(tensor_name, 0) + sum(
                        source.packing.share(rank, size) / source.slots for rank in range(size)
                    )
    assert restored.keys() == stored.keys() and set(shares.values()) == {1}
    for name, values in restored.items():
        assert torch.equal(torch.stack(values) if stored[name].dim() > values[0].dim() else values[0], stored[name])


def test_the_transformer_engine_names_stand_for_the_same_tensors():
    mapping = WeightMapping(HYBRID)
    for layer, fused, local in (
        (0, "self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        (3, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        (3, "mlp.experts.linear_fc1.weight3", "mlp.experts.local_experts.3.linear_fc1.weight"),
    ):
        prefix = "decoder.layers.0."
        assert mapping.source(prefix + fused, layer, 4) == mapping.source(prefix + local, layer, 4) is not None
    assert mapping.source("decoder.layers.0.self_attention.in_proj.weight", 3, 0) is None  # a layer of the other kind
    assert mapping.source("decoder.layers.0.self_attention.linear_qkv.weight", 0, 0) is None


def test_tensors_of_the_family_are_those_of_transformers():
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    from tests.hybrid_model import hybrid_hf_config

    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**hybrid_hf_config(HYBRID)))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert dict(WeightMapping(HYBRID, CheckpointNames(fused_experts=True)).tensors()) == expected


def test_the_published_model_has_the_parameters_its_name_says():
    from megatron_t1.config.compose import compose

    architecture = compose(["model=qwen3_5_122b_a10b"]).model.architecture
    shapes = dict(WeightMapping(architecture, CheckpointNames("model.language_model.", True)).tensors())
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 122_111_526_912
    assert shapes["model.language_model.layers.47.mlp.experts.gate_up_proj"] == (256, 2048, 3072)
    assert shapes["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"] == (12288, 3072)
    assert shapes["model.language_model.layers.3.self_attn.q_proj.weight"] == (16384, 3072)


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_the_convention_of_a_checkpoint_is_seen_in_its_tensors(names):
    tensors = [name for name, _ in WeightMapping(HYBRID, names).tensors()]
    others = ["model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.experts.gate_up_proj"]
    assert names_in([*others, *tensors]) == names


def test_a_family_without_such_parts_carries_nothing():
    assert WeightMapping(HYBRID).is_carried("mtp.fc.weight")
    assert not WeightMapping(ArchitectureConfig()).is_carried("mtp.fc.weight")
    assert replace(HYBRID).family == "qwen3_5_moe"
