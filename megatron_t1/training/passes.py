"""Passes of micro-batches through a model by Megatron's schedules, and what is read from their outputs.

Nothing here knows an optimizer or who owns the training loop: the engine of the training phases and a patched
Megatron-LM checkout (megatron_t1.checkout) share it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_t1.config.schema import Config
from megatron_t1.model.heads import loss_hidden, output_weight, vocabulary_rows
from megatron_t1.ppo.logprobs import token_logprobs
from megatron_t1.ppo.sums import Sums
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.training.batch import MicroBatch
from megatron_t1.trajectory.layout import TokenLayout

LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Sums]]  # loss sum and metric sums
TokenReader = Callable[[torch.Tensor, MicroBatch], dict[str, torch.Tensor]]  # float32 [n] for each name
Reduction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Sums]]  # loss sum, loss tokens, metric sums


def packed_forward(module: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """One chunk's forward over a packed micro-batch; no labels, so that the head's output comes back."""
    packed = packed_sequences(batch.layout, batch.tokens.device)
    return module(batch.tokens, batch.position_ids, None, packed_seq_params=packed)


def packed_sequences(layout: TokenLayout, device: torch.device) -> PackedSeqParams:
    """Where each sequence of a micro-batch begins, as Megatron's layers take it."""
    boundaries = torch.from_numpy(layout.cu_seqlens).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_kv=layout.max_seqlen,
    )


def micro_step(
    module: torch.nn.Module, batch: MicroBatch, loss: LossFunction, replay: RoutingReplay | None
) -> tuple[torch.Tensor, Reduction]:
    """What a schedule's forward step returns: the chunk's output, and the function that makes a loss of it.

    Args:
        module: a chunk, bare or wrapped; one of those `replay` was made for.
        batch: without routes the routers choose natively.
        replay: None: nothing is bound to the routers, and no batch has routes.
    """
    if replay is None:
        if batch.routes is not None:
            raise RuntimeError("a micro-batch has routes, and nothing that replays them")
        output = packed_forward(module, batch)
    else:
        with contextlib.nullcontext() if batch.routes is not None else replay.native():
            output = replay.run(module, batch.routes, lambda: packed_forward(module, batch))

    def reduce(result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        total, sums = loss(result, batch)
        total = total + result.sum() * 0.0  # a micro-batch without loss tokens still has a backward pass
        return total, torch.tensor(len(batch.positions), dtype=torch.int, device=result.device), sums

    return output, reduce


def run_schedule(
    modules: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    loss: LossFunction,
    replay: RoutingReplay | None,
    *,
    forward_only: bool,
) -> list[Sums]:
    """All micro-batches through all chunks of this rank; metric sums of each, on the last stage only."""
    if not batches:
        raise RuntimeError("a pass needs at least one micro-batch on every rank")

    def forward_step(iterator: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[torch.Tensor, Reduction]:
        return micro_step(module, next(iterator), loss, replay)

    iterators: Any = [iter(batches) for _ in modules]
    several = len(modules) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=list(modules) if several else modules[0],
        num_microbatches=len(batches),
        seq_length=batches[0].layout.total,
        micro_batch_size=1,
        forward_only=forward_only,
    )


@torch.no_grad()
def score(
    modules: Sequence[torch.nn.Module], batches: Sequence[MicroBatch], read: TokenReader, replay: RoutingReplay | None
) -> list[dict[str, torch.Tensor]]:
    """Per-loss-token numbers of each micro-batch: float32 [N] for every name `read` returns, on every rank."""
    training = [module.training for module in modules]
    for module in modules:
        module.eval()
    collected: list[dict[str, torch.Tensor]] = []

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        scattered = {}
        for name, values in read(output, batch).items():
            full = torch.zeros(batch.count, dtype=torch.float32, device=values.device)
            full[batch.ordinals] = values.float()
            scattered[name] = full
        collected.append(scattered)
        return output.new_zeros(()), {}

    run_schedule(modules, batches, loss, replay, forward_only=True)
    for module, was_training in zip(modules, training, strict=True):
        module.train(was_training)
    names = names_everywhere({name for part in collected for name in part})
    results = []
    for index, batch in enumerate(batches):
        result = {}
        for name in names:
            full = (
                collected[index][name]
                if collected
                else torch.zeros(batch.count, dtype=torch.float32, device=batch.tokens.device)
            )
            if parallel_state.get_context_parallel_world_size() > 1:
                dist.all_reduce(full, group=parallel_state.get_context_parallel_group())
            if parallel_state.get_pipeline_model_parallel_world_size() > 1:
                dist.broadcast(
                    full,
                    src=parallel_state.get_pipeline_model_parallel_last_rank(),
                    group=parallel_state.get_pipeline_model_parallel_group(),
                )
            result[name] = full.cpu()
        results.append(result)
    return results


def layout_sizes(*, sequence_parallel: bool) -> dict[str, int | bool]:
    """This rank's place in its replica, as `TokenLayout` takes it."""
    return {
        "context_size": parallel_state.get_context_parallel_world_size(),
        "context_rank": parallel_state.get_context_parallel_rank(),
        "tensor_size": parallel_state.get_tensor_model_parallel_world_size(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "sequence_parallel": sequence_parallel,
    }


def speaks_for_replica() -> bool:
    """Whether this is the one process of its data-parallel replica that writes the replica's per-token numbers."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def missing_micro_batches(count: int) -> int:
    """How many to add: interleaved pipeline stages take micro-batches in rounds of the pipeline's size."""
    interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    return -count % parallel_state.get_pipeline_model_parallel_world_size() if interleaved else 0


def names_everywhere(own: Iterable[str]) -> list[str]:
    """Names known on any rank, in one order. Only pipeline stages without a loss know none and must be told."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return sorted(own)
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, sorted(own))
    return sorted({name for names in gathered for name in names})


def configured_logprobs(
    chunk: torch.nn.Module, hidden: torch.Tensor, batch: MicroBatch, config: Config
) -> dict[str, torch.Tensor]:
    """`read_logprobs` at the rollout's temperature, with the options of training."""
    return read_logprobs(
        chunk,
        hidden,
        batch,
        temperature=config.rollout.temperature,
        projected_at_once=config.train.logprob_chunk,
        wide=config.train.head_dtype == "float32",
    )


def read_logprobs(
    chunk: torch.nn.Module,
    hidden: torch.Tensor,
    batch: MicroBatch,
    *,
    temperature: float,
    projected_at_once: int,
    wide: bool = False,
    rounded: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Log-probs (and entropies) of this rank's loss tokens, fp32 [n], at the sampling temperature.

    Args:
        chunk: the bare last chunk of a policy (model.heads), which put out `hidden` [1, s/tp, H].
        projected_at_once: tokens projected to the vocabulary at a time.
        wide: multiply by the vocabulary projection in fp32, forward and backward, whatever its type.
        rounded: round the logits to this type.
    """
    rows = loss_hidden(chunk, hidden)[0, batch.positions]
    first_id, _ = vocabulary_rows(chunk)
    group = parallel_state.get_tensor_model_parallel_group()
    logprobs, entropies = token_logprobs(
        rows,
        output_weight(chunk),
        batch.targets,
        temperature=temperature,
        vocab_size=chunk.architecture.vocab_size,
        vocab_start=first_id,
        tp_group=group if parallel_state.get_tensor_model_parallel_world_size() > 1 else None,
        chunk=projected_at_once,
        reduce_hidden_grad=False,  # loss_hidden does it
        wide=wide,
        rounded=rounded,
    )
    return {"logprobs": logprobs, "entropy": entropies}


def read_values(output: torch.Tensor, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Values of this rank's loss tokens, fp32 [n]: read at the position before each token."""
    return {"values": output.reshape(-1)[batch.positions].float()}
