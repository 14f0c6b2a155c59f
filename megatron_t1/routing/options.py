"""What replay changes in a router besides the choice of experts. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_t1.errors import ConfigError

CHOICES = {
    "aux_loss": ("native", "taken", "off"),
    "z_loss": ("native", "off"),
    "expert_bias": ("frozen", "native", "taken"),
}


@dataclass(frozen=True)
class ReplayOptions:
    """Choices for micro-batches whose routes are replayed; all others are left as Megatron has them.

    "native" are the experts the router would choose now, "taken" those it is made to take.

    Attributes:
        aux_loss: whose load the load balancing loss sees. "native" (default): a loss on the router's own choice falls
            when the router follows it; the taken experts are fixed by the rollout, so a loss on their load keeps
            pushing in one direction however far the router has moved already. This is also what Megatron computes.
            "taken": the load the expert-parallel ranks really have. "off": none.
        z_loss: "native": as configured, from the logits of real tokens; replay doesn't touch it. "off": none.
        expert_bias: whose load moves the bias of bias-balanced routers. "frozen" (default): the bias stays, because
            under replay it doesn't influence the load it is meant to even out, so it drifts (prime-rl#2953). "native":
            the router's own choice, which the bias does influence; costs a top-k. "taken": Megatron's behaviour.
        load: count the taken experts of real tokens, read by `RoutingReplay.take_load`.
        check: look for experts out of range and repeated in each micro-batch's rows before they are replayed. Waits for
            the device once for each micro-batch; rows made by this project's data path are already checked by then.

    Raises:
        ConfigError: an unknown choice; all are listed.
    """

    aux_loss: str = "native"
    z_loss: str = "native"
    expert_bias: str = "frozen"
    load: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        wrong = [
            f"{field.name}={getattr(self, field.name)!r}; known: {', '.join(CHOICES[field.name])}"
            for field in fields(self)
            if field.name in CHOICES and getattr(self, field.name) not in CHOICES[field.name]
        ]
        if wrong:
            raise ConfigError("unknown choices:\n  - " + "\n  - ".join(wrong), where="ReplayOptions")
