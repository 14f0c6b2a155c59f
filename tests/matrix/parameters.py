"""Parameters of any Megatron GPT chunk by a name that is the same in every layout, and how a rank's part is cut.

Written without the Hugging Face mapping, so that a mistake there can't hide one in a layout.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as state
from torch import Tensor, nn

from megatron_t1.config.schema import ArchitectureConfig


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter: slice `rank` of `size` along `dim`; with `sections` of each section of dim 0.

    Attributes:
        sections: relative sizes; (1, 1) where a gated unit has its two matrices in one.
    """

    dim: int | None = None
    rank: int = 0
    size: int = 1
    sections: tuple[int, ...] = ()

    def take(self, full: Tensor) -> Tensor:
        if self.dim is None or self.size == 1:
            return full
        if self.sections:
            unit = len(full) // sum(self.sections)
            parts = full.split([unit * share for share in self.sections])
            return torch.cat([part.chunk(self.size)[self.rank] for part in parts])
        rows = -(-full.shape[self.dim] // self.size)  # a padded vocabulary has zero rows at its end
        part = full.narrow(self.dim, self.rank * rows, min(rows, full.shape[self.dim] - self.rank * rows))
        missing = list(full.shape)
        missing[self.dim] = rows - part.shape[self.dim]
        return torch.cat([part, part.new_zeros(missing)], dim=self.dim)

    def full_shape(self, local: torch.Size) -> list[int]:
        shape = list(local)
        if self.dim is not None:
            shape[self.dim] *= self.size
        return shape


def placed_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter, Cut]]:
    """(global name, parameter, cut) of everything in one chunk; layers from 1 and experts from 0 over all ranks."""
    for name, parameter in chunk.named_parameters():
        expert = ".experts." in name
        size = state.get_expert_tensor_parallel_world_size() if expert else state.get_tensor_model_parallel_world_size()
        rank = state.get_expert_tensor_parallel_rank() if expert else state.get_tensor_model_parallel_rank()
        # A delta net's own parameters have no partition_dim in cores before 0.19.
        dim = getattr(parameter, "partition_dim", 0) if getattr(parameter, "tensor_model_parallel", False) else None
        yield _global_name(chunk, name), parameter, Cut(dim, rank, size, _sections(name, chunk.architecture))


def _sections(name: str, a: ArchitectureConfig) -> tuple[int, ...]:
    """What is stacked along dimension 0 and cut section by section."""
    keys, values = a.linear_num_key_heads * a.linear_key_head_dim, a.linear_num_value_heads * a.linear_value_head_dim
    if name.endswith("linear_fc1.weight"):
        return 1, 1
    if name.endswith("in_proj.weight"):
        return keys, keys, values, values, a.linear_num_value_heads, a.linear_num_value_heads
    return (keys, keys, values) if name.endswith("conv1d.weight") else ()


def initial_value(name: str, shape: list[int]) -> Tensor:
    """float32, a pure function of the global name."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.3 * noise
    return (0.4 if "conv1d" in name else 0.1) * noise


def initialise(chunk: nn.Module, vocab_size: int) -> None:
    """Fill a chunk with weights that don't depend on the layout."""
    with torch.no_grad():
        for name, parameter, cut in placed_parameters(chunk):
            shape = cut.full_shape(parameter.shape)
            if name.startswith(("embedding.word_embeddings", "output_layer.weight")) and shape[0] >= vocab_size:
                shape[0] = vocab_size
            # A tied or replicated embedding (multi-token prediction holds one) has the decoder's values.
            parameter.copy_(cut.take(initial_value(name, shape)))


def _global_name(chunk: nn.Module, name: str) -> str:
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is not None:
        name = f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number}.{match[2]}"
    match = re.match(r"(.*\.local_experts\.)(\d+)(\..*)", name)
    if match is not None:
        per_rank = chunk.config.num_moe_experts // state.get_expert_model_parallel_world_size()
        name = f"{match[1]}{state.get_expert_model_parallel_rank() * per_rank + int(match[2])}{match[3]}"
    return name
