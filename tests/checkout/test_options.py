"""Options of the plugin, clashes, and what a checkpoint directory says: no Megatron needed."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import pytest

from megatron_t1 import checkout
from megatron_t1.checkout.checks import option_problems, require_options
from megatron_t1.checkout.gae import write_gae
from megatron_t1.checkout.options import add_arguments, options_of
from megatron_t1.checkout.stored import find_checkpoint, has_value_head
from megatron_t1.errors import ConfigError


def test_options_become_the_schema_s(command):
    words = ("--t1-actor-clip-high", "0.5", "--t1-gae-lambda-actor", "0.9", "--t1-gae-turn-level", "--t1-epochs", "3")
    options = options_of(command(*words))
    assert options.config.train.actor.clip_high == 0.5
    assert options.config.train.gae.lambda_actor == 0.9 and options.config.train.gae.turn_level
    assert (options.epochs, options.minibatches) == (3, options.config.train.actor.minibatches)
    assert options.steps == 3 * options.minibatches
    assert options.config.model.dtype == "bfloat16"


def test_replay_is_on_for_the_actor_off_for_the_critic_and_for_dense_models(command):
    assert options_of(command()).replay
    assert not options_of(command("--t1-role", "critic")).replay
    assert options_of(command("--t1-role", "critic", "--t1-replay", "on")).config.train.replay.critic
    assert not options_of(command(num_experts=None)).replay


def test_options_of_gae_are_those_the_values_were_computed_with(command, tmp_path):
    """Values are computed once, by the critic; whoever reads them can't have other ones."""
    values, asked = tmp_path / "values", ("--t1-gae-lambda-actor", "0.9", "--t1-gae-turn-level")
    assert option_problems(command()) == []  # values of the trainer, read as they are
    (problem,) = option_problems(command(*asked))
    assert "--t1-gae-lambda-actor is given, and nothing says" in problem and "--t1-gae-turn-level" in problem
    write_gae(values, options_of(command("--t1-role", "critic", *asked)).config.train.gae)
    for same in (asked, asked[:2], (), ("--t1-gae-gamma", "1.0")):
        assert option_problems(command(*same)) == []
    (problem,) = option_problems(command("--t1-gae-lambda-actor", "0.8", "--no-t1-gae-turn-level"))
    assert "--t1-gae-lambda-actor is 0.8, they have 0.9" in problem
    assert "--t1-gae-turn-level is False, they have True" in problem
    (values / "gae.json").write_text("[")
    (problem,) = option_problems(command(*asked))
    assert "gae.json can't be read" in problem


def test_a_sound_command_line_has_no_problem(command):
    assert option_problems(command()) == []


@pytest.mark.parametrize(
    "megatron, words",
    [
        ({"micro_batch_size": 2}, "--micro-batch-size is 2, it must be 1"),
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss is False"),
        ({"hidden_dropout": 0.1}, "the sampler had no dropout"),
        ({"eval_interval": None}, "--eval-interval is missing"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers is set"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp is set"),
        ({"moe_router_fusion": True}, "moe_router_fusion: the fused kernel chooses"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm: layers run later"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full"]}, "CUDA graphs over the router"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"t1_first_step": 8}, "--train-iters 8 ends before --t1-first-step 8"),
        ({"t1_first_step": 4}, "--override-opt_param-scheduler"),
        ({"t1_minibatches": 0}, "--t1-minibatches is 0"),
        ({"pipeline_model_parallel_size": 2, "context_parallel_size": 3}, "must be a multiple of 6"),
        ({"tensor_model_parallel_size": 2}, "only with --sequence-parallel"),
        ({"save": "there", "ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
        ({"t1_values": "nowhere"}, "train the critic on these rollouts first"),
    ],
)
def test_a_clash_is_named(command, megatron, words):
    assert [problem for problem in option_problems(command(**megatron)) if words in problem]


def test_replay_s_clashes_don_t_matter_without_it(command):
    assert option_problems(command("--t1-replay", "off", moe_router_fusion=True)) == []


def test_all_problems_are_in_one_error(command):
    with pytest.raises(ConfigError) as caught:
        require_options(command(micro_batch_size=4, fp16=True, t1_rollouts=None))
    for words in ("--micro-batch-size", "--fp16", "--t1-rollouts is missing"):
        assert words in caught.value.problem


def test_options_of_the_same_name_in_the_checkout_are_an_error_that_says_so():
    parser = argparse.ArgumentParser()
    parser.add_argument("--t1-role")
    with pytest.raises(ConfigError, match="has an option of this name already"):
        add_arguments(parser)


def checkpoint(root: Path, content: bytes, step: str = "12") -> None:
    directory = root / ("release" if step == "release" else f"iter_{int(step):07d}")
    directory.mkdir(parents=True)
    (directory / ".metadata").write_bytes(content)
    (root / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")


def test_which_checkpoint_will_be_loaded_and_whether_it_has_a_head(tmp_path):
    empty, policy, critic = tmp_path / "empty", tmp_path / "policy", tmp_path / "critic"
    checkpoint(policy, b"\x80\x04decoder.final_layernorm.weight", "release")
    checkpoint(critic, b"\x80\x04value_head.weight")
    args = argparse.Namespace(load=str(empty), pretrained_checkpoint=str(policy), ckpt_step=None)
    assert find_checkpoint(args) == policy / "release" and not has_value_head(policy / "release")
    args.load = str(critic)
    assert find_checkpoint(args) == critic / "iter_0000012" and has_value_head(critic / "iter_0000012")
    args.ckpt_step = 3
    assert find_checkpoint(args) == critic / "iter_0000003" and not has_value_head(critic / "iter_0000003")
    assert find_checkpoint(argparse.Namespace(load=None)) is None


def test_a_policy_s_optimizer_state_is_no_critic_s(command, tmp_path):
    checkpoint(tmp_path / "policy", b"no head")
    critic = ("--t1-role", "critic")
    problems = option_problems(command(*critic, load=str(tmp_path / "policy")))
    assert [problem for problem in problems if "--finetune" in problem]
    assert option_problems(command(*critic, load=str(tmp_path / "policy"), finetune=True)) == []
    assert option_problems(command(load=str(tmp_path / "policy"))) == []


def test_without_a_role_the_script_s_own_callables_are_called(monkeypatch):
    fake = types.ModuleType("megatron.training")
    fake.get_args = lambda: argparse.Namespace(t1_role=None)
    monkeypatch.setitem(sys.modules, "megatron.training", fake)

    def provider(samples, vp_stage=None):
        return samples, vp_stage

    datasets, model, forward = checkout.plug_in(
        provider, lambda *a, **k: (a, k), lambda it, m, plan=False: (it, m, plan)
    )
    assert datasets.is_distributed is False
    provider.is_distributed = True
    assert datasets.is_distributed is True
    assert datasets((1, 2, 3), vp_stage=1) == ((1, 2, 3), 1)
    assert model(True, post_process=False) == ((True,), {"post_process": False})
    assert forward("iterator", "model", plan=True) == ("iterator", "model", True)
