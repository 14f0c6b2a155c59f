"""Options of a Megatron model under which replay would be bypassed or would meet the wrong micro-batch."""

from __future__ import annotations

from typing import Any

from megatron_t1.errors import ConfigError

_BYPASSING_BALANCING = ("sinkhorn", "quantile_balancing")


def unsafe_options(config: Any) -> list[str]:
    """One sentence for each option that replay can't live with; empty when there is none.

    Args:
        config: a TransformerConfig of any core version; options it doesn't have are taken as off.
    """

    def value(name: str) -> Any:
        return getattr(config, name, None)

    wrong = []
    if value("moe_router_fusion"):
        wrong.append("moe_router_fusion: the fused kernel chooses experts before replay is asked; set it to False")
    balancing = value("moe_router_load_balancing_type")
    for kind in balancing if isinstance(balancing, list) else [balancing]:
        if kind in _BYPASSING_BALANCING:
            wrong.append(
                f"moe_router_load_balancing_type={kind}: it chooses experts without asking; use none or aux_loss"
            )
    if value("overlap_moe_expert_parallel_comm"):
        wrong.append("overlap_moe_expert_parallel_comm: layers run later than their forward step; set it to False")
    if value("moe_router_force_load_balancing"):
        wrong.append("moe_router_force_load_balancing: scores are random, for benchmarks only; set it to False")
    if _graphs_router(value):
        wrong.append(
            "CUDA graphs over the router would replay the captured micro-batch's routes; leave moe out of them"
        )
    return wrong


def _graphs_router(value: Any) -> bool:
    """Whether a CUDA graph would be captured over a router, in the option names of cores 0.13 to 0.19."""
    if value("external_cuda_graph") or (value("enable_cuda_graph") and not value("cuda_graph_impl")):
        return True
    if value("cuda_graph_impl") in (None, "none"):
        return False
    scope = value("cuda_graph_scope") or []
    names = {getattr(part, "name", str(part)) for part in (scope if isinstance(scope, (list, tuple)) else [scope])}
    return not names or bool(names & {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"})


def refuse_unsafe(config: Any) -> None:
    """Raise ConfigError that names every unsafe option and its remedy."""
    wrong = unsafe_options(config)
    if wrong:
        raise ConfigError("routing replay can't be used with:\n  - " + "\n  - ".join(wrong), where="TransformerConfig")
