"""This project's three pieces inside a stock Megatron-LM checkout: token records, routing replay, PPO's two losses.

`t1 patch apply --checkout DIR` puts two calls into the checkout's own code, one in its argument parser and one at the
start of its `pretrain`; both lead here. Without `--t1-role` they change nothing. docs/checkout.md shows its use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PATCH = "checkout_plugin"


def add_arguments(parser: Any) -> Any:
    """Add the argument group `--t1-...` to the checkout's argparse parser and return the parser."""
    from megatron_t1.checkout.options import add_arguments as add

    return add(parser)


def plug_in(dataset_provider: Callable, model_provider: Callable | None, forward_step: Callable) -> tuple:
    """The three callables `pretrain` is given, each as it was and, with `--t1-role`, this project's instead."""
    from megatron_t1.checkout.plugin import Plugin

    plugin = Plugin(dataset_provider, model_provider, forward_step)
    return plugin.datasets, plugin.model, plugin.forward_step
