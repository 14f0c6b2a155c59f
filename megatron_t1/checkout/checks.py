"""Options of a checkout that clash with training on records: all found at once, before the model is built. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_t1.checkout.gae import gae_problem
from megatron_t1.checkout.options import gae_given, replay_wanted
from megatron_t1.checkout.stored import find_checkpoint, has_value_head
from megatron_t1.errors import ConfigError
from megatron_t1.routing.safety import unsafe_options

# Options that must have one value, each with the reason. A checkout that lacks one has nothing to clash with.
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("micro_batch_size", 1, "a micro-batch is one packed row of up to --seq-length tokens"),
    ("calculate_per_token_loss", True, "losses are sums over tokens, divided once by the tokens of the step"),
    ("eval_iters", 0, "rollouts have no validation split"),
    ("hidden_dropout", 0.0, "the sampler had no dropout"),
    ("attention_dropout", 0.0, "the sampler had no dropout"),
)
_REFUSED: tuple[tuple[str, str], ...] = (
    ("fp16", "the loss isn't scaled; use --bf16 or neither"),
    ("full_validation", "rollouts have no validation split"),
    ("sft", "it reports losses in another form"),
    ("perform_rl_step", "it replaces the training data with its own"),
    ("rampup_batch_size", "a step has as many micro-batches as its mini-batch needs"),
    ("iterations_to_skip", "a skipped step reads data in another form"),
    ("train_samples", "the length of training is the number of steps: use --train-iters"),
    ("mtp_num_layers", "the multi-token heads need labels that a rollout step doesn't have"),
    ("use_legacy_models", "only Megatron-Core models have routers and heads to attach to"),
    ("moe_use_upcycling", "it builds a second model with the same builder"),
    ("init_model_with_meta_device", "heads and start weights need real parameters"),
    ("use_torch_fsdp2", "the replay object finds chunks inside DDP only"),
    ("use_megatron_fsdp", "the replay object finds chunks inside DDP only"),
    ("hybrid_context_parallel", "micro-batches are already balanced and cut by their own layout"),
    ("phase_transition_iterations", "it moves the data position"),
)


def option_problems(args: argparse.Namespace) -> list[str]:
    """One sentence for each option that is missing, wrong, or clashes; empty when training can start.

    Args:
        args: after Megatron's own validation.
    """
    return [
        *_paths(args),
        *_fixed(args),
        *_replay(args),
        *_sizes(args),
        *_checkpoints(args),
    ]


def require_options(args: argparse.Namespace) -> None:
    """Raise ConfigError with every problem."""
    problems = option_problems(args)
    if problems:
        raise ConfigError(
            "these options can't be used with --t1-role:\n  - " + "\n  - ".join(problems),
            where="the command line of the checkout",
        )


def _paths(args: argparse.Namespace) -> Iterator[str]:
    for name, what in (("rollouts", "records"), ("model", "a Hugging Face model"), ("values", "sidecars")):
        value = getattr(args, f"t1_{name}")
        if not value:
            yield f"--t1-{name} is missing: the directory of {what}"
        elif name != "values" and not Path(value).is_dir():
            yield f"--t1-{name} {value}: there is no such directory"
    if args.t1_role == "actor" and args.t1_values:
        if not Path(args.t1_values).is_dir():
            yield f"--t1-values {args.t1_values}: no such directory; train the critic on these rollouts first"
        elif problem := gae_problem(Path(args.t1_values), gae_given(args)):
            yield problem


def _fixed(args: argparse.Namespace) -> Iterator[str]:
    for name, expected, reason in _FIXED:
        found = getattr(args, name, expected)
        if found != expected:
            yield f"{_flag(name)} is {found}, it must be {expected}: {reason}"
    for name, reason in _REFUSED:
        if getattr(args, name, None):
            yield f"{_flag(name)} is set: {reason}"
    if getattr(args, "eval_interval", 1) is None:
        yield "--eval-interval is missing: this Megatron divides by it even with --eval-iters 0; any number will do"
    if getattr(args, "dataloader_type", None) == "cyclic":
        yield "--dataloader-type cyclic: the order of the records is the plan's; leave the option out"


def _replay(args: argparse.Namespace) -> Iterator[str]:
    if args.t1_replay == "on" and not args.num_experts:
        yield "--t1-replay on: the model has no experts (--num-experts)"
    if not replay_wanted(args):
        return
    for problem in unsafe_options(args):
        yield f"{problem}; or use --t1-replay off"


def _sizes(args: argparse.Namespace) -> Iterator[str]:
    for name in ("t1_epochs", "t1_minibatches", "t1_logprob_chunk"):
        value = getattr(args, name)
        if value is not None and value < 1:
            yield f"{_flag(name)} is {value}, it must be at least 1"
    first, last = args.t1_first_step, args.train_iters
    if first < 0:
        yield f"--t1-first-step is {first}, it can't be negative"
    if last is not None and last <= first:
        yield f"--train-iters {last} ends before --t1-first-step {first}: it is the step to stop at, not a count"
    if first > 0 and not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        yield (
            "--t1-first-step > 0 continues with another --train-iters, which Megatron's learning rate schedule "
            "refuses: add --override-opt_param-scheduler"
        )
    cut = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    cut *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    if args.pipeline_model_parallel_size > 1 and args.seq_length % cut:
        yield f"--seq-length {args.seq_length} must be a multiple of {cut} for context and sequence parallelism"
    if args.tensor_model_parallel_size > 1 and args.num_experts and not args.sequence_parallel:
        yield "--tensor-model-parallel-size > 1 trains experts only with --sequence-parallel"


def _checkpoints(args: argparse.Namespace) -> Iterator[str]:
    directory = find_checkpoint(args)
    if (args.save or directory) and getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        yield f"--ckpt-format {args.ckpt_format}: heads are stored in torch_dist only"
    if directory is None or args.t1_role != "critic" or has_value_head(directory):
        return
    if not args.finetune and not (args.no_load_optim and args.no_load_rng):
        yield (
            f"{directory} is a policy's checkpoint: its optimizer state doesn't fit a value model; add --finetune to "
            "start the critic from its weights"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
