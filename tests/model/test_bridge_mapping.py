"""Our tables against Megatron-Bridge's: the same tensors for every parameter of a tiny model, and the same numbers.

Needs a Python environment with megatron-bridge and the Megatron-Core it wants; skipped with the reason elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from megatron_t1.model.names import CheckpointNames
from tests.hybrid_model import HYBRID, write_hybrid
from tests.tiny_model import ARCHITECTURE, tiny_config, write_hf

# Bridge looks at a module's class to know how its parameters are cut; these are ours.
OUR_MODULES = {"TorchRMSNorm": "replicated", "DeltaNet": "column", "HiddenPassThrough": "column"}


def bridge_registry(family: str, fused: bool):
    """Bridge's table of a family."""
    try:
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
        from megatron.bridge.models.conversion.param_mapping import AutoMapping
        from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge
        from megatron.bridge.models.qwen.qwen35_bridge import Qwen35MoEBridge
    except Exception as error:  # whatever the environment lacks of what Bridge imports
        pytest.skip(f"Megatron-Bridge can't be imported: {type(error).__name__}: {error}")
    for name, kind in OUR_MODULES.items():
        AutoMapping.register_module_type(name, kind)
    if family == "qwen3_moe":
        return Qwen3MoEBridge().mapping_registry()
    return MegatronMappingRegistry(*Qwen35MoEBridge._get_moe_lm_mappings(experts_packed=fused))


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [(ARCHITECTURE, False), (HYBRID, False), (HYBRID, True)],
    ids=["qwen3", "3.5", "3.5 fused"],
)
def test_every_parameter_has_the_numbers_that_bridge_gives_it(tmp_path, backend, architecture, fused):
    registry = bridge_registry(architecture.family, fused)
    from megatron_t1.model.binding import bind
    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import load_hf

    if architecture.family == "qwen3_moe":
        write_hf(tmp_path / "hf", architecture)
    else:
        write_hybrid(tmp_path / "hf", architecture, fused=fused)
    chunks = build_model(tiny_config(architecture=architecture), backend, "policy", initialize=False)
    load_hf(chunks, tmp_path / "hf", "policy")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    bound, _ = bind(chunks, CheckpointNames(fused_experts=fused))
    assert len(bound) == len(list(chunks[0].parameters()))
    for item in bound:
        mapping = registry.megatron_to_hf_lookup(item.name)
        assert mapping is not None, item.name
        names = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        assert set(names.values()) == set(item.source.names), item.name
        weights = {part: tensors[name] for part, name in names.items()}
        module = chunks[0].get_submodule(item.name.rpartition(".")[0])
        if not hasattr(module, "config"):  # a convolution of torch: Bridge takes what loading puts there
            module.config = chunks[0].config
        theirs = mapping.hf_to_megatron(weights if "" not in weights else weights[""], module)
        assert torch.equal(theirs, item.parameter.detach()), item.name
