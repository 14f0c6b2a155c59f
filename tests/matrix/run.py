"""Compute losses and gradients of replayed micro-batches in many layouts within one start of the processes.

Every case computes the same two numbers and the same gradients: two passes over the same trajectories, each with other
foreign routes, a third of whose rows are missing. The reference is one process that takes one trajectory at a time,
unpadded, without recomputation. All ids, masks and routes are cut by the trainer's own `build_micro_batch`.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.matrix.cases import DENSE_LAYERS, Case
from tests.tiny_model import ARCHITECTURE, cpu_backend, megatron_version, tiny_config

TIMEOUT_S = 40.0  # of a collective, after which the peers of a rank that failed fail too
TRAJECTORIES, LONGEST, PASSES = 15, 24, 2  # 15: with 4 replicas of 4 micro-batches each, one has no work
PADDED = 32
L, E, K = ARCHITECTURE.num_hidden_layers, ARCHITECTURE.num_experts, ARCHITECTURE.num_experts_per_tok
REFERENCE = Case(micro_batches=TRAJECTORIES)


def run_cases(directory: str, cases: list[dict[str, Any]], references: list[list[str]]) -> dict[str, Any]:
    """Run `cases` on this rank, comparing with the references in `directory`.

    Args:
        references: [model, role] pairs to compute and store there first; one process only.

    Returns:
        megatron: version and path of the core that ran. references: {"model/role": losses}. cases: by name, either
        {"error": traceback} or the largest differences over ranks, see `_compare`.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0")), world, rank == 0
    )
    outcome: dict[str, Any] = {"megatron": None, "references": {}, "cases": {}}
    for model, role in references:
        case = replace(REFERENCE, model=model, roles=role, batch="padded" if model == "mtp" else "packed")
        outcome["references"][f"{model}/{role}"] = _in_group(store, f"reference {case.name}", case, partial(
            _store_reference, Path(directory), case
        ))  # fmt: skip
    for fields in cases:
        case, started = Case(**fields), time.monotonic()
        result = _in_group(store, case.name, case, partial(_run_case, Path(directory), case))
        outcome["cases"][case.name] = result | {"seconds": round(time.monotonic() - started, 2)}
    outcome["megatron"] = megatron_version()
    return outcome


def _in_group(store: dist.Store, name: str, case: Case, action: Callable[[Any], Any]) -> Any:
    """Run `action(backend)` within process groups of its own; a failure of any rank is everybody's result."""
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    groups = dist.PrefixStore(name, store)
    try:
        backend = cpu_backend()
        dist.init_process_group("gloo", store=groups, rank=rank, world_size=world, timeout=timeout)
        initialize_parallel(case.layout, backend, seed=0, architecture=case.architecture, timeout_s=TIMEOUT_S)
        result, failure = action(backend), ""
    except Exception:
        result, failure = None, f"rank {rank}: {traceback.format_exc()[-4000:]}"
    # Through the store: after a failure of one rank the others' collectives can't be trusted any more.
    groups.set(f"failure/{rank}", failure)
    failures = [groups.get(f"failure/{other}").decode() for other in range(world)]
    destroy_parallel()
    return {"error": "\n".join(filter(None, failures))} if any(failures) else result


# -- data ---------------------------------------------------------------------------------------------------------


def samples(pass_number: int, routed_layers: int):
    """The trajectories of one pass: equal ids and masks, routes of their own."""
    from megatron_t1.training.samples import Sample

    made = []
    for number in range(TRAJECTORIES):
        fixed, random = np.random.default_rng([7, number]), np.random.default_rng([8, number, pass_number])
        length = int(fixed.integers(3, LONGEST + 1))
        mask = fixed.random(length) < 0.7
        # Cores differ in how multi-token prediction counts a loss token at 1.
        mask[:3] = False, False, True
        routed = random.random(length) < 2 / 3
        routes = random.random((length, L, E)).argsort(-1)[..., :K].astype(np.uint8)
        routes[~routed] = 255
        made.append(
            Sample(
                name=f"trajectory-{number}",
                key="",
                ids=fixed.integers(0, ARCHITECTURE.vocab_size, length).astype(np.int32),
                loss_mask=mask,
                routes=routes[:, L - routed_layers :],
                routed=routed,
                reward=0.0,
                fields={"weight": fixed.normal(size=int(mask.sum()))},
            )
        )
    return made


class Batch:
    """One micro-batch of a replica: trajectories packed into one row, or one to a row and padded to one length."""

    def __init__(self, rows: list, routes):
        self.rows, self.routes = rows, routes
        self.tokens = torch.cat([row.tokens for row in rows])
        self.position_ids = torch.cat([row.position_ids for row in rows])
        self.labels, self.loss_mask = torch.zeros_like(self.tokens), torch.zeros(self.tokens.shape)
        for index, row in enumerate(rows):
            self.labels[index, row.positions] = row.targets
            self.loss_mask[index, row.positions] = 1.0

    @property
    def loss_tokens(self) -> int:
        return sum(len(row.positions) for row in self.rows)


def batches(case: Case, own_samples: list, ranks) -> list[Batch]:
    from megatron_t1.routing.replay import MicroBatchRoutes
    from megatron_t1.training.batch import ReplayShape, build_micro_batch

    cut = {
        "context_size": ranks.context_size,
        "context_rank": ranks.context,
        "tensor_size": ranks.tensor_size,
        "tensor_rank": ranks.tensor,
        "sequence_parallel": ranks.tensor_size > 1,
    }
    layers = own_samples[0].routes.shape[1]
    shape = ReplayShape(num_moe_layers=layers, num_experts=E, top_k=K, expert_parallel=case.expert)
    groups = [
        [own_samples[index] for index in part]
        for replica in range(ranks.data_size)
        for part in np.array_split(np.arange(replica, len(own_samples), ranks.data_size), case.micro_batches)
    ]
    mine = groups[ranks.data * case.micro_batches : (ranks.data + 1) * case.micro_batches]
    build = partial(build_micro_batch, route_shape=shape, device=torch.device("cpu"))
    if case.batch == "packed":
        # The all-gather dispatcher takes all ranks, interleaved stages all micro-batches, to be equally long.
        longest = max(sum(len(sample.ids) + 4 for sample in group) for group in groups)
        if case.dispatcher == "allgather" or case.virtual_pipeline > 1:
            cut["total_multiple"] = -(-longest // 8) * 8
        built = [[build(group, layout_sizes=cut)] for group in mine]
        return [Batch(rows, rows[0].routes) for rows in built]
    size = max(map(len, groups))
    made = []
    for group in mine:
        rows = [build(part, layout_sizes=cut | {"total_multiple": PADDED}) for part in [[s] for s in group]]
        rows += [build([], layout_sizes=cut | {"total_multiple": PADDED}) for _ in range(size - len(group))]
        # The router sees [s, b] flattened: position by position, not row by row.
        fields = {
            name: torch.stack([getattr(row.routes, name) for row in rows], dim=1).flatten(0, 1)
            for name in ("routes", "mask", "valid")
            if getattr(rows[0].routes, name, None) is not None
        }
        made.append(Batch(rows, MicroBatchRoutes(**fields)))
    return made


# -- models -------------------------------------------------------------------------------------------------------


class Trained:
    """One role's model in DDP with replay, without an optimizer."""

    def __init__(self, case: Case, backend, role: str):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        from megatron_t1.model.build import build_model
        from megatron_t1.routing.replay import RoutingReplay
        from tests.matrix.mtp import build_with_mtp
        from tests.matrix.parameters import initialise

        self.case, self.role = case, role
        dense = DENSE_LAYERS.get(case.model, 0)
        overrides: dict[str, Any] = {"moe_layer_freq": [0] * dense + [1] * (L - dense)}
        if case.recompute == "block":
            overrides |= {"recompute_method": "block", "recompute_num_layers": 1}
        build = build_with_mtp if case.model == "mtp" else build_model
        chunks = build(tiny_config(case.layout, architecture=case.architecture), backend, role, **overrides)
        for chunk in chunks:
            initialise(chunk, chunk.architecture.vocab_size)
        self.replay = RoutingReplay(chunks, num_experts=E, top_k=K)
        assert self.replay.layers == list(range(dense + 1, L + 1))
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self.chunks = [
            DistributedDataParallel(chunk.config, options, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        self.config = chunks[0].config
        self.config.finalize_model_grads_func = finalize_model_grads

    def run(self, own: list[Batch], *, train: bool) -> float:
        """The loss sum over all tokens of all ranks; with `train`, gradients are left in `main_grad`."""
        from megatron.core import parallel_state as state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.train(train)
            chunk.zero_grad_buffer()
        iterators: Any = [iter(own) for _ in self.chunks]
        several = len(self.chunks) > 1
        with torch.enable_grad() if train else torch.no_grad():
            reports = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iterators if several else iterators[0],
                model=self.chunks if several else self.chunks[0],
                num_microbatches=len(own),
                seq_length=own[0].tokens.shape[1] * self.case.context,
                micro_batch_size=own[0].tokens.shape[0],
                forward_only=not train,
            )
        total = sum((report["loss"] for report in reports), torch.zeros(())).double().reshape(1)
        if state.get_tensor_model_parallel_rank() != 0:
            total.zero_()
        dist.all_reduce(total)
        return float(total)

    def _forward_step(self, iterator, chunk):
        batch = next(iterator)
        output = self.replay.run(chunk, batch.routes, lambda: self._forward(chunk, batch))

        def loss(output):
            terms = [self._row_loss(output, index, row) for index, row in enumerate(batch.rows)]
            total = torch.stack(terms).sum() + output.sum() * 0.0
            return total, torch.tensor(batch.loss_tokens, dtype=torch.int), {"loss": total.detach()}

        return output, loss

    def _forward(self, chunk, batch: Batch):
        from megatron.core.packed_seq_params import PackedSeqParams

        options: dict[str, Any] = {}
        if self.case.model == "mtp":
            options = {"labels": batch.labels, "loss_mask": batch.loss_mask}
        if self.case.batch == "packed":
            layout = batch.rows[0].layout
            ends = torch.from_numpy(layout.cu_seqlens)
            options["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends,
                cu_seqlens_kv_padded=ends, max_seqlen_q=layout.max_seqlen, max_seqlen_kv=layout.max_seqlen,
            )  # fmt: skip
        return chunk(batch.tokens, batch.position_ids, None, **options)

    def _row_loss(self, output, index: int, row):
        from megatron.core import parallel_state as state

        from megatron_t1.model.chunks import bare_chunks
        from megatron_t1.model.heads import loss_hidden, output_weight, vocabulary_rows
        from megatron_t1.ppo.logprobs import token_logprobs

        if not row.samples or not len(row.positions):
            return output.new_zeros(())
        weight = row.loss_field("weight", torch.device("cpu"))
        if self.role == "value":
            return 0.5 * (output[index, row.positions] - weight).square().sum()
        if self.case.model == "mtp":
            return (output[index, row.positions] * weight).sum()
        chunk = bare_chunks(self.chunks)[-1]
        logprobs, _ = token_logprobs(
            loss_hidden(chunk, output)[index, row.positions],
            output_weight(chunk),
            row.targets,
            vocab_size=chunk.architecture.vocab_size,
            vocab_start=vocabulary_rows(chunk)[0],
            tp_group=state.get_tensor_model_parallel_group(),
            reduce_hidden_grad=False,
        )
        return -(logprobs * weight).sum()

    def gradients(self):
        """(global name, this rank's gradient, cut) of every parameter."""
        from megatron_t1.model.chunks import bare_chunks
        from tests.matrix.parameters import placed_parameters

        for chunk in bare_chunks(self.chunks):
            for name, parameter, cut in placed_parameters(chunk):
                yield name, parameter.main_grad, cut


# -- what is compared ---------------------------------------------------------------------------------------------


def _reference_file(directory: Path, case: Case, role: str, pass_number: int) -> Path:
    return directory / f"{case.model}_{role}_{pass_number}.safetensors"


def _store_reference(directory: Path, case: Case, backend) -> list[float]:
    """Losses of the two passes with replay and then of a native one; the gradients go to files."""
    from megatron_t1.model.parallel import parallel_ranks

    model, losses = Trained(case, backend, case.roles), []
    for number in range(PASSES):
        own = batches(case, samples(number, len(model.replay.layers)), parallel_ranks())
        losses.append(model.run(own, train=True))
        tensors = {name: gradient.clone() for name, gradient, _ in model.gradients()}
        save_file(tensors | {"loss": torch.tensor(losses[-1])}, _reference_file(directory, case, case.roles, number))
    with model.replay.native():
        losses.append(model.run(own, train=False))
    return losses


def _run_case(directory: Path, case: Case, backend) -> dict[str, Any]:
    from megatron_t1.model.parallel import parallel_ranks

    models = {role: Trained(case, backend, role) for role in case.trained_roles}
    everyone = dict(models)
    if case.roles == "three":
        everyone["reference"] = Trained(case, backend, "policy")
    differences = []
    layers = len(next(iter(models.values())).replay.layers)
    for number in range(PASSES):
        own = batches(case, samples(number, layers), parallel_ranks())
        scored = {}
        for name, model in everyone.items():
            if case.scored or name == "reference":
                scored[name] = model.run(own, train=False)
        for role, model in models.items():
            loss = model.run(own, train=True)
            expected = load_file(_reference_file(directory, case, role, number))
            losses = [loss] + [value for name, value in scored.items() if name == role]
            if role == "policy" and "reference" in scored:
                losses.append(scored["reference"])
            differences.append(_compare(expected, losses, model))
    return max(differences, key=lambda found: found["gradient"]) | {
        "loss": max(found["loss"] for found in differences),
    }


def _compare(expected: dict[str, torch.Tensor], losses: list[float], model: Trained) -> dict[str, Any]:
    """loss: largest relative difference. gradient: largest |difference| / |reference| (L2) of any parameter's part on
    any rank, and its name."""
    from megatron_t1.model.collective import gather_objects

    reference = float(expected.pop("loss"))
    worst, worst_name, seen = 0.0, "", set()
    for name, gradient, cut in model.gradients():
        want = cut.take(expected[name])
        assert want.shape == gradient.shape, (name, want.shape, gradient.shape)
        scale = expected[name].norm()
        difference = float((gradient - want).norm() / scale) if scale > 0 else float(gradient.norm())
        if not difference <= worst:
            worst, worst_name = difference, name
        seen.add(name)
    found = gather_objects((worst, worst_name, sorted(seen)))
    missing = expected.keys() - {name for _, _, names in found for name in names}
    assert not missing, f"no rank has a gradient of {sorted(missing)[:5]}"
    worst, worst_name, _ = max(found)
    return {
        "loss": max(abs(loss - reference) for loss in losses) / abs(reference),
        "gradient": worst,
        "parameter": worst_name,
    }
