"""`t1 tasks generate`, `t1 tasks demonstrate`, `t1 model init`: what a training starts from."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.configuration import command_config, print_config
from megatron_t1.config.validate import check

TOKENIZER_SEED = 0


def _unset(option: str, value: str) -> list[str]:
    """An empty path would mean the working directory."""
    return [] if value else [f"{option} is not set: name a directory to write to"]


def generate(invocation: Invocation) -> int:
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config)
    check(config, more=_unset("generate.out", config.generate.out))
    from megatron_t1.environment.generate.sets import generate_sets

    out = Path(config.generate.out).resolve()
    asyncio.run(generate_sets(config.generate, config.run.seed, out, sandbox=config.env.sandbox))
    print(f"tasks: {out / 'train'} and {out / 'held_out'}")
    return 0


def demonstrate(invocation: Invocation) -> int:
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config)
    check(config, ("model.path",))
    from megatron_t1.rollout.demonstrate import run_demonstrate

    out = Path(config.train.sft.demonstrations or Path(config.generate.out) / "demonstrations").resolve()
    run_demonstrate(config, out)
    print(f"demonstrations: {out}")
    return 0


def init_model(invocation: Invocation) -> int:
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config)
    check(config, more=_unset("model.path", config.model.path))
    from megatron_t1.model.initial import create_initial_model
    from megatron_t1.rollout.demonstrate import tokenizer_corpus

    out = Path(config.model.path)
    # One tokenizer for all seeds of the weights: demonstrations are token ids, and serve all of them.
    corpus = tokenizer_corpus(config.generate, TOKENIZER_SEED)
    create_initial_model(out, config.model, config.run.seed, corpus)
    print(f"model: {out}")
    return 0
