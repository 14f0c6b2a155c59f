"""The layouts of the invariance suite, and what one of them computes: loss, metrics and the whole gradient.

Every process start runs many layouts one after another: importing Megatron costs more than all of them.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROLES = ("critic", "actor")


@dataclass(frozen=True)
class Case:
    """One way of splitting the same batch. Data parallelism is what the other sizes leave of the processes."""

    processes: int
    expert: int = 1
    context: int = 1
    pipeline: int = 1
    tensor: int = 1
    capacity: int = 256  # tokens of a micro-batch: how many there are
    order: int = 0  # seed of the packing plan: which one comes first
    padding: int = 1  # micro-batches are padded to a multiple of this
    virtual: int = 1

    @property
    def name(self) -> str:
        sizes = {"dp": self.processes // (self.context * self.pipeline * self.tensor), "ep": self.expert,
                 "cp": self.context, "pp": self.pipeline, "tp": self.tensor, "vpp": self.virtual,
                 "capacity": self.capacity, "order": self.order, "padding": self.padding}  # fmt: skip
        usual = {"dp": 0, "capacity": 0, "order": 0}
        return "-".join(f"{key}{value}" for key, value in sizes.items() if value != usual.get(key, 1))

    @property
    def layout(self) -> dict[str, int]:
        return {
            "processes": self.processes, "expert": self.expert, "context": self.context, "pipeline": self.pipeline,
            "tensor": self.tensor, "expert_tensor": self.tensor, "virtual_pipeline": self.virtual,
        }  # fmt: skip


REFERENCE = Case(1)
# Each pair of values of two dimensions occurs at least once, over one start for each number of processes.
PAIRWISE = (
    Case(1, capacity=64, order=1),
    Case(1, capacity=128, order=2, padding=64),
    Case(2, expert=2, capacity=64, order=1),
    Case(2, capacity=256, order=2, padding=32),
    Case(2, context=2, capacity=64, order=2),
    Case(2, context=2, expert=2, capacity=256, order=1),
    Case(2, pipeline=2, capacity=64, order=1),
    Case(2, tensor=2, capacity=128, order=2),
    Case(4, expert=2, pipeline=2, capacity=128, order=2),
    Case(4, expert=2, context=2, capacity=64, padding=32),
    Case(4, context=2, pipeline=2, capacity=256, order=1),
    Case(4, pipeline=2, virtual=2, expert=2, capacity=64),
)


def every_case() -> tuple[Case, ...]:
    """DP 1/2 x EP 1/2 x CP 1/2 x PP 1/2 x micro-batch splits x packing orders, as far as four processes hold them."""
    found = list(PAIRWISE)
    for data, expert, context, pipeline in itertools.product((1, 2), repeat=4):
        processes = data * context * pipeline
        if processes > 4 or (data * context) % expert:
            continue
        for capacity, order in itertools.product((64, 128, 256), (0, 1, 2)):
            found.append(Case(processes, expert, context, pipeline, capacity=capacity, order=order))
    return tuple(dict.fromkeys(found))


def selected() -> tuple[Case, ...]:
    """The pairwise selection; all of them where T1_INVARIANCE=all."""
    return every_case() if os.environ.get("T1_INVARIANCE") == "all" else PAIRWISE


def compute(run_dir: str, cases: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics of both roles' losses for each case; their gradients are left as checkpoints in RUN/gradients.

    Runs in every process of the group; the cases must all have as many processes as there are.
    """
    from megatron_t1.config.compose import load_run_config
    from megatron_t1.config.schema import LayoutConfig
    from megatron_t1.model.backend import select_backend

    backend = select_backend("cpu")
    backend.prepare()
    from megatron.core import parallel_state

    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    results = {}
    for fields in cases:
        case = Case(**fields)
        config = load_run_config(Path(run_dir))
        config.layout = LayoutConfig(**case.layout)
        config.train.capacity = case.capacity
        initialize_parallel(config.layout, backend, seed=0, architecture=config.model.architecture)
        results[case.name] = {role: gradient_of(config, backend, case, role) for role in ROLES}
        parallel_state.destroy_model_parallel()  # the processes stay together for the next layout
    destroy_parallel()
    return results


def gradient_of(config, backend, case: Case, role: str) -> dict[str, float]:
    """One step with a rate of zero; what the parameters' gradients are is saved as if it were the parameters."""
    import torch

    from megatron_t1.model.checkpoint import save_checkpoint
    from megatron_t1.model.convert import load_hf
    from megatron_t1.ppo.sums import means
    from megatron_t1.training.context import Context
    from megatron_t1.training.engine import Engine
    from megatron_t1.training.objectives import actor_objective, critic_objective
    from megatron_t1.training.samples import load_rollouts

    context = Context(config, backend, 0)
    samples = load_rollouts(context.paths.rollouts(0), config, context.contract_facts()).samples
    fill_fields(samples)
    kind = "policy" if role == "actor" else "value"
    options = replace(getattr(config.train, role), lr=0.0, clip_grad=0.0, weight_decay=0.0)
    engine = Engine(config, backend, kind, options, replay=True)
    load_hf(engine.chunks, config.model.path, kind)
    if kind == "value":  # a head of zeros would hide everything below it
        for chunk in engine.chunks:
            if chunk.post_process:
                with torch.no_grad():
                    chunk.output_layer.weight.copy_(torch.linspace(-1.0, 1.0, chunk.config.hidden_size)[None])
    engine.parameters_changed()

    def loss(output, batch):
        if role == "actor":
            return actor_objective(engine.logprobs(output, batch), batch, options)
        return critic_objective(engine.values(output, batch)["values"], batch, options)

    batches = engine.micro_batches(context.groups(samples, seed=case.order))
    if case.padding > 1:
        batches = [padded(batch, case.padding, engine) for batch in batches]
    metrics = means(engine.train_step(batches, loss))
    for module in engine.modules:
        for parameter in module.parameters():
            parameter.data.copy_(parameter.main_grad)
    directory = context.paths.root / "gradients" / case.name / role
    save_checkpoint(directory, engine.chunks, None, {"role": role})
    return metrics


def padded(batch, multiple: int, engine):
    """The same micro-batch with padding up to a multiple."""
    from megatron_t1.training.batch import build_micro_batch

    sizes = {
        name: getattr(batch.layout, name)
        for name in ("context_size", "context_rank", "tensor_size", "tensor_rank", "sequence_parallel")
    }
    made = build_micro_batch(
        batch.samples,
        layout_sizes={**sizes, "total_multiple": multiple},
        route_shape=engine.route_shape,
        device=engine.backend.device,
    )
    assert made.layout.total % multiple == 0 and made.layout.total > batch.layout.total - multiple
    return made


def fill_fields(samples: list) -> None:
    """Old values, advantages, returns and old log-probs of a policy near by: the same for every layout."""
    import numpy as np

    for sample in samples:
        random = np.random.default_rng(list(sample.key.encode()))
        count = sample.loss_tokens
        for name, scale in (("old_values", 0.5), ("advantages", 2.0), ("returns", 1.0), ("reference_logprobs", 0.2)):
            sample.fields[name] = (random.normal(size=count) * scale).astype(np.float32)
        sample.fields["reference_logprobs"] += sample.fields["sampler_logprobs"]
        sample.fields["trainer_logprobs"] = sample.fields["sampler_logprobs"] + 0.1
        sample.fields["correction"] = np.where(random.random(count) < 0.2, 0.0, 1.3).astype(np.float32)
