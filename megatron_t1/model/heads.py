"""What a policy and a value model have instead of logits at the last pipeline stage.

A policy returns hidden states after the final norm: log-probabilities are computed from them in chunks, only for tokens
that carry loss, so no [tokens, vocabulary] tensor ever exists. A value model returns one number for each token.

Shapes: b sequences, s tokens (s/tp of this rank under sequence parallelism), H hidden size, V vocabulary padded to tp.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

VALUE_HEAD_KEY = "value_head"


class HiddenPassThrough(ColumnParallelLinear):
    """An output layer that keeps its weight (and its checkpoint entry) and hands the hidden states through."""

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """[s/tp, b, H] -> [s/tp, b, H]."""
        return input_, None


class PolicyModel(GPTModel):
    """A GPT whose last stage returns hidden states after the final norm, [b, s/tp, H]; see `loss_hidden`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        as_policy(self)


def as_policy(model: GPTModel) -> GPTModel:
    """Make a built GPT, of whatever class, return hidden states as `PolicyModel` does."""
    if model.post_process:
        model.output_layer.__class__ = HiddenPassThrough
    return model


class ValueHead(torch.nn.Module):
    """hidden -> 1, computed in fp32, zero at the start, replicated over tensor-parallel ranks.

    The parameters have the model's type (the optimizer keeps fp32 copies): Megatron's bf16 optimizer can't checkpoint a
    group in which types are mixed.

    Under sequence parallelism a rank computes the values of its own tokens and the values (not the hidden states) are
    gathered; the parameters' gradients are then partial sums, which Megatron adds up for parameters so marked.

    Attributes:
        stored: False while a checkpoint without a head is loaded (a policy's): the head then keeps what it holds.
    """

    def __init__(self, config: Any, tensor_group: Any):
        super().__init__()
        self.stored = True
        self.sequence_parallel = config.sequence_parallel
        self.tensor_group = tensor_group
        self.weight = Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel
            parameter.allreduce = True

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """[s/tp, b, H] -> float32 [s, b]."""
        values = F.linear(input_.float(), self.weight.float(), self.bias.float()).squeeze(-1)
        if self.sequence_parallel:
            # The loss is computed alike on every rank, so a rank's gradient is its slice, not a sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tensor_group
            )
        return values, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Entries under a key of their own, so that a policy's checkpoint never passes for a value model's."""
        state = self.state_dict(prefix="", keep_vars=True)
        if not self.stored:
            return {f"{prefix}{name}": LocalNonpersistentObject(value) for name, value in state.items()}
        groups = {}
        if "tp_group" in inspect.signature(make_sharded_tensors_for_checkpoint).parameters:  # core 0.16 and later
            groups = {"tp_group": self.tensor_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        entries = make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, **groups)
        for name in ("weight", "bias"):
            entries[f"{prefix}{name}"].key = f"{VALUE_HEAD_KEY}.{name}"
        return entries


class _ValueEntries:
    """Checkpoint entries of a GPT with a value head."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.post_process:  # the parent expects a padded vocabulary here; a scalar head has one shape only
            for name in ("weight", "bias"):
                entries[f"{prefix}output_layer.{name}"].allow_shape_mismatch = False
        return entries


class ValueModel(_ValueEntries, GPTModel):
    """A GPT whose last stage returns values, float32 [b, s]. It has no vocabulary projection and ties nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ValueHead(self.config, parallel_state.get_tensor_model_parallel_group())


def as_value_model(model: GPTModel) -> GPTModel:
    """Make a built GPT, of whatever class, return values as `ValueModel` does. It must be untied."""
    if model.share_embeddings_and_output_weights:
        raise ValueError("a value model has no vocabulary projection to tie: build the model untied")
    if model.post_process:
        model.output_layer = ValueHead(model.config, parallel_state.get_tensor_model_parallel_group())
    model.__class__ = type(f"Value{type(model).__name__}", (_ValueEntries, type(model)), {})
    return model


def value_heads(chunks: list[GPTModel]) -> list[ValueHead]:
    """The head, on the rank that has one."""
    return [chunk.output_layer for chunk in chunks if isinstance(getattr(chunk, "output_layer", None), ValueHead)]


def set_value_bias(chunks: list[GPTModel], bias: float) -> None:
    """Start a value model at a constant: its head's bias, on the rank that has the head."""
    for head in value_heads(chunks):
        with torch.no_grad():
            head.bias.fill_(bias)


def output_weight(chunk: GPTModel) -> Parameter:
    """[V/tp, H]: the vocabulary projection of a policy's last chunk, tied or not. See `vocabulary_rows`."""
    if not isinstance(getattr(chunk, "output_layer", None), HiddenPassThrough):
        raise ValueError("only the last pipeline chunk of a policy has an output weight")
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight


def vocabulary_rows(chunk: GPTModel) -> tuple[int, int]:
    """(first, count): ids that this rank's rows of `output_weight` stand for. Rows behind `count` are padding.

    The last ranks may have fewer rows, or none, where the vocabulary is padded; padding must stay out of a softmax.
    """
    rows = output_weight(chunk).shape[0]
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    return first, max(0, min(rows, chunk.architecture.vocab_size - first))


def loss_hidden(chunk: GPTModel, hidden: Tensor) -> Tensor:
    """Hidden states ready to be multiplied by this rank's `output_weight`: [b, s/tp, H] -> [b, s, H].

    Every rank projects all tokens onto its own part of the vocabulary, so in backward the ranks' partial gradients are
    summed: reduce-scattered under sequence parallelism, all-reduced otherwise.
    """
    config, group = chunk.config, parallel_state.get_tensor_model_parallel_group()
    if config.sequence_parallel:
        gathered = gather_from_sequence_parallel_region(
            hidden.transpose(0, 1).contiguous(), tensor_parallel_output_grad=True, group=group
        )
        return gathered.transpose(0, 1)
    if config.tensor_model_parallel_size > 1:
        return copy_to_tensor_model_parallel_region(hidden, group=group)
    return hidden
