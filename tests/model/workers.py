"""Functions that run in several processes; see tests.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import LayoutConfig
from tests.tiny_model import ARCHITECTURE, cpu_backend, tiny_config, tokens


@contextlib.contextmanager
def parallel(layout: dict[str, Any]):
    """(backend, layout) with parallel state; in a test's own process the state of its fixture."""
    import torch.distributed as dist

    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend, parsed = cpu_backend(), LayoutConfig(**{"expert": 1, **layout})
    ours = not dist.is_initialized()
    if ours:
        initialize_parallel(parsed, backend, seed=0, architecture=ARCHITECTURE, timeout_s=120)
    try:
        yield backend, parsed
    finally:
        if ours:
            destroy_parallel()


def model_and_optimizer(
    backend, layout: LayoutConfig, role: str = "policy", dtype: str = "float32", tied: bool = False
):
    """Chunks in DDP with Megatron's optimizer around them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_t1.model.build import build_model

    architecture = replace(ARCHITECTURE, tie_word_embeddings=tied)
    chunks = build_model(tiny_config(layout, dtype, architecture), backend, role)
    wrapped = [
        DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
            chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    options = dict(optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=1.0, bf16=dtype == "bfloat16")
    optimizer = get_megatron_optimizer(OptimizerConfig(**options, params_dtype=chunks[0].config.params_dtype), wrapped)
    return wrapped, optimizer


def train_steps(wrapped, optimizer, steps: range, **schedule_options: Any) -> list[float]:
    """Train on a fixed batch; the global loss before each step. Works for policies and value models in any layout."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_t1.model.chunks import bare_chunks

    config = bare_chunks(wrapped)[0].config
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    batch, length = 4, 16
    share = batch // state.get_data_parallel_world_size()
    first = state.get_data_parallel_rank() * share
    runner = schedule_options.pop("runner", lambda chunk, row, forward: forward())
    losses = []
    for _ in steps:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        iterators = [iter(range(first, first + share)) for _ in wrapped]

        def step(iterator, chunk):
            row = next(iterator)
            ids, positions = tokens(batch, length)
            ids, positions = ids[row : row + 1], positions[row : row + 1]
            output = runner(chunk, row, lambda: chunk(ids, positions, None))

            def loss(output):
                bare = bare_chunks(chunk)[0]
                if bare.role == "value":
                    total = (output - torch.linspace(-1, 2, length)).square().sum()
                else:
                    total = -policy_logprobs(bare, output, ids).sum()
                return total, torch.tensor(length, dtype=torch.int), {"loss": total.detach()}

            return output, loss

        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(wrapped) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=share,
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        total = sum((report["loss"] for report in reports), torch.zeros(())).reshape(1).clone()
        dist.all_reduce(total)
        copies = dist.get_world_size() // state.get_data_parallel_world_size()
        if state.get_pipeline_model_parallel_world_size() > 1:
            copies //= state.get_pipeline_model_parallel_world_size()
        optimizer.step()
        losses.append(float(total) / copies / (batch * length))
    return losses


def policy_logprobs(chunk, hidden, ids):
    """float32 [b, s]: log-probability of each token given those up to and including the one before; the last is 0."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    from megatron_t1.model.heads import loss_hidden, output_weight, vocabulary_rows

    first, count = vocabulary_rows(chunk)
    logits = loss_hidden(chunk, hidden)[:, :-1].float() @ output_weight(chunk)[:count].float().T
    group = state.get_tensor_model_parallel_group()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = reduce_from_tensor_model_parallel_region((logits - largest[..., None]).exp().sum(-1), group=group)
    local = ids[:, 1:] - first
    mine = (local >= 0) & (local < count)
    chosen = logits.gather(-1, local.clamp(0, count - 1)[..., None])[..., 0] * mine
    chosen = reduce_from_tensor_model_parallel_region(chosen, group=group)
    return chosen - largest - total.log()


def round_trips(
    directory: str, layouts: list[dict[str, Any]], tied: bool = False, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Load hf/ and export it, to out0, out1, ...; what was reported of each."""
    from megatron_t1.model.build import build_model

    architecture = replace(ARCHITECTURE, tie_word_embeddings=tied)

    def build(backend, layout):
        return build_model(tiny_config(layout, dtype, architecture), backend, "policy", initialize=False)

    return _convert(Path(directory), layouts, dtype, build)


def hybrid_round_trips(directory: str, layouts: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """As `round_trips`, of a Qwen3.5 checkpoint through a model of nothing but parameters."""
    import torch

    from megatron_t1.model.stored import architecture_from_hf
    from tests.model.skeleton import skeleton

    root = Path(directory)
    architecture = architecture_from_hf(root / "hf")
    return _convert(root, layouts, dtype, lambda *_: [skeleton(architecture, getattr(torch, dtype))])


def _convert(root: Path, layouts: list[dict[str, Any]], dtype: str, build: Callable) -> list[dict[str, Any]]:
    """One meeting of the ranks for all layouts; in a test's own process the state of its fixture."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_t1.model.convert import export_hf, load_hf
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    backend, ours, results = cpu_backend(), not dist.is_initialized(), []
    for number, layout in enumerate(layouts):
        parsed = LayoutConfig(**{"expert": 1, **layout})
        if ours:
            initialize_parallel(parsed, backend, seed=0, architecture=ARCHITECTURE, timeout_s=120)
        chunks = build(backend, parsed)
        report = load_hf(chunks, root / "hf", "policy")
        out = root / f"out{number}"
        files = export_hf(chunks, out, root / "hf", dtype, max_file_bytes=20_000, relative_to=root)
        results.append({"report": vars(report), "files": [vars(file) for file in files]})
        if ours:
            parallel_state.destroy_model_parallel()
    if ours:
        destroy_parallel()
    return results


def losses_from_hf(
    directory: str, layout: dict[str, Any], role: str, steps: int = 3, tied: bool = False
) -> list[float]:
    from megatron_t1.model.convert import load_hf

    with parallel(layout) as (backend, parsed):
        wrapped, optimizer = model_and_optimizer(backend, parsed, role, tied=tied)
        load_hf(wrapped, Path(directory) / "hf", role)
        losses = train_steps(wrapped, optimizer, range(steps))
        return losses


def train_and_save(directory: str, layout: dict[str, Any], role: str, dtype: str = "float32") -> dict[str, Any]:
    """Two steps, save, two more steps."""
    from megatron_t1.model.checkpoint import save_checkpoint
    from megatron_t1.model.convert import load_hf

    with parallel(layout) as (backend, parsed):
        wrapped, optimizer = model_and_optimizer(backend, parsed, role, dtype)
        load_hf(wrapped, Path(directory) / "hf", role)
        train_steps(wrapped, optimizer, range(2))
        files = save_checkpoint(Path(directory) / "checkpoint", wrapped, optimizer, {"step": 2}, relative_to=directory)
        losses = train_steps(wrapped, optimizer, range(2, 4))
        return {"losses": losses, "files": [vars(file) for file in files]}


def resume(directory: str, layout: dict[str, Any], role: str, dtype: str = "float32", model_only: bool = False) -> dict:
    """Load what `train_and_save` saved and take the same two steps."""
    from megatron_t1.model.checkpoint import load_checkpoint

    with parallel(layout) as (backend, parsed):
        wrapped, optimizer = model_and_optimizer(backend, parsed, role, dtype)
        state = load_checkpoint(Path(directory) / "checkpoint", wrapped, None if model_only else optimizer)
        losses = train_steps(wrapped, optimizer, range(2, 4))
        return {"losses": losses, "state": state}


def save_with_a_failing_rank(directory: str) -> list:
    """Rank 0 fails in the middle of Megatron's save while the others wait in a collective of it."""
    import torch.distributed as dist

    from megatron_t1.model import checkpoint

    def save(*_):
        if dist.get_rank() == 0:
            raise OSError(28, "No space left on device")
        dist.barrier()

    checkpoint.dist_checkpointing.save = save
    train_and_save(directory, {"expert": 2}, "policy")
    return []
