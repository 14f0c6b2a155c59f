"""Training of one role on one rollout inside a checkout's loop: what `plugin` calls when there is a `--t1-role`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_t1.checkout import checks, facts
from megatron_t1.checkout.data import Place, RolloutData
from megatron_t1.checkout.gae import FILE, gae_problem
from megatron_t1.checkout.models import Models
from megatron_t1.checkout.options import options_of
from megatron_t1.checkout.values import write_values
from megatron_t1.errors import ConfigError
from megatron_t1.ppo.sums import Sums
from megatron_t1.training.advantages import VALUE_FIELDS
from megatron_t1.training.batch import MicroBatch, ReplayShape
from megatron_t1.training.objectives import actor_objective, critic_objective
from megatron_t1.training.passes import micro_step, read_logprobs, read_values


class Job:
    """Training of one role on one rollout.

    Raises:
        ConfigError: options clash; all of them are named.
        T1Error: records or model aren't what the options say.
    """

    def __init__(self, args: argparse.Namespace):
        checks.require_options(args)
        self.args, self.options = args, options_of(args)
        architecture = facts.architecture_of(args, self.options.model)
        if self.options.role == "critic":
            args.untie_embeddings_and_output_weights = True  # it has no vocabulary projection
        known = facts.contract_facts(args, architecture, self.options.model)
        shape = None
        if self.options.replay:
            expert_parallel = args.expert_model_parallel_size
            shape = ReplayShape(
                num_moe_layers=known["num_moe_layers"],
                num_experts=known["num_experts"],
                top_k=known["top_k"],
                expert_parallel=expert_parallel,
            )
        place = Place.here(args)
        slots = args.global_batch_size // (args.micro_batch_size * place.replicas)
        self._require_rounds(slots)
        self.data = RolloutData(
            self.options, place, known, shape, slots=slots, seed=args.seed + self.options.first_step
        )
        if self.options.role == "actor":
            self.data.attach(("advantages",))
        role = "policy" if self.options.role == "actor" else "value"
        self.models = Models(args, role, architecture, self.options.model, replaying=self.options.replay)
        self._prepared = False

    def _require_rounds(self, slots: int) -> None:
        """Interleaved pipeline stages take micro-batches in rounds of the pipeline's size."""
        stages = self.args.pipeline_model_parallel_size
        if self.args.virtual_pipeline_model_parallel_size and slots % stages:
            raise ConfigError(
                f"{slots} micro-batches in a step don't fill rounds of {stages} pipeline stages",
                where="--global-batch-size",
                remedy=f"make it a multiple of {stages} times the number of data-parallel replicas",
            )

    def build(self, provider: Callable, *args: Any, **kwargs: Any) -> torch.nn.Module:
        chunk = self.models.build(provider, *args, **kwargs)
        if self.options.role == "critic" and self.options.config.train.critic.head_bias == "mean_return":
            self.models.start_head_at(float(np.mean([sample.reward for sample in self.data.samples])))
        return chunk

    def training_data(self) -> Iterator[MicroBatch]:
        """Micro-batches from where the loop will begin; asked for once for each virtual stage."""
        if not self._prepared:
            self._prepare()
            self._prepared = True
        self.args.dataloader_type = "external"  # the loop takes the iterator as it is
        return self.data.micro_batches(self.args.iteration)

    def _prepare(self) -> None:
        self.models.loaded()
        if not self.args.skip_train:
            self.data.require_steps(self.args.iteration, self.args.train_iters)
        if self.options.role == "critic":
            if self.data.has_values():
                self._require_same_gae()
            else:
                write_values(self.options, self.data, self.models)
            self.data.attach(VALUE_FIELDS)

    def _require_same_gae(self) -> None:
        """Values are computed once: other options would have no effect on them."""
        options = self.options
        written_here = (options.values / FILE).exists()
        wanted = dataclasses.asdict(options.config.train.gae) if written_here else options.gae_given
        if problem := gae_problem(options.values, wanted):
            raise ConfigError(problem, where="--t1-gae-...")

    def forward_step(self, data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        from megatron.training import get_timers

        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        batch = next(data_iterator)
        timers("batch-generator").stop()
        output, reduce = micro_step(model, batch, self._loss, self.models.replay)
        return output, partial(self._checked, reduce)

    def _loss(self, output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        train = self.options.config.train
        if self.options.role == "critic":
            return critic_objective(read_values(output, batch)["values"], batch, train.critic)
        current = read_logprobs(
            self.models.chunks[-1],
            output,
            batch,
            temperature=self.data.temperature,
            projected_at_once=train.logprob_chunk,
        )
        return actor_objective(current, batch, train.actor)

    def _checked(self, reduce: Callable, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """The loss, looked at as the checkout's own loss functions do before gradients are summed."""
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        loss, tokens, sums = reduce(output)
        if self.args.check_for_nan_in_loss_and_grad:
            for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
                get_rerun_state_machine().validate_result(
                    result=loss,
                    rejection_func=rejects,
                    message=f"found {name} in local forward loss calculation",
                    tolerance=0.0,
                    fatal=True,
                )
        return loss, tokens, {name: pair.to(loss.device) for name, pair in sums.items()}
