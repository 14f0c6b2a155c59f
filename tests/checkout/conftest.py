"""Command lines of a checkout, as its own parser leaves them."""

from __future__ import annotations

import argparse

import pytest

from megatron_t1.checkout.options import add_arguments

# What a checkout's own parser and validation leave behind.
MEGATRON = {
    "bf16": True,
    "num_experts": 8,
    "micro_batch_size": 1,
    "calculate_per_token_loss": True,
    "eval_iters": 0,
    "eval_interval": 1000,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": 8,
    "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False,
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
    "seq_length": 256,
    "save": None,
    "load": None,
    "ckpt_format": "torch_dist",
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "moe_router_load_balancing_type": "none",
    "iterations_to_skip": [],
}


@pytest.fixture
def command(tmp_path):
    """Parse a command line of the group, with directories that exist."""
    for name in ("rollouts", "values", "model"):
        (tmp_path / name).mkdir()

    def parse(*words: str, **megatron) -> argparse.Namespace:
        parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
        paths = [word for n in ("rollouts", "values", "model") for word in (f"--t1-{n}", str(tmp_path / n))]
        args = parser.parse_args(["--t1-role", "actor", *paths, *words])
        vars(args).update({**MEGATRON, **megatron})
        return args

    return parse
