"""What runs in a process whose megatron-core is a released or a patched one; results go back as JSON."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

SCORES = {  # keywords of the function that chooses experts
    "softmax": {},
    "softmax before": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, scaled": {"score_function": "sigmoid", "scaling_factor": 2.5},
    "sigmoid with bias": {"score_function": "sigmoid", "expert_bias": True},
    "groups": {"num_groups": 4, "group_topk": 2, "use_pre_softmax": True},
    "sigmoid, bias and groups": {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2},
}
TOKENS, EXPERTS, TOP_K, HIDDEN = 12, 8, 4, 16


def where() -> str:
    import megatron.core

    return megatron.core.__file__


def seam() -> dict[str, Any]:
    """Each way of scoring, with nobody asked, with own choices handed back, and with foreign experts handed back."""
    choose = _choose()
    askers = ("nobody", "own", "foreign")
    return {name: {who: _ask(choose, keywords, who) for who in askers} for name, keywords in SCORES.items()}


def _choose():
    from megatron.core.transformer.moe import moe_utils

    name = "topk_routing_with_score_function"
    return getattr(moe_utils, name, None) or moe_utils.topk_softmax_with_capacity


def _ask(choose, keywords: dict[str, Any], who: str) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator).requires_grad_()
    if keywords.get("expert_bias"):
        keywords = keywords | {"expert_bias": torch.randn(EXPERTS, generator=generator)}
    foreign = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    asked = []

    class Replay:
        def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
            own, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            asked.append([scores.tolist(), topk, num_groups, group_topk, own.tolist(), indices.tolist()])
            return (own, indices) if who == "own" else (scores.gather(1, foreign), foreign)

    given = {} if who == "nobody" else {"router_replay": Replay()}
    probs, routing_map = choose(logits, TOP_K, **keywords, **given)[:2]
    (probs * torch.arange(1.0, EXPERTS + 1)).square().sum().backward()
    return {"probs": probs.tolist(), "map": routing_map.tolist(), "grad": logits.grad.tolist(), "asked": asked}


def gating() -> list[float] | str:
    """The router's linear layer without Transformer Engine: its gradient, or the name of the error."""
    import inspect

    import torch
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    x, weight = torch.ones(2, 3, requires_grad=True), torch.arange(6.0).reshape(2, 3).requires_grad_()
    bias = (None,) if "bias" in inspect.signature(router_gating_linear).parameters else ()
    try:
        router_gating_linear(x, weight, *bias, torch.float32).sum().backward()
    except NameError as error:
        return type(error).__name__
    return x.grad[0].tolist()


def expert_bias() -> list[float] | str:
    """Tokens per expert with the last two of six tokens padding, or the error."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(4))
    chosen = torch.zeros(6, 4, dtype=torch.bool)
    chosen[:, 0], chosen[::2, 1], chosen[1::2, 2] = True, True, True
    padding = torch.tensor([False] * 4 + [True] * 2)
    try:
        TopKRouter._apply_expert_bias(router, chosen, padding_mask=padding)
    except RuntimeError as error:
        return type(error).__name__
    return router.local_tokens_per_expert.tolist()


def refusals() -> dict[str, str]:
    """What a router with a replay object does where its experts are chosen elsewhere: "ignored", or the error."""
    import torch
    from megatron.core.transformer.moe import moe_utils

    def fused(logits, **_):
        return torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)

    moe_utils.HAVE_TE, moe_utils.fused_topk_with_score_function = True, fused
    cases = {
        "aux_loss": {},
        "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
        "fused": {"moe_router_fusion": True},
        "quantile": {"moe_router_load_balancing_type": "quantile_balancing"},
    }
    outcome = {}
    for name, options in cases.items():
        asked = []

        class Replay:
            def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
                asked.append(topk)  # noqa: B023
                return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        try:
            router = _router(**options)
        except Exception as error:  # this core doesn't know the option
            outcome[name] = f"unknown: {type(error).__name__}"
            continue
        router.router_replay = Replay()
        try:
            router(_inputs())
            outcome[name] = "asked" if asked else "ignored"
        except ValueError as error:
            outcome[name] = str(error)
    try:
        choose = _choose()
        choose(torch.randn(TOKENS, EXPERTS), TOP_K, fused=True, router_replay=Replay())
        outcome["function"] = "ignored"
    except (ValueError, TypeError) as error:
        outcome["function"] = str(error)
    return outcome


def _inputs():
    import torch

    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(5))


def _router(**options: Any):
    import torch
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        add_bias_linear=False,
        use_cpu_initialization=True,
        moe_aux_loss_coeff=options.pop("moe_aux_loss_coeff", 0.0),
        **options,
    )
    new = hasattr(moe_utils, "get_default_pg_collection")
    groups = moe_utils.get_default_pg_collection() if new else moe_utils.get_default_model_comm_pgs()
    router = TopKRouter(config, **{"pg_collection" if new else "model_comm_pgs": groups})
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(7)))
    return router


def alone() -> dict[str, Any]:
    """Everything one process can say."""
    from megatron_t1.config.schema import LayoutConfig
    from megatron_t1.model.parallel import initialize_parallel
    from tests.tiny_model import cpu_backend

    said = {"where": where(), "gating": gating()}
    initialize_parallel(LayoutConfig(processes=1, expert=1), cpu_backend(), seed=0)
    from megatron.core.transformer.moe.router import TopKRouter

    said["expert_bias"] = expert_bias() if hasattr(TopKRouter, "_apply_expert_bias") else None
    try:
        said["seam"] = seam()
    except TypeError as error:
        said["seam"] = str(error)
    said["refusals"] = refusals()
    return said


def auxiliary_gradients(tensor: int = 1, context: int = 1) -> dict[str, list[float]]:
    """The router's gradient from the auxiliary and from the z loss alone, as a step with per-token loss has it.

    That is: summed over the ranks that share a micro-batch, divided by all its tokens.
    """
    import torch
    from megatron.core import parallel_state

    from megatron_t1.config.schema import LayoutConfig
    from megatron_t1.model.parallel import initialize_parallel
    from tests.tiny_model import cpu_backend

    ranks = tensor * context
    layout = LayoutConfig(processes=ranks, tensor=tensor, context=context, expert=tensor)
    initialize_parallel(layout, cpu_backend(), seed=0)
    shared = {
        "calculate_per_token_loss": True,
        "sequence_parallel": tensor > 1,
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "expert_model_parallel_size": tensor,
    }
    found = {}
    for name, options in {
        "aux": {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss"},
        "z": {"moe_z_loss_coeff": 1.0, "moe_router_load_balancing_type": "none"},
    }.items():
        router = _router(**shared, **options)
        mine = _inputs().chunk(ranks)[torch.distributed.get_rank() if ranks > 1 else 0]
        probs, _ = router(mine)
        (probs * 0).sum().backward()
        gradient = router.weight.grad
        if ranks > 1:
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_and_context_parallel_group())
        found[name] = (gradient / TOKENS).flatten().tolist()
    return found
