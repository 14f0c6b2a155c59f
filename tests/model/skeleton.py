"""A chunk of a rank with nothing in it but its parameters: for conversion in any layout, of any family, without a core
that can build the layers."""

from __future__ import annotations

import torch
from torch import nn

from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.model.mapping import WeightMapping


def skeleton(architecture: ArchitectureConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What this rank of the current parallel state holds of a policy; A_log and out_norm in fp32, as stored."""
    from megatron.core import parallel_state as state

    stages, stage = state.get_pipeline_model_parallel_world_size(), state.get_pipeline_model_parallel_rank()
    layers = architecture.num_hidden_layers // stages
    experts = architecture.num_experts // state.get_expert_model_parallel_world_size()
    first = state.get_expert_model_parallel_rank() * experts
    chunk = nn.Module()
    chunk.architecture, chunk.role = architecture, "policy"
    chunk.share_embeddings_and_output_weights = architecture.tie_word_embeddings
    held = range(stage * layers, (stage + 1) * layers), range(first, first + experts)
    for name, source in WeightMapping(architecture).parameters(*held):
        group = state.get_expert_tensor_parallel_group if source.is_expert else state.get_tensor_model_parallel_group
        size = group().size()

        def read(part, dimension, first, last, shapes=source.shapes):
            shape = list(shapes[part])
            shape[dimension] = last - first
            return torch.empty(shape, device="meta")

        shape = source.packing.pack(read, 0, size).shape
        kept = dtype if not name.endswith(("A_log", "out_norm.weight")) else torch.float32
        _place(chunk, name, nn.Parameter(torch.zeros(shape, dtype=kept)))
    for number in range(layers):
        chunk.decoder.layers[number].layer_number = stage * layers + number + 1
    return chunk


class _Layers(nn.Module):
    def __getitem__(self, number: int) -> nn.Module:
        return getattr(self, str(number))


def _place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, _Layers() if part == "layers" else nn.Module())
        root = getattr(root, part)
    root.register_parameter(last, parameter)
