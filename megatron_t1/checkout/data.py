"""Rollout records as the checkout's training loop reads them: one packed micro-batch for each step of its iterator.

An optimizer step of Megatron (an iteration) is one mini-batch of trajectories. Its packing plan gives every
data-parallel replica equally many micro-batches; the loop wants as many in every step (--global-batch-size), so the
steps that need fewer are filled up with micro-batches of zero weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_t1.checkout.options import Options
from megatron_t1.errors import ConfigError, IncompleteError
from megatron_t1.training.batch import MicroBatch, ReplayShape, build_micro_batch, plan_samples
from megatron_t1.training.samples import Sample, SampleSet, attach, load_rollouts
from megatron_t1.trajectory.packing import minibatches
from megatron_t1.trajectory.sidecar import read_sidecar
from megatron_t1.trajectory.store import RolloutStore


@dataclass(frozen=True)
class Place:
    """This process among the others, and the shape of its micro-batches.

    Attributes:
        sizes: as `TokenLayout` takes them.
        capacity: tokens of one micro-batch (--seq-length).
    """

    replica: int
    replicas: int
    sizes: dict[str, int | bool]
    capacity: int
    device: torch.device

    @classmethod
    def here(cls, args: argparse.Namespace) -> Place:
        from megatron.core import parallel_state as state

        from megatron_t1.training.passes import layout_sizes

        device = torch.cuda.current_device()
        sizes = layout_sizes(sequence_parallel=bool(args.sequence_parallel))
        # Pipeline stages and the all-gather dispatcher take all micro-batches to be of one shape.
        if args.pipeline_model_parallel_size > 1 or (
            bool(args.num_experts) and args.moe_token_dispatcher_type == "allgather"
        ):
            sizes["total_multiple"] = args.seq_length
        return cls(
            replica=state.get_data_parallel_rank(),
            replicas=state.get_data_parallel_world_size(),
            sizes=sizes,
            capacity=args.seq_length,
            device=device if isinstance(device, torch.device) else torch.device("cuda", device),
        )


class RolloutData:
    """The samples of one rollout and the optimizer steps they make.

    Args:
        facts: of the model in training (`facts.contract_facts`).
        route_shape: given when routes are replayed.
        slots: micro-batches of one step on each replica.
        seed: of the mini-batches' order.

    Raises:
        T1Error: records that are missing, damaged, of another contract, or too long for a micro-batch.
        ConfigError: a step needs more micro-batches than `slots`.
    """

    def __init__(
        self,
        options: Options,
        place: Place,
        facts: dict[str, Any],
        route_shape: ReplayShape | None,
        *,
        slots: int,
        seed: int,
    ):
        self.options, self.place, self.route_shape, self.slots = options, place, route_shape, slots
        self.loaded: SampleSet = load_rollouts(options.rollouts, self._config(), facts)
        self.samples: list[Sample] = self.loaded.samples
        self.steps: list[list[list[Sample]]] = []  # of each step, the groups of this replica
        for epoch in range(options.epochs):
            for part in minibatches(len(self.samples), options.minibatches, seed=seed, epoch=epoch):
                self.steps.append(self.groups([self.samples[index] for index in part], seed=epoch))
        needed = max(len(groups) for groups in self.steps)
        if needed > slots:
            raise ConfigError(
                f"--global-batch-size {slots * place.replicas} is too small: the largest of {len(self.steps)} steps "
                f"has {needed} micro-batches on each of {place.replicas} replicas",
                where=str(options.rollouts),
                remedy=f"--global-batch-size {needed * place.replicas}, or more --t1-minibatches, or a longer "
                "--seq-length",
            )

    def _config(self) -> Any:
        """The contract's sampling temperature is taken from the records: nothing else here knows it."""
        config = self.options.config
        if self.options.rollouts.is_dir():
            contract = next((h.contract for h in RolloutStore(self.options.rollouts).headers().values()), None)
            if contract is not None:
                config.rollout.temperature = contract.temperature
        return config

    @property
    def temperature(self) -> float:
        return self.options.config.rollout.temperature

    @property
    def last_step(self) -> int:
        """Megatron's iteration at which the rollout is used up."""
        return self.options.first_step + len(self.steps)

    def require_steps(self, iteration: int, train_iters: int) -> None:
        """Raise ConfigError unless the records last from the checkpoint's iteration to --train-iters."""
        if self.options.first_step <= iteration and train_iters <= self.last_step:
            return
        raise ConfigError(
            f"these rollouts are steps {self.options.first_step} to {self.last_step}, and the loop would run from "
            f"{iteration} to --train-iters {train_iters}",
            where=str(self.options.rollouts),
            remedy=f"--t1-first-step {iteration} for rollouts that begin now, and --train-iters at most first step + "
            f"{len(self.steps)}",
        )

    def attach(self, names: tuple[str, ...]) -> None:
        """Fields of the sidecars in --t1-values."""
        attach(self.samples, read_sidecar(self.options.values), names)

    def has_values(self) -> bool:
        """Whether --t1-values holds numbers for every one of these records."""
        try:
            sidecar = read_sidecar(self.options.values)
        except IncompleteError:
            return False
        return all(sample.key in sidecar for sample in self.samples)

    def groups(self, samples: list[Sample], *, seed: int = 0) -> list[list[Sample]]:
        """The samples of each of this replica's micro-batches, by one plan for all replicas."""
        plan = plan_samples(
            samples,
            replicas=self.place.replicas,
            capacity=self.place.capacity,
            context_size=int(self.place.sizes["context_size"]),
            seed=seed,
        )
        return plan.groups(self.place.replica, samples)

    def micro_batch(self, group: list[Sample]) -> MicroBatch:
        return build_micro_batch(
            group,
            layout_sizes=self.place.sizes,
            route_shape=self.route_shape,
            device=self.place.device,
        )

    def micro_batches(self, iteration: int) -> Iterator[MicroBatch]:
        """This replica's micro-batches from Megatron's iteration onwards, `slots` for each step."""
        for groups in self.steps[iteration - self.options.first_step :]:
            filled = groups + [[] for _ in range(self.slots - len(groups))]
            yield from map(self.micro_batch, filled)
