"""What every training phase needs to know: configuration, files, counters, this process's place in the group."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_t1 import atomic
from megatron_t1.config.schema import Config
from megatron_t1.model.backend import Backend
from megatron_t1.paths import Counters, RunPaths
from megatron_t1.phase import WrittenFile
from megatron_t1.timing import timed
from megatron_t1.training.batch import plan_samples
from megatron_t1.training.passes import missing_micro_batches, speaks_for_replica
from megatron_t1.training.samples import Sample, router_dtype, tokenizer_digest
from megatron_t1.trajectory.packing import PackingPlan, SequenceCost
from megatron_t1.trajectory.sidecar import write_sidecar


@dataclass
class Context:
    config: Config
    backend: Backend
    iteration: int
    timings_s: dict[str, float] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.config.run.dir)

    @property
    def counters(self) -> Counters:
        return Counters(self.iteration, self.config.loop.warmup_iterations)

    @property
    def start_model(self) -> Path:
        return Path(self.config.model.path)

    @property
    def is_writer(self) -> bool:
        """The one process that writes results: rank 0."""
        return dist.get_rank() == 0

    @property
    def owns_values(self) -> bool:
        """One process of each data-parallel replica writes that replica's per-token numbers."""
        return speaks_for_replica()

    def contract_facts(self) -> dict[str, Any]:
        """Fields of the sampling contract that the model in training fixes, and the size of its vocabulary."""
        architecture = self.config.model.architecture
        return {
            "tokenizer_sha256": tokenizer_digest(self.start_model),
            "chat_format": self.config.model.chat_format,
            "model_dtype": self.config.model.dtype,
            "vocab_size": architecture.vocab_size,
            "num_experts": architecture.num_experts,
            "top_k": architecture.num_experts_per_tok,
            "num_moe_layers": architecture.num_hidden_layers if architecture.num_experts else 0,
            "router_dtype": router_dtype(self.config),
        }

    def groups(self, samples: list[Sample], *, seed: int = 0) -> list[list[Sample]]:
        """This replica's share of one global packing plan: the samples of each micro-batch, none in a dummy."""
        return self.own_groups(self.plan(samples, seed=seed), samples)

    def plan(self, samples: list[Sample], *, seed: int = 0) -> PackingPlan:
        """The packing plan of all replicas; every process computes the same one."""
        return plan_samples(
            samples,
            replicas=self.replica_count,
            capacity=self.config.train.capacity,
            context_size=parallel_state.get_context_parallel_world_size(),
            stream_multiple=self.config.layout.stream_multiple,
            cost=SequenceCost.of_architecture(self.config.model.architecture),
            seed=seed,
        )

    def own_groups(self, plan: PackingPlan, samples: list[Sample]) -> list[list[Sample]]:
        """The samples of each of this replica's micro-batches, none in those that only fill a round."""
        groups = plan.groups(self.replica, samples)
        return groups + [[] for _ in range(missing_micro_batches(len(groups)))]

    @property
    def replicas(self) -> dist.ProcessGroup:
        """Data-parallel replicas: every process of a replica holds the same samples and numbers."""
        return parallel_state.get_data_parallel_group()

    @property
    def replica(self) -> int:
        return parallel_state.get_data_parallel_rank()

    @property
    def replica_count(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def write_fields(self, directory: Path, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Replace a sidecar by these fields of all replicas' samples. Collective.

        Args:
            samples: this replica's own.
        """
        if self.is_writer:
            shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()
        if self.owns_values:
            arrays = {sample.key: {name: sample.fields[name] for name in names} for sample in samples}
            write_sidecar(directory, self.replica, arrays, ranks=self.replica_count)
        dist.barrier()

    def written(self, directory: Path) -> list[WrittenFile]:
        """Small finished files of a directory, with digests, named relative to the run."""
        return [
            WrittenFile(str(path.relative_to(self.paths.root)), path.stat().st_size, atomic.sha256_file(path))
            for path in sorted(directory.iterdir())
            if path.is_file()
        ]

    def say(self, message: str) -> None:
        if self.is_writer:
            print(message, flush=True)

    def timed(self, name: str) -> AbstractContextManager[None]:
        return timed(self.timings_s, name)
