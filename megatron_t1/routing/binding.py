"""Which routers a model has: found in its built modules, keyed by global layer number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_t1.errors import ConfigError, T1Error

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter


def moe_layers(config: Any) -> list[int]:
    """Global numbers, from 1, of the decoder layers with experts, from Megatron's configuration (verl#5452)."""
    if not config.num_moe_experts:
        return []
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(config.num_layers)]
    return [number + 1 for number, has_experts in enumerate(pattern) if has_experts]


def innermost(chunk: nn.Module) -> nn.Module:
    """The model inside DDP or Float16Module."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def decoder_routers(chunk: nn.Module) -> dict[int, TopKRouter]:
    """Routers of the decoder by global layer number, from the modules as they are now (miles#2570).

    Routers of multi-token prediction are left out: their layers are numbered from 1 again (Megatron-LM#7404).

    Raises:
        ConfigError: the router never asks for routes, or asks only on some of its paths.
        T1Error: a router without a number, or two with the same.
    """
    routers: dict[int, TopKRouter] = {}
    for name, router in _routers(chunk):
        if "mtp" in name.split(".") or getattr(router, "is_mtp_layer", False):
            continue
        if not hasattr(router, "router_replay"):
            raise ConfigError(
                "this megatron-core's router doesn't ask anybody for routes",
                where=name,
                remedy="use megatron-core 0.16 or later, or `t1 patch apply --only router_replay` on an older one",
            )
        if hasattr(router, "_compiled_topk_routing"):
            raise ConfigError(
                f"{type(router).__name__} routes in a compiled function while it samples, which may keep an old choice",
                where=name,
                remedy="build the model with transformer_impl=transformer_engine or local",
            )
        number = router.layer_number
        if number is None or number in routers:
            raise T1Error(f"two routers (or one without) have layer number {number}", where=name)
        routers[number] = router
    return routers


def layers_without_router(chunk: nn.Module, layers: list[int], found: dict[int, Any]) -> list[int]:
    """Decoder layers of this chunk that should have experts by `layers` and have no router."""
    stack = getattr(getattr(innermost(chunk), "decoder", None), "layers", ())
    here = {getattr(layer, "layer_number", None) for layer in stack}
    return sorted(here & set(layers) - set(found))


def _routers(chunk: nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    try:
        from megatron.core.transformer.moe.router import TopKRouter
    except ImportError as error:
        raise ConfigError(
            f"megatron-core can't be imported: {error}", where="routing replay", remedy="install megatron-core"
        ) from error
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter):
            yield name, module
