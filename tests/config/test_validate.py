import pytest

from megatron_t1.config.compose import compose, group_names
from megatron_t1.config.validate import check, missing_inputs, validate
from megatron_t1.errors import ConfigError
from megatron_t1.resources import resource_dir

LAYOUTS_122B = [
    name for name in group_names([resource_dir("conf")])["layout"] if name.startswith("gpus") and "_" not in name
]


def with_values(**values):
    config = compose()
    for key, value in values.items():
        owner = config
        *parents, name = key.split("__")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


# Each clash is reported, by the names of the options that clash (miles#2367).
CLASHES = [
    ({"layout__processes": 3}, ["layout.processes=3", "nearest: 2, 4"]),  # Megatron-LM#1517
    ({"layout__expert": 3, "layout__processes": 3}, ["num_experts=16", "layout.expert=3"]),
    ({"layout__tensor": 3, "layout__processes": 6}, ["num_attention_heads=4"]),
    ({"layout__pipeline": 3, "layout__processes": 6}, ["num_hidden_layers=4"]),
    ({"layout__virtual_pipeline": 2}, ["virtual_pipeline > 1 needs layout.pipeline > 1"]),
    ({"layout__dispatcher": "flex"}, ["layout.dispatcher='flex'", "alltoall"]),
    ({"layout__recompute": "some"}, ["layout.recompute='some'"]),
    ({"rollout__max_context": 9000}, ["rollout.max_context=9000", "train.capacity=4096"]),
    ({"rollout__max_tokens_per_turn": 600}, ["rollout.max_tokens_per_turn=600"]),
    ({"rollout__seeded": True}, ["chunked_prefill=false"]),
    ({"rollout__top_p": 0.9}, ["rollout.top_p=0.9"]),
    ({"rollout__temperature": 0.0}, ["rollout.temperature"]),
    ({"rollout__routes": False}, ["train.replay.actor=true needs rollout.routes=true"]),
    ({"rollout__tasks_per_iteration": 0}, ["rollout.tasks_per_iteration=0 must be larger than 0"]),
    ({"rollout__engine__port": 70000}, ["rollout.engine.port=70000"]),
    ({"train__actor__correction": "truncated"}, ["old_logprobs=recomputed"]),
    ({"train__actor__dual_clip": 0.5}, ["dual_clip=0.5"]),
    ({"train__actor__kl_coef": 0.1}, ["kl_coef"]),
    ({"train__actor__minibatches": 10_000}, ["minibatches=10000"]),
    ({"train__actor__lr": 0.0}, ["train.actor.lr"]),
    ({"train__actor__lr": float("nan")}, ["train.actor.lr is not a finite number"]),
    ({"train__critic__decay": "cosine"}, ["train.critic.decay_steps > 0"]),
    ({"train__critic__loss": "l1"}, ["train.critic.loss='l1'"]),
    ({"train__gae__gamma": 1.5}, ["train.gae.gamma=1.5 must lie in [0, 1]"]),
    ({"train__gae__lambda_critic": -0.1}, ["lambda_critic=-0.1"]),
    ({"train__replay__actor": False}, ["train.replay.measure_gap"]),
    ({"loop__warmup_iterations": -1}, ["loop.warmup_iterations=-1 must not be negative"]),
    ({"loop__warmup_iterations": 0, "loop__iterations": 0}, ["nothing to do"]),
    ({"reward___target_": "no_such_package.Reward"}, ["reward._target_", "no_such_package"]),
    ({"reward___target_": "megatron_t1.environment.reward.Absent"}, ["has no Absent"]),
    ({"reward___target_": "Reward"}, ["not package.module.Class"]),
    ({"model__dtype": "float16"}, ["model.dtype='float16'", "bfloat16"]),
    ({"model__architecture__num_experts_per_tok": 32}, ["num_experts_per_tok=32 exceeds num_experts=16"]),
    ({"cluster__launcher": "ray"}, ["cluster.launcher='ray'"]),
    ({"cluster__rollout__nodes": 2}, ["cluster.rollout.nodes=2"]),
    ({"cluster__train__container": "image.sqsh"}, ["cluster.train.container needs cluster=slurm"]),
    ({"generate__min_parts": 5}, ["generate.min_parts=5"]),
]


@pytest.mark.parametrize(("values", "words"), CLASHES, ids=lambda item: next(iter(item)) if item else None)
def test_each_clash_is_named(values, words):
    problems = "\n".join(validate(with_values(**values)))
    assert all(word in problems for word in words), problems


def test_shipped_settings_have_no_clash():
    for overrides in ([], ["experiment=quickstart"], ["experiment=learn"], ["experiment=learn", "reward=binary"],
                      ["model=tiny_64e"], ["layout=single"]):  # fmt: skip
        assert validate(compose(overrides)) == []


@pytest.mark.parametrize("layout", LAYOUTS_122B)
def test_layouts_of_the_122b_have_no_clash(layout):
    assert validate(compose(["experiment=ppo_122b", f"layout={layout}"])) == []


def test_context_times_tensor_must_divide_the_key_heads_of_the_delta_net():
    problems = validate(compose(["experiment=ppo_122b", "layout=gpus256", "layout.context=32"]))
    assert any("linear_num_key_heads=16" in problem for problem in problems)


def test_the_batch_script_with_the_tiny_model_on_two_nodes():
    overrides = ["experiment=ppo_122b", "model=tiny", "layout=ep2", "env=terminal", "rollout=default", "train=default",
                 "cluster.train.processes_per_node=1"]  # fmt: skip
    assert validate(compose(overrides)) == []


def test_missing_inputs_are_named_with_the_command_that_makes_them(tmp_path):
    config = with_values(env__tasks=str(tmp_path), eval__tasks="???", model__path=str(tmp_path / "absent"))
    problems = missing_inputs(config, ("env.tasks", "eval.tasks", "model.path"))
    assert len(problems) == 2
    assert problems[0] == "eval.tasks is not set"
    assert "t1 model init" in problems[1]


def test_everything_wrong_is_one_error():
    config = with_values(rollout__max_context=9000, rollout__seeded=True, train__actor__dual_clip=0.5)
    with pytest.raises(ConfigError) as caught:
        check(config, ("eval.tasks",))
    text = str(caught.value)
    assert text.startswith("5 problems")
    assert text.count("\n  - ") == 5
