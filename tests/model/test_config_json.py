"""config.json as others may have written it: every wrong value is one named error, and nothing is guessed."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.errors import ConfigError, IncompleteError, T1Error
from megatron_t1.model.stored import architecture_from_hf
from tests.hybrid_model import HYBRID, hybrid_hf_config
from tests.tiny_model import ARCHITECTURE, hf_config

PLAIN, MIXED = hf_config(ARCHITECTURE), hybrid_hf_config(HYBRID)
SIZES = [name for name, value in MIXED.items() if type(value) is int] + ["moe_intermediate_size", "num_experts"]


def read(directory, settings, **changed):
    (directory / "config.json").write_text(json.dumps({**settings, **changed}))
    return architecture_from_hf(directory)


@pytest.mark.parametrize("value", [-1, 0, 10**12, "4", 4.5, float("inf"), float("nan"), True, [], {}])
@pytest.mark.parametrize("name", sorted({*SIZES}))
def test_a_size_is_a_whole_number_in_its_range(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*, and must be a whole number"):
        read(tmp_path, MIXED, **{name: value})


@pytest.mark.parametrize(
    ("settings", "changed", "said"),
    [
        (PLAIN, {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', and must be a number above 0"),
        (PLAIN, {"rope_theta": float("nan")}, "rope_theta is nan"),
        (PLAIN, {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', and must be true or false"),
        (PLAIN, {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', and must be an object"),
        (PLAIN, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (PLAIN, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention"),
        (PLAIN, {"num_attention_heads": 3}, "num_attention_heads=3 is not a multiple"),
        (PLAIN, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
        (PLAIN, {"num_local_experts": 4}, "num_experts is 8 and num_local_experts 4"),
        (PLAIN, {"num_hidden_layers": 10**6}, "no model has so many experts"),
        (PLAIN, {"model_type": ["qwen3_moe"]}, "known: 'qwen3_moe'"),
        (MIXED, {"rope_parameters": {**MIXED["rope_parameters"], "rope_theta": 0}}, "rope_theta is 0"),
        (MIXED, {"rope_theta": 5.0}, "rope_theta is 5, and 1e.06 among the rope parameters"),
        (MIXED, {"rope_parameters": {"partial_rotary_factor": 7}}, "at most 1"),
        (MIXED, {"layer_types": "full_attention"}, "must be a list of names"),
        (MIXED, {"layer_types": ["linear_attention", "full_attention"]}, "layer_types are of 2 layers"),
        (
            MIXED,
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            "full_attention_interval is 4, and 2 by layer_types",
        ),
        (MIXED, {"num_hidden_layers": 3}, "no layer would have full attention"),
        (MIXED, {"linear_num_value_heads": 3}, "isn't a multiple of linear_num_key_heads=2"),
    ],
)
def test_values_that_no_model_can_have_are_named(tmp_path, settings, changed, said):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, settings, **changed)


def test_a_family_of_another_name_lacks_its_numbers(tmp_path):
    with pytest.raises(IncompleteError, match="shared_expert_intermediate_size, linear_num_key_heads"):
        read(tmp_path, PLAIN, model_type="qwen3_5_moe")


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, PLAIN, hidden_size=-1, num_experts="8", attention_bias=True)
    assert all(name in str(caught.value) for name in ("hidden_size is -1", "num_experts is '8'", "attention_bias"))


def test_null_is_what_is_not_there(tmp_path):
    nulls = dict.fromkeys(("rope_scaling", "head_dim", "layer_types", "quantization_config", "attention_bias"))
    assert read(tmp_path, PLAIN, **nulls).head_dim == ARCHITECTURE.hidden_size // ARCHITECTURE.num_attention_heads


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "null", "", "[]", '{"vocab_size": 1' + "0" * 5000])
def test_what_is_no_object_is_no_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(IncompleteError, match="no readable config.json"):
        architecture_from_hf(tmp_path)


def test_nobody_waits_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(IncompleteError, match="not a regular file"):
        architecture_from_hf(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=150)
@given(settings=st.sampled_from((PLAIN, MIXED)), data=st.data())
def test_any_values_give_an_architecture_or_a_named_error(tmp_path_factory, settings, data):
    directory = tmp_path_factory.getbasetemp()
    names = [*settings, "rope_parameters", "rope_scaling", "layer_types", "text_config", "num_local_experts"]
    changed = data.draw(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=3))
    try:
        found = read(directory, settings, **changed)
    except T1Error:
        return
    assert found.num_experts_per_tok <= found.num_experts and found.num_hidden_layers * found.hidden_size > 0
