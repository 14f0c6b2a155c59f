from __future__ import annotations

from importlib import metadata

import pytest

from megatron_t1.config.compose import compose
from megatron_t1.config.families import core_problems, family_problems, installed_core_problems
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.config.validate import validate


def test_shipped_models_have_the_numbers_their_family_needs():
    for name in ("tiny", "tiny_64e", "tiny_hybrid", "qwen3_30b_a3b", "qwen3_5_122b_a10b"):
        assert family_problems(compose([f"model={name}"]).model.architecture) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"linear_num_key_heads": 0, "linear_conv_kernel_dim": 0},
            ["linear_num_key_heads is 0", "conv_kernel_dim is 0"],
        ),
        ({"linear_num_value_heads": 3}, ["isn't a multiple of linear_num_key_heads=2"]),
        ({"full_attention_interval": 1}, ["full_attention_interval must be at least 2"]),
        ({"shared_expert_intermediate_size": 0}, ["has a shared expert"]),
        ({"family": "qwen3_moe"}, ["no shared expert", "full attention in every layer"]),
        ({"family": "gpt2"}, ["'gpt2' can't be built; known: qwen3_moe, qwen3_5_moe"]),
    ],
    ids=str,
)
def test_numbers_that_dont_fit_are_all_named(changed, said):
    architecture = compose(["model=tiny_hybrid"]).model.architecture
    for name, value in changed.items():
        setattr(architecture, name, value)
    found = family_problems(architecture)
    assert len(found) == len(said) and all(part in problem for part, problem in zip(said, found, strict=True))


def test_what_a_core_cannot_cut_names_the_release_that_can(monkeypatch):
    architecture, layout = compose(["model=tiny_hybrid"]).model.architecture, LayoutConfig(tensor=2, context=2)
    assert core_problems(architecture, LayoutConfig(expert=2, pipeline=2), "0.16.1") == []
    assert core_problems(architecture, layout, "0.18.0rc1") == core_problems(architecture, layout, "1.0") == []
    problems = core_problems(architecture, layout, "0.17.1")
    assert len(problems) == 2 and all("0.18 or later" in problem for problem in problems)
    assert "layout.tensor=2" in problems[0] and "layout.context=2" in problems[1]
    assert "0.16 or later" in core_problems(architecture, LayoutConfig(), "0.15.3")[0]
    assert core_problems(ArchitectureConfig(), layout, "0.13.1") == []

    config = compose(["model=tiny_hybrid", "layout.context=2", "layout.processes=4"])
    monkeypatch.setattr(metadata, "version", lambda name: "0.16.1")
    assert "layout.context=2" in installed_core_problems(config)[0]
    config.cluster.train.python = "/opt/megatron/bin/python"  # may have another core
    assert installed_core_problems(config) == []


def test_vllm_needs_chunked_prefill_for_delta_nets():
    words = ["model=tiny_hybrid", "env.tasks=tasks", "eval.tasks=held_out"]
    assert validate(compose(words)) == []
    (problem,) = validate(compose([*words, "rollout.engine.chunked_prefill=false", "rollout.seeded=true"]))
    assert "only with chunked prefill" in problem
