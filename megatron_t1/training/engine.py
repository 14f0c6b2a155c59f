"""One role's model in one process group: forward passes and optimizer steps over micro-batches.

The result of a step doesn't depend on how its trajectories were split into micro-batches or over ranks: losses are
token sums, and Megatron divides the gradients once by the global number of loss tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_t1.config.schema import Config, OptimizerConfig
from megatron_t1.errors import T1Error
from megatron_t1.model.backend import Backend
from megatron_t1.model.build import build_model
from megatron_t1.model.checkpoint import load_checkpoint, optimizer_differences, save_checkpoint
from megatron_t1.model.collective import together
from megatron_t1.model.mixed_optimizer import store_mixed_types
from megatron_t1.model.optimizer_state import begin_anew
from megatron_t1.phase import WrittenFile
from megatron_t1.ppo.sums import Sums, merge
from megatron_t1.routing.options import ReplayOptions
from megatron_t1.routing.replay import RoutingReplay
from megatron_t1.timing import timed
from megatron_t1.training.batch import MicroBatch, ReplayShape, build_micro_batch, lengths_of
from megatron_t1.training.expert_load import expert_load
from megatron_t1.training.nonfinite import Watched, all_finite, gradients_finite, report
from megatron_t1.training.passes import (
    LossFunction,
    TokenReader,
    configured_logprobs,
    layout_sizes,
    names_everywhere,
    packed_forward,
    read_values,
    run_schedule,
    score,
)
from megatron_t1.training.samples import Sample
from megatron_t1.training.schedule import learning_rate
from megatron_t1.trajectory.layout import TokenLayout


class Engine:
    """A policy or value model with its optimizer.

    Args:
        role: "policy" or "value".
        optimizer: hyper-parameters; None builds a model for forward passes only.
        replay: whether this role replays recorded routes.
        initialize: random parameters, to be replaced or trained; without it they are whatever memory held.

    Attributes:
        seconds: spent so far in `passes` (forward and backward), `optimizer`, `batches` (laying out micro-batches),
            `packing` and `sums` (adding up metrics over the ranks).
        skipped: for each mini-batch that was skipped the optimizer `step` it would have been, and its `trajectories`
            whose loss or gradient wasn't finite.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        role: str,
        optimizer: OptimizerConfig | None,
        *,
        replay: bool,
        aux_loss_coef: float = 0.0,
        initialize: bool = True,
    ):
        self.config, self.backend, self.role = config, backend, role
        self.seconds: dict[str, float] = {}
        self.chunks = build_model(config, backend, role, aux_loss_coef=aux_loss_coef, initialize=initialize)
        self.transformer = self.chunks[0].config
        self.route_in(config.train.router_dtype)
        self.replaying = replay
        self.replay = RoutingReplay(
            self.chunks,
            num_experts=self.transformer.num_moe_experts or 0,
            top_k=self.transformer.moe_router_topk,
            options=ReplayOptions(load=config.train.replay.load),
        )
        self.modules: list[torch.nn.Module] = list(self.chunks)
        if config.model.dtype == "bfloat16":
            self.modules = [Float16Module(self.transformer, chunk) for chunk in self.chunks]
        self.optimizer_config = optimizer
        self.optimizer = None
        self.optimizer_steps = 0
        self.skipped: list[dict[str, Any]] = []
        if optimizer is not None:
            self._add_optimizer(optimizer)

    @classmethod
    def of_role(
        cls, config: Config, backend: Backend, role: str, *, with_optimizer: bool = True, **more: Any
    ) -> Engine:
        """The actor's ("policy") or the critic's ("value") model, as PPO trains it; its weights mean nothing yet."""
        options, replays = config.train, config.train.replay
        trained, replay = (options.actor, replays.actor) if role == "policy" else (options.critic, replays.critic)
        return cls(config, backend, role, trained if with_optimizer else None, replay=replay, **more)

    def _add_optimizer(self, options: OptimizerConfig) -> None:
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.config.layout.distributed_optimizer
        )
        self.modules = [
            DistributedDataParallel(self.transformer, ddp, module, disable_bucketing=index > 0)
            for index, module in enumerate(self.modules)
        ]
        bf16 = self.config.model.dtype == "bfloat16"
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                adam_beta1=options.beta1,
                adam_beta2=options.beta2,
                adam_eps=options.eps,
                weight_decay=options.weight_decay,
                clip_grad=options.clip_grad,
                bf16=bf16,
                params_dtype=self.transformer.params_dtype,
                use_distributed_optimizer=self.config.layout.distributed_optimizer,
            ),
            self.modules,
        )
        store_mixed_types(self.optimizer)
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        self.transformer.finalize_model_grads_func = finalize_model_grads
        self.transformer.no_sync_func = None

    def load(self, directory: Path) -> None:
        """Model, optimizer and step counter from a checkpoint of this role, which any layout may have written.

        Where Megatron can't load the optimizer's state in this layout, train.*.reset_optimizer lets it begin anew; the
        counter, and the learning rate's schedule with it, goes on.

        Raises:
            IncompleteError: the checkpoint is damaged.
            MismatchError: it is of another model, or its optimizer state can't be loaded here.
        """
        optimizer = self.optimizer
        if optimizer is not None and self.optimizer_config.reset_optimizer:
            if different := together(lambda: optimizer_differences(directory, self.chunks, self.optimizer))[0]:
                warnings.warn(f"{directory}: a new optimizer begins; {'; '.join(different)}", stacklevel=2)
                optimizer = None
        state = load_checkpoint(directory, self.chunks, optimizer)
        if optimizer is None:
            self.parameters_changed()
        self.optimizer_steps = int(state["optimizer_steps"])

    def load_weights(self, directory: Path) -> None:
        """The model alone from a checkpoint of this role; the optimizer and its counter begin anew."""
        load_checkpoint(directory, self.chunks, None)
        self.begin_anew()

    def begin_anew(self) -> None:
        """From the parameters as they are now, as before the first optimizer step: no moments, and no steps counted."""
        self.optimizer_steps = 0
        if self.optimizer is not None:
            begin_anew(self.optimizer)
        self.parameters_changed()

    def save(
        self,
        directory: Path,
        version: int,
        *,
        relative_to: Path,
        more: Mapping[str, Any] | None = None,
        own: Mapping[str, bytes] | None = None,
    ) -> list[WrittenFile]:
        """A checkpoint of model, optimizer and step counter; complete or absent.

        Args:
            more: further JSON values of its state, equal on all ranks.
            own: further files of this rank (`model.checkpoint.read_own`).
        """
        state = {"role": self.role, "version": version, "optimizer_steps": self.optimizer_steps, **(more or {})}
        return save_checkpoint(directory, self.chunks, self.optimizer, state, relative_to=relative_to, own=own)

    def parameters_changed(self) -> None:
        """Must follow a change of the parameters from outside: a mixed-precision optimizer keeps its own copy."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def route_in(self, dtype: str) -> None:
        """Compute the router's logits in "float32" or in the "model"'s type from here on."""
        self.transformer.moe_router_dtype = {"float32": "fp32", "model": None}[dtype]

    # -- batches ------------------------------------------------------------------------------------------------

    @property
    def route_shape(self) -> ReplayShape:
        architecture = self.config.model.architecture
        return ReplayShape(
            num_moe_layers=len(self.replay.layers),
            num_experts=architecture.num_experts,
            top_k=architecture.num_experts_per_tok,
            expert_parallel=self.config.layout.expert,
        )

    def micro_batches(self, groups: Iterable[Sequence[Sample]], *, replay: bool | None = None) -> list[MicroBatch]:
        """One micro-batch for each group of samples of this data-parallel rank. Collective over all ranks."""
        with timed(self.seconds, "batches"):
            return self._micro_batches(groups, self.replaying if replay is None else replay)

    def _micro_batches(self, groups: Iterable[Sequence[Sample]], use_routes: bool) -> list[MicroBatch]:
        sizes = layout_sizes(sequence_parallel=bool(self.transformer.sequence_parallel))
        shape = self.route_shape if use_routes and self.replay.layers else None
        groups = [list(group) for group in groups]
        if self._needs_equal_shapes:
            sizes["total_multiple"] = self._largest_total(groups, sizes)
        return [
            build_micro_batch(group, layout_sizes=sizes, route_shape=shape, device=self.backend.device)
            for group in groups
        ]

    @property
    def _needs_equal_shapes(self) -> bool:
        """Megatron's all-gather dispatcher takes every rank to have as many tokens as itself, and interleaved stages
        every micro-batch to be as long as the first."""
        layout = self.config.layout
        return layout.dispatcher == "allgather" or layout.virtual_pipeline > 1

    def _largest_total(self, groups: list[list[Sample]], sizes: dict[str, int | bool]) -> int:
        """Positions of the longest micro-batch of any rank; the others are padded to it."""
        own = max(TokenLayout(lengths_of(group), **sizes).total for group in groups)
        largest = torch.tensor(own, device=self.backend.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    # -- passes -------------------------------------------------------------------------------------------------

    def train_step(
        self,
        batches: list[MicroBatch],
        loss: LossFunction,
        *,
        decay_steps: int | None = None,
        loss_scale: float = 1.0,
    ) -> Sums:
        """Forward, backward, one optimizer step.

        Args:
            decay_steps: of the learning rate's schedule; None: as configured.
            loss_scale: factor of the loss sum, which Megatron divides by the loss tokens of the step.

        Returns:
            Global sums, with `grad_norm`, `learning_rate` and `skipped`. Of a step that was skipped (a loss or gradient
            isn't finite, and the role's `nonfinite` is "skip") only `skipped`; nothing has changed then.

        Raises:
            T1Error: a loss or gradient isn't finite; the step is not taken.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer")
        rate = learning_rate(self.optimizer_config, self.optimizer_steps, decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            # Megatron leaves this to its own scheduler: norms and biases have a multiplier of 0 and aren't decayed.
            group["weight_decay"] = self.optimizer_config.weight_decay * group.get("wd_mult", 1.0)
        watched = Watched(_scaled(loss, loss_scale))
        parts = self.backward(batches, watched)
        if not all_finite([*watched.finite, gradients_finite(self.modules)], self.backend.device):
            return self._skip(batches, loss)
        sums = self._reduce(parts)
        with timed(self.seconds, "optimizer"):
            _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise T1Error(
                f"gradient norm {float(grad_norm)} in optimizer step {self.optimizer_steps} of the {self.role} model, "
                "of finite gradients",
                where=", ".join(sample.name for batch in batches for sample in batch.samples[:4]) + ", ...",
                remedy="rewards or advantages are far too large: look at reward.scale",
            )
        self.optimizer_steps += 1
        if self.replay.options.load and self.replaying:
            with timed(self.seconds, "sums"):
                expert_parallel = self.config.layout.expert
                sums.update(expert_load(self.replay, expert_parallel=expert_parallel, device=self.backend.device))
        for name, value in (("grad_norm", float(grad_norm)), ("learning_rate", rate), ("skipped", 0.0)):
            sums[name] = torch.tensor([value, 1.0], dtype=torch.float64)
        return sums

    def backward(self, batches: list[MicroBatch], loss: LossFunction) -> list[Sums]:
        """Forward and backward from zero gradients; metric sums of each micro-batch, on the last stage only."""
        for module in self.modules:
            module.train()
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._schedule(batches, loss, forward_only=False)

    def _skip(self, batches: list[MicroBatch], loss: LossFunction) -> Sums:
        """Leave a step out, or end the phase; either way it is said whose loss or gradient isn't finite."""
        self.skipped.append(report(self, batches, loss, stop=self.optimizer_config.nonfinite == "stop"))
        self.replay.take_load()  # of a step that isn't taken, and of the search
        return {"skipped": torch.ones(2, dtype=torch.float64)}

    @torch.no_grad()
    def forward(self, batches: list[MicroBatch], loss: LossFunction) -> list[Sums]:
        """Metric sums of each micro-batch, on the last stage only."""
        return self._schedule(batches, loss, forward_only=True)

    def evaluate(self, batches: list[MicroBatch], loss: LossFunction) -> Sums:
        """Global sums of a loss without an update."""
        return self._reduce(self.forward(batches, loss))

    def score(self, batches: list[MicroBatch], read: TokenReader) -> list[dict[str, torch.Tensor]]:
        """Per-loss-token numbers of each micro-batch: float32 [N] for every name `read` returns, on every rank."""
        with timed(self.seconds, "passes"):
            return score(self.modules, batches, read, self.replay)

    def record_routes(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """The model's own choices for each micro-batch: [T_local, L_local, K] in compact dtype. One pipeline stage."""
        recorded = []
        with torch.no_grad(), timed(self.seconds, "passes"):
            for module in self.modules:
                module.eval()
            for batch in batches:
                _, routes = self.replay.record(
                    self.chunks[0], lambda batch=batch: packed_forward(self.modules[0], batch)
                )
                recorded.append(routes)
        return recorded

    def _schedule(self, batches: list[MicroBatch], loss: LossFunction, *, forward_only: bool) -> list[Sums]:
        with timed(self.seconds, "passes"):
            return run_schedule(self.modules, batches, loss, self.replay, forward_only=forward_only)

    def _reduce(self, sums: list[Sums]) -> Sums:
        """Add [sum, count] pairs over micro-batches and ranks; each token counts once (trl#6380)."""
        with timed(self.seconds, "sums"):
            return self._reduced(sums)

    def _reduced(self, sums: list[Sums]) -> Sums:
        own = merge(sums)
        names = names_everywhere(own)
        table = torch.zeros(len(names), 2, dtype=torch.float64, device=self.backend.device)
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            for row, name in enumerate(names):
                table[row] = own[name]
        if names:
            dist.all_reduce(table)
        return dict(zip(names, table.cpu().unbind(), strict=True))

    # -- what a pass reads --------------------------------------------------------------------------------------

    def logprobs(self, hidden: torch.Tensor, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Log-probs (and entropies) of this rank's loss tokens, fp32 [n], at the sampling temperature."""
        return configured_logprobs(self.chunks[-1], hidden, batch, self.config)

    def values(self, output: torch.Tensor, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Values of this rank's loss tokens, fp32 [n]: read at the position before each token."""
        return read_values(output, batch)


def _scaled(loss: LossFunction, scale: float) -> LossFunction:
    def scaled(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        total, sums = loss(output, batch)
        return total * scale, sums

    return loss if scale == 1.0 else scaled
