from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_t1.config.compose import compose
from megatron_t1.config.layout_rules import changes, engine_problems, layout_problems, nearest_layouts
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.config.validate import validate
from megatron_t1.errors import ConfigError

LARGE = compose(["experiment=ppo_122b", "layout=gpus64"])
HYBRID, GPUS64 = LARGE.model.architecture, LARGE.layout


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"pipeline": 5, "processes": 80}, "num_hidden_layers=48 is not a multiple of layout.pipeline"),
        ({"virtual_pipeline": 5}, "layout.pipeline x virtual_pipeline=20; nearest: 16, 24"),
        ({"tensor": 4, "processes": 128}, "linear_num_key_heads=16 is not a multiple of layout.tensor x context=32"),
        ({"expert": 48, "processes": 192}, "num_experts=256 is not a multiple of layout.expert=48; nearest: 32, 64"),
        ({"expert_tensor": 3, "processes": 192}, "moe_intermediate_size=1024 is not a multiple of layout.expert_t"),
        ({"tensor": 64, "context": 1, "pipeline": 1}, "num_attention_heads=32 is not a multiple of layout.tensor=64"),
        ({"processes": 60}, "layout.processes=60 must be a multiple of 64"),
        ({"context": 0}, "layout.context is 0"),
    ],
)  # fmt: skip
def test_each_rule_has_its_message(sizes, said):
    assert said in "\n".join(layout_problems(replace(GPUS64, **sizes), HYBRID))


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ({"context": 32}, "layout.context=8"),
        ({"expert": 48}, "layout.expert=16"),
        ({"pipeline": 5}, "layout.pipeline=4"),
        ({"pipeline": 5, "context": 3}, "layout.pipeline=4 layout.context=4"),
    ],
)
def test_the_nearest_layout_changes_least(sizes, first):
    wrong = replace(GPUS64, **sizes)
    found = nearest_layouts(wrong, HYBRID)
    assert changes(wrong, found[0]) == first
    assert len(found) == 3 and all(not layout_problems(each, HYBRID) for each in found)
    assert all(each.processes == wrong.processes for each in found)


def test_a_valid_layout_is_nearest_to_itself():
    assert nearest_layouts(GPUS64, HYBRID)[0] == GPUS64


def test_clashes_come_with_the_nearest_layouts():
    problems = validate(compose(["experiment=ppo_122b", "layout=gpus96", "layout.expert=48"]))
    assert "(nearest layouts for 96 processes: layout.expert=16; or " in problems[-1]


def test_a_phase_may_have_a_layout_of_its_own():
    config = compose(["experiment=ppo_122b", "layout=gpus64", "layout.critic={context: 4, recompute: moe}"])
    assert validate(config) == []
    critic, actor = config.layout.of("critic"), config.layout.of("actor")
    assert (critic.context, critic.recompute, critic.tensor) == (4, "moe", 2)
    assert (actor.context, actor.recompute, actor.critic) == (8, "full", {})
    assert config.layout.of("warmup") == critic and config.layout.of("export") == actor


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("layout.critic.context=16", "layout.critic.processes=64 must be a multiple of 128"),
        ("layout.critic.context=3", "layout.critic.tensor x context=6"),
        ("layout.critic.processes=32", "layout.critic.processes is the same in all phases"),
        ("layout.export.contxt=4", "layout.export.contxt: the layout has no such option"),
        ("layout.critic.context=four", "layout.critic.context='four' should be a int"),
        ("layout.critic.recompute=some", "layout.critic.recompute is 'some'"),
    ],
)
def test_a_phase_of_its_own_is_checked_like_the_others(override, said):
    assert said in "\n".join(validate(compose(["experiment=ppo_122b", override])))


def test_roles_in_one_process_group_have_one_layout():
    config = compose(["experiment=ppo_122b", "layout.critic.recompute=moe", "loop.colocate_roles=true"])
    assert any("loop.colocate_roles=false" in problem for problem in validate(config))


def test_a_misspelt_phase_is_refused():
    with pytest.raises(ConfigError, match="layout.critc"):
        compose(["experiment=ppo_122b", "layout.critc.context=4"])


def test_rules_of_gloo_hold_on_the_cpu_alone():
    layout = LayoutConfig(processes=4, expert=2, expert_tensor=2, tensor=2, distributed_optimizer=True)
    assert layout_problems(layout, backend="cuda") == []
    assert len(layout_problems(layout, backend="cpu")) == 2


def test_more_tensor_ranks_than_key_value_heads_must_be_a_multiple():
    architecture = ArchitectureConfig(num_attention_heads=12, num_key_value_heads=4, num_experts=16)
    layout = LayoutConfig(processes=6, tensor=6, expert=2)
    assert "num_key_value_heads=4" in "\n".join(layout_problems(layout, architecture))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (1, []),
        (8, []),
        (16, []),
        (3, ["num_attention_heads=32", "linear_num_key_heads=16", "linear_num_value_heads=64"]),
        (32, ["linear_num_key_heads=16"]),
    ],
)
def test_engines_that_cannot_cut_the_model_are_named(tensor, said):
    problems = engine_problems(tensor, HYBRID)
    assert len(problems) == len(said) and all(one in line for one, line in zip(said, problems, strict=True))
    assert all("nearest: " in line for line in problems)


def test_an_engine_has_a_divisor_or_a_multiple_of_the_key_value_heads():
    architecture = ArchitectureConfig(num_attention_heads=12, num_key_value_heads=6)
    assert [bool(engine_problems(tensor, architecture)) for tensor in (1, 2, 3, 4, 6, 12)] == [0, 0, 0, 1, 0, 0]
    assert "take a multiple or a divisor of 6" in engine_problems(4, architecture)[0]


def test_a_number_of_processes_that_no_cluster_has_is_refused_at_once():
    """Its divisors would be tried one by one, and its ranks visited."""
    (problem,) = layout_problems(LayoutConfig(processes=10**9 + 7))
    assert "at most 65536" in problem
    assert layout_problems(LayoutConfig(processes=0)) == ["layout.processes is 0; it must be at least 1"]
