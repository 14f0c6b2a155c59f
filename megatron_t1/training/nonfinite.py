"""Losses and gradients that aren't finite: found before the optimizer steps, and whose they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_t1.errors import T1Error
from megatron_t1.model.collective import gather_objects
from megatron_t1.ppo.sums import Sums
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.passes import LossFunction, missing_micro_batches

if TYPE_CHECKING:
    from megatron_t1.training.engine import Engine

SHOWN = 8  # trajectories named in a message


class Watched:
    """A loss function that remembers of each micro-batch, in order, whether its loss was finite: bool tensors []."""

    def __init__(self, loss: LossFunction):
        self.loss = loss
        self.finite: list[torch.Tensor] = []

    def __call__(self, output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        total, sums = self.loss(output, batch)
        self.finite.append(torch.isfinite(total.detach()).all())
        return total, sums


def gradients_finite(modules: Iterable[torch.nn.Module]) -> torch.Tensor:
    """bool []: whether all gradients of this rank are numbers; of modules in Megatron's DistributedDataParallel."""
    dense, sparse = _finite_parts(modules)
    return dense & sparse


def all_finite(flags: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether every flag of every rank is set. Collective."""
    everywhere = torch.stack([flag.to(device) for flag in flags]).all().to(torch.int32)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


def report(engine: Engine, batches: list[MicroBatch], loss: LossFunction, *, stop: bool) -> dict[str, Any]:
    """`step` and `trajectories` of a mini-batch that gave no finite loss or gradient. Collective.

    Raises:
        T1Error: with `stop`.
    """
    names, what = culprits(engine, batches, loss)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    problem = (
        f"a loss or gradient isn't finite in optimizer step {engine.optimizer_steps} of the {engine.role} model: "
        f"{what} of {', '.join(names[:SHOWN])}{more}"
    )
    if stop:
        raise T1Error(
            problem,
            where="the trajectories named",
            remedy="look at their log-probs, rewards and values; a smaller learning rate or clip_grad may help; "
            "nonfinite=skip (train.actor, critic, sft) leaves such a mini-batch out",
        )
    if dist.get_rank() == 0:
        warnings.warn(f"{problem}; the mini-batch is skipped", stacklevel=2)
    return {"step": engine.optimizer_steps, "trajectories": names}


def culprits(engine: Engine, batches: list[MicroBatch], loss: LossFunction) -> tuple[list[str], str]:
    """The trajectories of a mini-batch whose own loss isn't finite, or else whose own gradient isn't; and which it is.

    Where each is finite alone and only their sum isn't, all of them. Collective. The model stays as it is; its
    gradients are gone afterwards.
    """
    samples = [sample for batch in batches for sample in batch.samples]
    rounds = max(gather_objects(len(samples)))
    rounds += missing_micro_batches(rounds)
    groups = [[sample] for sample in samples] + [[] for _ in range(rounds - len(samples))]
    alone = engine.micro_batches(groups)
    names = [sample.name for sample in samples] + [""] * (rounds - len(samples))

    watched = Watched(loss)
    engine.forward(alone, watched)
    bad = [name for name, finite in zip(names, watched.finite, strict=False) if not finite]
    if found := _gathered(bad):
        return found, "the loss"
    together = 1 + missing_micro_batches(1)  # interleaved stages take them in rounds
    finalize, engine.transformer.finalize_model_grads_func = engine.transformer.finalize_model_grads_func, None
    dense_bad, sparse_bad = [], []
    try:
        for first in range(0, rounds, together):
            engine.backward(alone[first : first + together], loss)
            dense, sparse = _finite_parts(engine.modules)
            own = names[first : first + together]
            dense_bad += [] if dense else own
            sparse_bad += [] if sparse else own  # experts also see other ranks' tokens of the same round
    finally:
        engine.transformer.finalize_model_grads_func = finalize
    found = _gathered(dense_bad) or _gathered(sparse_bad)
    return (found, "the gradient") if found else (_gathered(names), "the sum over each trajectory's gradient,")


def _finite_parts(modules: Iterable[torch.nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the gradients of the parameters that all ranks share are finite, and those of the experts."""
    modules = list(modules)
    return (
        _finite(buffer.grad_data for module in modules for buffer in module.buffers),
        _finite(buffer.grad_data for module in modules for buffer in module.expert_parallel_buffers),
    )


def _finite(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """bool []: aminmax takes one pass, needs no second buffer, and lets NaN through."""
    flags = [torch.isfinite(torch.stack(torch.aminmax(buffer))).all() for buffer in buffers if buffer.numel()]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def _gathered(names: list[str]) -> list[str]:
    return sorted({name for part in gather_objects(names) for name in part if name})
