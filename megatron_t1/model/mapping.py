"""Which Hugging Face tensors each Megatron parameter is made of, and how. One table for a family; Qwen3-MoE here.

A *packing* knows how the tensors of one parameter are cut over tensor-parallel ranks and laid out in it, in both
directions. Names of the local and of the Transformer Engine layer spec are both in the table.

Shapes: H hidden, I expert intermediate, V vocabulary, A query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_t1.config.schema import ArchitectureConfig

Shape = tuple[int, ...]
Read = Callable[[int, int, int, int], Tensor]  # (tensor of the parameter, dimension, first, last) -> slice


class Packing(Protocol):
    @property
    def shapes(self) -> list[Shape]:
        """Full shapes of the Hugging Face tensors, in the order of the table."""

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        """The parameter of tensor-parallel rank `rank` of `size`."""

    def unpack(self, shards: list[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors, from the parameters of all ranks in rank order."""


@dataclass(frozen=True)
class Whole:
    """The same on every rank (norms, router)."""

    shape: Shape

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        return read(0, 0, 0, self.shape[0])

    def unpack(self, shards: list[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Rows:
    """Cut along dimension 0, padded with zero rows so that every rank has the same number (embedding, output).

    Attributes:
        padded: rows of all ranks together; 0: as few as the ranks allow.
    """

    shape: Shape
    padded: int = 0

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        rows, real = -(-max(self.shape[0], self.padded) // size), self.shape[0]
        part = read(0, 0, min(rank * rows, real), min((rank + 1) * rows, real))
        return torch.cat([part, part.new_zeros(rows - part.shape[0], *self.shape[1:])])

    def unpack(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards)[: self.shape[0]]]


@dataclass(frozen=True)
class Columns:
    """Cut along dimension 1 (attention output, expert down projection)."""

    shape: Shape

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        columns = self.shape[1] // size
        return read(0, 1, rank * columns, (rank + 1) * columns)

    def unpack(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards, dim=1)]


@dataclass(frozen=True)
class Gated:
    """gate [I, H] over up [I, H], each cut along dimension 0."""

    intermediate: int
    hidden: int

    @property
    def shapes(self) -> list[Shape]:
        return [(self.intermediate, self.hidden)] * 2

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        rows = self.intermediate // size
        return torch.cat([read(part, 0, rank * rows, (rank + 1) * rows) for part in (0, 1)])

    def unpack(self, shards: list[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]


@dataclass(frozen=True)
class GroupedQkv:
    """q [A*D, H], k [G*D, H], v [G*D, H] as [q heads of group 0 | k 0 | v 0 | q heads of group 1 ...], cut by group."""

    heads: int
    groups: int
    head_dim: int
    hidden: int

    @property
    def shapes(self) -> list[Shape]:
        return [(count * self.head_dim, self.hidden) for count in (self.heads, self.groups, self.groups)]

    @property
    def _rows(self) -> list[int]:
        """Rows of q, k and v in one group."""
        return [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]

    def pack(self, read: Read, rank: int, size: int) -> Tensor:
        groups = self.groups // size
        parts = []
        for part, rows in enumerate(self._rows):
            first = rank * groups * rows
            parts.append(read(part, 0, first, first + groups * rows).reshape(groups, rows, self.hidden))
        return torch.cat(parts, dim=1).reshape(-1, self.hidden)

    def unpack(self, shards: list[Tensor]) -> list[Tensor]:
        grouped = torch.cat(shards).reshape(self.groups, sum(self._rows), self.hidden)
        return [part.reshape(-1, self.hidden) for part in grouped.split(self._rows, dim=1)]


@dataclass(frozen=True)
class Source:
    """Where one Megatron parameter comes from."""

    names: tuple[str, ...]  # Hugging Face tensors, in the packing's order
    packing: Packing
    is_expert: bool = False  # cut over the expert-tensor-parallel group, and held by one expert-parallel rank


class Qwen3MoeMapping:
    """The table of one architecture. Layer and expert numbers given to it are global and start at 0."""

    def __init__(self, architecture: ArchitectureConfig):
        a = self.architecture = architecture
        hidden, head = (a.hidden_size,), (a.head_dim,)
        self._model: dict[str, tuple[str, Packing]] = {
            "embedding.word_embeddings.weight": ("model.embed_tokens.weight", Rows((a.vocab_size, a.hidden_size))),
            "decoder.final_layernorm.weight": ("model.norm.weight", Whole(hidden)),
            "output_layer.weight": ("lm_head.weight", Rows((a.vocab_size, a.hidden_size))),
        }
        qkv = GroupedQkv(a.num_attention_heads, a.num_key_value_heads, a.head_dim, a.hidden_size)
        self._layer: dict[str, tuple[tuple[str, ...], Packing]] = {
            "input_layernorm.weight": (("input_layernorm.weight",), Whole(hidden)),
            "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), Whole(hidden)),
            "self_attention.linear_qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), qkv),
            "self_attention.linear_proj.weight": (
                ("self_attn.o_proj.weight",),
                Columns((a.hidden_size, a.num_attention_heads * a.head_dim)),
            ),
            "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Whole(head)),
            "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Whole(head)),
            "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Whole(hidden)),
            "mlp.router.weight": (("mlp.gate.weight",), Whole((a.num_experts, a.hidden_size))),
        }
        self._expert: dict[str, tuple[tuple[str, ...], Packing]] = {
            "linear_fc1": (("gate_proj.weight", "up_proj.weight"), Gated(a.moe_intermediate_size, a.hidden_size)),
            "linear_fc2": (("down_proj.weight",), Columns((a.hidden_size, a.moe_intermediate_size))),
        }

    def source(self, name: str, layer: int, first_expert: int) -> Source | None:
        """Where the parameter `name` of a chunk comes from; None when the table doesn't know it.

        Args:
            name: as in `chunk.named_parameters()`, with the chunk's own layer and expert numbers.
            layer: global number of the decoder layer it belongs to (ignored outside the decoder layers).
            first_expert: global number of this rank's first expert.
        """
        if name in self._model:
            tensor, packing = self._model[name]
            return Source((tensor,), packing)
        match = re.fullmatch(r"decoder\.layers\.\d+\.(.+)", name)
        if match is None:
            return None
        prefix = f"model.layers.{layer}."
        expert = re.fullmatch(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+)\.weight|(\w+)\.weight(\d+))", match[1])
        if expert is not None:
            number, part = int(expert[1] or expert[4] or 0), expert[2] or expert[3]
            if part not in self._expert:
                return None
            names, packing = self._expert[part]
            return Source(tuple(f"{prefix}mlp.experts.{first_expert + number}.{n}" for n in names), packing, True)
        if match[1] not in self._layer:
            return None
        names, packing = self._layer[match[1]]
        return Source(tuple(prefix + n for n in names), packing)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Every tensor a complete checkpoint has, lm_head included, with its shape."""
        for name, packing in self._model.values():
            yield name, packing.shapes[0]
        seen = {names: packing for names, packing in self._layer.values()}
        for layer in range(self.architecture.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for names, packing in seen.items():
                yield from ((prefix + name, shape) for name, shape in zip(names, packing.shapes, strict=True))
            for expert in range(self.architecture.num_experts):
                for names, packing in self._expert.values():
                    for name, shape in zip(names, packing.shapes, strict=True):
                        yield f"{prefix}mlp.experts.{expert}.{name}", shape
