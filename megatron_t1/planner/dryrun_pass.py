"""One micro-batch forward and backward through a rank's chunks on the meta device: every shape meets its partner's.

Tensor, sequence and context parallel collectives, the experts' all-to-all, the passing of activations to the next
stage, the vocabulary projection in chunks and the value head all run as code; only numbers are missing. Routing depends
on numbers, so here every expert takes an equal share of the tokens (capacity 1, padded).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module

from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.model.backend import Backend
from megatron_t1.model.build import build_model
from megatron_t1.planner.dryrun_batch import sample_batch
from megatron_t1.planner.dryrun_report import PassFindings
from megatron_t1.training.batch import MicroBatch, build_micro_batch
from megatron_t1.training.passes import configured_logprobs, layout_sizes, packed_sequences, read_values

TOKENS = 256  # positions of the micro-batch, before what parallel sizes need


def forward_backward(config: Config, backend: Backend, role: str) -> PassFindings:
    """Run every chunk of this rank once.

    Raises:
        T1Error: a chunk puts out another shape than the next stage, or the loss, takes.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401  (kernels of collectives for the meta device)

    began = time.perf_counter()
    config = replace(config, layout=replace(config.layout, dispatcher="alltoall"))  # the one that takes a capacity
    equal_shares = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    chunks = build_model(config, backend, role, initialize=False, **equal_shares)
    batch = _micro_batch(config, backend, chunks[0])
    # What Megatron makes without a device (counts of tokens, boundaries) are numbers it then reads: real ones.
    with _indices_on_meta(), torch.device("cpu"):
        for chunk in chunks:
            _run(chunk, batch, role, config)
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    without = [name for name, parameter in named if parameter.grad is None]
    return PassFindings(batch.layout.total, without, time.perf_counter() - began)


def _micro_batch(config: Config, backend: Backend, chunk: Module) -> MicroBatch:
    architecture = config.model.architecture
    every = sample_batch(1, 1, architecture.num_experts, architecture.num_experts_per_tok)
    sizes = layout_sizes(sequence_parallel=bool(chunk.config.sequence_parallel))
    multiple = config.layout.stream_multiple
    sizes["total_multiple"] = -(-TOKENS // multiple) * multiple
    return build_micro_batch(every, layout_sizes=sizes, route_shape=None, device=backend.device)


def _run(chunk: Module, batch: MicroBatch, role: str, config: Config) -> None:
    split = config.layout.tensor if chunk.config.sequence_parallel else 1
    rows = batch.layout.local_total // split
    between = (rows, 1, chunk.config.hidden_size)
    if not chunk.pre_process:
        received = torch.zeros(between, dtype=chunk.config.pipeline_dtype, device="meta", requires_grad=True)
        chunk.set_input_tensor(received)
    packed = packed_sequences(batch.layout, torch.device("cpu"))
    output = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=packed)
    expected = between
    if chunk.post_process:
        total = batch.layout.local_total
        expected = (1, rows, chunk.config.hidden_size) if role == "policy" else (1, total)
    if tuple(output.shape) != expected:
        raise T1Error(f"a chunk puts out {list(output.shape)}, expected {list(expected)}", where="dry run, forward")
    _loss(chunk, output, batch, role, config).backward()
    if not chunk.pre_process and received.grad is None:
        raise T1Error("the previous stage gets no gradient", where="dry run, backward")


def _loss(chunk: Module, output: Tensor, batch: MicroBatch, role: str, config: Config) -> Tensor:
    """Of the last stage: what the phase reads, summed; elsewhere any number that every output has a part in."""
    if not chunk.post_process:
        return output.float().sum()
    if role == "value":
        return read_values(output, batch)["values"].sum()
    return configured_logprobs(chunk, output, batch, config)["logprobs"].sum()


@contextlib.contextmanager
def _indices_on_meta() -> Iterator[None]:
    """Where the gated delta net computes indices from real boundaries, they follow its data to the meta device."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core.ssm.gated_delta_net") and hasattr(module, "_build_thd_cp_a2a_perm"):
                build = module._build_thd_cp_a2a_perm

                def moved(*args, build=build, **kwargs):
                    return tuple(index.to("meta") for index in build(*args, **kwargs))

                stack.enter_context(mock.patch.object(module, "_build_thd_cp_a2a_perm", moved))
        yield
