"""Options of a Megatron model under which replay would be bypassed, undone, or would meet the wrong micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_t1.errors import ConfigError

Value = Callable[[str], Any]
_BYPASSING_BALANCING = ("sinkhorn", "quantile_balancing")
# Parts of a layer that a CUDA graph may be captured over and that hold a router.
_PARTS_WITH_ROUTER = {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"}
# Options of cores 0.13 to 0.19 that are off when they are false or None: name, and why not and what instead.
_MUST_BE_OFF = {
    "moe_router_fusion": "the fused kernel chooses experts before replay is asked; set it to False",
    "overlap_moe_expert_parallel_comm": "layers run later than their forward step; set it to False",
    "moe_router_force_load_balancing": "scores are random, for benchmarks only; set it to False",
    "moe_router_force_biased": "scores are shifted at random, for benchmarks only; set it to None",
    "moe_expert_capacity_factor": "experts over capacity drop tokens that the sampler routed to them; set it to None",
    "moe_expert_rank_capacity_factor": "ranks over capacity drop tokens that the sampler routed there; set it to None",
    "moe_enable_routing_replay": "the core's own replay is fed through the same attribute; set it to False",
    "use_inference_optimized_layers": "its router chooses in a compiled function; set it to False",
}


def unsafe_options(config: Any) -> list[str]:
    """One sentence for each option that replay can't live with; empty when there is none.

    Args:
        config: a TransformerConfig of any core version; options it doesn't have are taken as off.
    """

    def value(name: str) -> Any:
        return getattr(config, name, None)

    def on(name: str) -> bool:
        return value(name) is not None and value(name) is not False  # a factor of 0.0 is on

    wrong = [f"{name}: {why}" for name, why in _MUST_BE_OFF.items() if on(name)]
    balancing = value("moe_router_load_balancing_type")
    for kind in balancing if isinstance(balancing, (list, tuple)) else [balancing]:
        if kind in _BYPASSING_BALANCING:
            wrong.append(
                f"moe_router_load_balancing_type={kind}: it chooses experts without asking; use none or aux_loss"
            )
    if value("transformer_impl") == "inference_optimized":
        wrong.append("transformer_impl=inference_optimized: its router is compiled; use transformer_engine or local")
    option = _graph_over_router(value)
    if option:
        wrong.append(
            f"{option}: CUDA graphs over the router would replay the captured micro-batch's routes; capture attn only, "
            "or set cuda_graph_impl to none"
        )
    return wrong


def _graph_over_router(value: Value) -> str:
    """The options by which a CUDA graph would be captured over a router, in the names of cores 0.13 to 0.19; or ""."""
    if value("cuda_graph_impl") not in (None, "none"):
        option = f"cuda_graph_impl={value('cuda_graph_impl')}"
    elif value("enable_cuda_graph"):
        return "enable_cuda_graph=True"
    elif value("external_cuda_graph"):
        option = "external_cuda_graph=True"
    else:
        return ""
    if value("cuda_graph_impl") == "full_iteration":
        return option
    name = "cuda_graph_scope" if value("cuda_graph_modules") is None else "cuda_graph_modules"  # renamed in 0.18
    parts = value(name)
    parts = parts.split(",") if isinstance(parts, str) else [] if parts is None else parts
    names = {getattr(part, "name", str(part)) for part in (parts if isinstance(parts, (list, tuple)) else [parts])}
    if names and not names & _PARTS_WITH_ROUTER:
        return ""  # nothing but attention, dense layers or inference
    return f"{option}, {name}={','.join(sorted(names)) or '(whole layers)'}"


def refuse_unsafe(config: Any) -> None:
    """Raise ConfigError that names every unsafe option and its remedy."""
    wrong = unsafe_options(config)
    if wrong:
        raise ConfigError("routing replay can't be used with:\n  - " + "\n  - ".join(wrong), where="TransformerConfig")
