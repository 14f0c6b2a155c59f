"""What an engine's process says about itself in its log, and how the driver reads it: facts that no option states."""

from __future__ import annotations

import re

_ROUTER = re.compile(r"^megatron-t1: router logits are (\w+)$", re.MULTILINE)


def router_line(dtype: str) -> str:
    """What a process writes that has looked at the routers of its loaded model."""
    return f"megatron-t1: router logits are {dtype}"


def router_dtype(log: str) -> str:
    """Type of the router's logits as the processes of an engine state it; "" where none does."""
    return "+".join(sorted(set(_ROUTER.findall(log))))
