"""Parameters of this rank's chunks, each with the Hugging Face tensors it is made of and the ranks it is cut over."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from torch.nn import Module, Parameter

from megatron_t1.errors import ConfigError, MismatchError
from megatron_t1.model.mapping import Source, WeightMapping
from megatron_t1.model.names import HEAD_TENSOR, CheckpointNames
from megatron_t1.model.packing import Packing, Rows
from megatron_t1.model.stored import architecture_from_hf, require_equal_architecture


@dataclass
class Bound:
    """One parameter of this rank and where it comes from."""

    name: str  # in its chunk
    parameter: Parameter
    source: Source
    is_copy: bool = False  # of the embedding, on the last stage of a tied model

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks the parameter is cut over, in the order of their parts."""
        if self.source.is_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def packing(self) -> Packing:
        """How the parameter is made of its tensors; a model may pad its vocabulary further than its ranks need."""
        packing = self.source.packing
        if isinstance(packing, Rows):
            return replace(packing, padded=self.parameter.shape[0] * dist.get_world_size(self.group))
        return packing

    @property
    def in_first_replica(self) -> bool:
        """Whether this rank's group is the one, of all that hold the same values, that speaks for the parameter."""
        if self.is_copy:
            return False
        if self.source.is_expert:
            return parallel_state.get_expert_data_parallel_rank() == 0
        return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def bind(chunks: list[Module], names: CheckpointNames) -> tuple[list[Bound], list[tuple[str, Parameter]]]:
    """Parameters with their sources in a checkpoint that uses `names`, and those of a value head, which have none.

    Raises:
        ConfigError: a parameter, or a buffer that is part of the model's state, that the mapping doesn't know.
    """
    bound: list[Bound] = []
    heads: list[tuple[str, Parameter]] = []
    unknown: list[str] = []
    for chunk in chunks:
        mapping = WeightMapping(chunk.architecture, names)
        experts_here = chunk.architecture.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts_here
        for name, parameter in chunk.named_parameters():
            if chunk.role == "value" and name.startswith("output_layer."):
                heads.append((name, parameter))
                continue
            is_copy = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            origin = "embedding.word_embeddings.weight" if is_copy else name
            source = mapping.source(origin, _global_layer(chunk, name), first_expert)
            if source is None:
                unknown.append(name)
            else:
                bound.append(Bound(name, parameter, source, is_copy))
        unknown += _persistent_buffers(chunk)
    if unknown:
        raise ConfigError(
            f"no Hugging Face tensors are known for {len(unknown)} parameters: {', '.join(unknown[:5])}",
            where="megatron_t1.model.mapping",
            remedy="build one of the supported families",
        )
    return bound, heads


def _persistent_buffers(chunk: Module) -> list[str]:
    """Names of the tensors that belong to the state of a model and aren't trained (a router's bias, say)."""
    return [
        f"{prefix}.{name}"
        for prefix, module in chunk.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _global_layer(chunk: Module, name: str) -> int:
    """Global number, from 0, of the decoder layer a parameter belongs to; 0 for parameters outside the layers."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return 0 if match is None else chunk.decoder.layers[int(match[1])].layer_number - 1


def expected_tensors(chunk: Module, names: CheckpointNames) -> set[str]:
    """Names of the tensors that a checkpoint must have for this model (all its ranks together)."""
    expected = {name for name, _ in WeightMapping(chunk.architecture, names).tensors()}
    if chunk.role == "value" or chunk.architecture.tie_word_embeddings:
        expected.discard(HEAD_TENSOR)
    return expected


def require_same_architecture(chunks: list[Module], directory: Path, role: str) -> None:
    """Raise MismatchError when the directory's config.json, or the role, isn't what the chunks were built from."""
    stored, built = architecture_from_hf(directory), chunks[0].architecture
    if chunks[0].role != role:
        raise MismatchError(f"the model was built as {chunks[0].role!r} and is used as {role!r}", where=str(directory))
    require_equal_architecture(stored, built, where=str(directory / "config.json"))
