import copy
import json
from functools import cache

import pytest

from megatron_t1.config.compose import compose, group_names, save
from megatron_t1.config.inputs import device_problems, missing_inputs, other_reward, run_dir_problems
from megatron_t1.config.schema import LayoutConfig, RewardConfig
from megatron_t1.config.validate import OWN_ENGINE_ARGUMENTS, check, unbuildable, validate
from megatron_t1.errors import ConfigError
from megatron_t1.resources import resource_dir
from megatron_t1.trajectory.layout import TokenLayout

LAYOUTS_122B = [
    name for name in group_names([resource_dir("conf")])["layout"] if name.startswith("gpus") and "30b" not in name
]


@cache
def defaults():
    return compose()


def with_values(**values):
    config = copy.deepcopy(defaults())
    for key, value in values.items():
        owner = config
        *parents, name = key.split("__")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


class Uncallable:
    def __init__(self, scale):
        self.scale = scale


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
    (
        {"rollout__max_context": 511, "train__capacity": 511, "layout__context": 2},
        ["rollout.max_context=511, padded to a multiple of 4", "exceeds train.capacity=511"],
    ),
    (
        {"train__gae__length_adaptive_alpha": 0.05, "train__gae__lambda_actor": 0.9},
        ["train.gae.length_adaptive_alpha=0.05", "lambda_actor=0.9"],
    ),
    ({"rollout__max_tokens_per_turn": 600}, ["rollout.max_tokens_per_turn=600"]),
    ({"rollout__seeded": True}, ["chunked_prefill=false"]),
    ({"rollout__top_p": 0.9}, ["rollout.top_p=0.9"]),
    ({"rollout__temperature": 0.0}, ["rollout.temperature"]),
    ({"rollout__routes": False}, ["train.replay.actor=true needs rollout.routes=true"]),
    ({"rollout__tasks_per_iteration": 0}, ["rollout.tasks_per_iteration=0 must be larger than 0"]),
    ({"rollout__engine__port": 70000}, ["rollout.engine.port=70000"]),
    ({"train__actor__correction": "truncated"}, ["old_logprobs=recomputed"]),
    ({"train__actor__dual_clip": 0.5}, ["dual_clip=0.5"]),
    ({"env__min_turns": 9}, ["env.min_turns=9 exceeds env.max_turns=8"]),
    ({"env__min_turns": 5, "eval__max_turns": 4}, ["env.min_turns=5 exceeds eval.max_turns=4"]),
    ({"train__sft__tokens": 1000}, ["train.sft.tokens_per_step=1024 exceeds train.sft.tokens=1000"]),
    (
        {"train__critic__warmup_holdout": 64, "train__critic__warmup_epochs": 1},
        ["train.critic.warmup_min_epochs=2 exceeds train.critic.warmup_epochs=1"],
    ),
    (
        {"train__actor__decay": "linear", "train__actor__decay_steps": 5, "train__actor__warmup_steps": 6},
        ["train.actor.warmup_steps=6 exceeds train.actor.decay_steps=5"],
    ),
    ({"train__actor__reference": "some/model"}, ["train.actor.reference", "kl_coef > 0"]),
    (
        {"train__actor__kl_coef": 0.1, "rollout__routes": False},
        ["train.replay.reference=true needs rollout.routes=true"],
    ),
    ({"train__actor__correction": "icepop"}, ["train.actor.correction='icepop'", "band", "sequence"]),
    ({"train__loss_denominator": "batch"}, ["train.loss_denominator='batch'"]),
    ({"train__critic__warmup_holdout": 32}, ["train.critic.warmup_holdout=32 must be 0 or at least 64"]),
    ({"train__critic__warmup_holdout": 100_000}, ["fewer than the 256 trajectories"]),
    ({"train__head_dtype": "bfloat16"}, ["train.head_dtype='bfloat16'"]),
    ({"train__router_dtype": "fp32"}, ["train.router_dtype='fp32'"]),
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
    ({"train__actor__eps": 0.0}, ["train.actor.eps=0.0 must be larger than 0"]),
    ({"train__sft__min_lr_ratio": 1.5}, ["train.sft.min_lr_ratio=1.5 must lie in [0, 1]"]),
    ({"reward__scale": 0.0}, ["reward.scale=0.0 must be larger than 0"]),
    ({"reward___target_": "os.system"}, ["reward._target_=os.system", "is no reward", "scale"]),
    ({"reward___target_": "fractions.Fraction"}, ["is no reward"]),
    ({"reward___target_": "tests.config.test_validate.Uncallable"}, ["can't be called with a verdict"]),
    ({"env__sandbox___target_": "pathlib.Path"}, ["is no sandbox", "run_verifier"]),
    ({"env__sandbox__host_uid": 0}, ["env.sandbox.host_uid=0"]),
    ({"env__tasks": "tasks/held_out/"}, ["env.tasks and eval.tasks are both"]),
    ({"rollout__engine__kv_cache_bytes": 4096}, ["kv_cache_bytes=4096 holds no trajectory", "1048576"]),
    ({"rollout__engine__extra_args": ["--port=80", "--no_enable_prefix_caching"]}, ["--port", "prefix-caching"]),
    ({"rollout__engine__extra_args": ["--model", "other"]}, ["extra_args: --model is decided by other options"]),
    ({"model__chat_format": "chatml"}, ["model.chat_format='chatml' is unknown", "chatml_bash"]),
    ({"model__chat_format": "no_such_package:Format"}, ["no_such_package"]),
    ({"model__chat_format": "renderers:qwen99"}, ["no family 'qwen99'"]),
    ({"model__chat_format": "renderers:"}, ["no family ''"]),
    ({"model__chat_format": "template:no/such.jinja"}, ["no/such.jinja", "no such template file"]),
    ({"train__replay__max_gap": -2.0}, ["train.replay.max_gap=-2.0"]),
    ({"train__replay__max_gap": 0.1, "train__replay__measure_gap": False}, ["max_gap=0.1 needs", "measure_gap=true"]),
    ({"run__dir": ""}, ["run.dir is empty"]),
    ({"run__dir": "/"}, ["run.dir=/"]),
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
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "task.toml").touch()
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


def test_what_vllm_is_told_anyway_is_refused_in_extra_args():
    from pathlib import Path

    from megatron_t1.config.schema import EngineConfig
    from megatron_t1.rollout.engine.command import EngineBuild, serve_command

    engine = EngineConfig(tensor_parallel=2, chunked_prefill=False)
    command = serve_command(
        engine, EngineBuild("vllm", "0"), model_dir=Path("m"), served_name="p", dtype="float32", port=1,
        max_model_len=8, routes=True, seed=0,
    )  # fmt: skip
    told = {word.partition("=")[0].replace("--no-", "--") for word in command if word.startswith("--")}
    assert told - OWN_ENGINE_ARGUMENTS == {"--max-num-batched-tokens"}  # a matter of speed only
    assert validate(with_values(rollout__engine__extra_args=["--max-num-batched-tokens=4096", "-O1"])) == []


def test_an_unusable_target_is_not_called(monkeypatch):
    called = []
    monkeypatch.setattr(Uncallable, "__init__", lambda self, scale: called.append(scale))
    validate(with_values(reward___target_="tests.config.test_validate.Uncallable"))
    assert not called


def test_a_family_that_lacks_a_number_is_refused_at_the_start():
    config = compose(["experiment=ppo_122b"])
    assert validate(config) == [] and unbuildable(config) == unbuildable(compose()) == []
    config.model.architecture.linear_key_head_dim = 0
    assert "model.architecture: linear_key_head_dim is 0" in unbuildable(config)[0]


def test_directories_without_a_model_or_a_task(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "config.json").touch()
    config = with_values(env__tasks=str(tmp_path), model__path=str(tmp_path))
    problems = missing_inputs(config, ("env.tasks", "model.path"))
    assert "no task in it" in problems[0]
    assert "no model, tokenizer.json, *.safetensors missing" in problems[1]


def critic_of(directory, **state):
    """A checkpoint as far as small files tell."""
    directory.mkdir(parents=True)
    (directory / "checkpoint.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"role": "value", **state}))
    return directory


def start_problems(critic, **values):
    return missing_inputs(with_values(train__critic__start=str(critic), **values), ["train.critic.start"])


def test_a_critic_of_another_scale_or_discount_is_no_start(tmp_path):
    critic = critic_of(tmp_path / "warm" / "critic")
    assert start_problems(critic) == []  # nobody says what it was made with
    save(with_values(reward__scale=0.1, train__gae__gamma=0.9), tmp_path / "warm" / "config.yaml")
    said = "\n".join(start_problems(critic))
    assert "reward.scale=0.1, here it is 0.25" in said and "train.gae.gamma=0.9, here it is 1" in said
    assert start_problems(critic, reward__scale=0.1, train__gae__gamma=0.9) == []
    of_a_run = critic_of(tmp_path / "warm" / "checkpoints" / "critic" / "iter_0002")
    assert len(start_problems(of_a_run)) == 2


def test_another_reward_is_named_with_both_values():
    own = RewardConfig()
    assert other_reward(RewardConfig(), own) == ""
    said = other_reward(RewardConfig(_target_="megatron_t1.environment.reward.BinaryReward", scale=2.0), own)
    assert "reward._target_=megatron_t1.environment.reward.BinaryReward, here it is" in said
    assert "reward.scale=2.0, here it is 0.25" in said
    assert "reward.cap=8.0, here it is 0.0" in other_reward(RewardConfig(cap=8.0), own)


def test_what_an_interrupted_phase_left_is_no_start(tmp_path):
    for critic, phase in (
        (tmp_path / "warm" / "critic", "phases/iter_0000/warmup"),
        (tmp_path / "run" / "checkpoints" / "critic" / "iter_0003", "phases/iter_0002/critic"),
    ):
        root = critic_of(critic).parents[0 if critic.name == "critic" else 2]
        save(defaults(), root / "config.yaml")
        (root / phase).mkdir(parents=True)
        assert f"the {phase.rpartition('/')[2]} phase that writes it isn't finished" in "".join(start_problems(critic))
        (root / phase / "result.json").write_text("{}")
        assert start_problems(critic) == []


def test_an_actor_is_no_critic_to_start_from(tmp_path):
    actor = critic_of(tmp_path / "run" / "checkpoints" / "actor" / "iter_0001", role="policy")
    assert "it is the checkpoint of a policy, not of a critic" in start_problems(actor)[0]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 2), (4, 3)])
def test_the_padding_that_validation_counts_is_that_of_the_layout(sizes):
    context, tensor = sizes
    multiple = LayoutConfig(context=context, tensor=tensor).stream_multiple
    for length in (1, multiple, multiple + 1, 97):
        layout = TokenLayout((length,), context, 0, tensor, 0, tensor > 1)
        assert layout.total == -(-length // multiple) * multiple


def test_a_run_does_not_lie_inside_another(tmp_path):
    for name in ("manifest.json", "config.yaml"):
        (tmp_path / name).touch()
    (problem,) = run_dir_problems(with_values(run__dir=str(tmp_path / "hf" / "mine")))
    assert f"lies inside the run {tmp_path}" in problem
    assert run_dir_problems(with_values(run__dir=str(tmp_path))) == []
    (tmp_path / "config.yaml").unlink()  # generated tasks have a manifest, too
    assert run_dir_problems(with_values(run__dir=str(tmp_path / "mine"))) == []


def test_cuda_without_a_device():
    from pathlib import Path

    problems = device_problems(with_values(cluster__backend="cuda"))
    assert bool(problems) != any(Path("/dev").glob("nvidia[0-9]*"))
    assert device_problems(with_values(cluster__backend="cuda", cluster__launcher="slurm")) == []
