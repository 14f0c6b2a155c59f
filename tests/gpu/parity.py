"""One PPO step of the tiny model on one device, everything it computes put on record: two devices can be compared.

    python -m tests.gpu.parity RUN BACKEND FILE

RUN is a run directory with a rollout and its configuration; FILE becomes a safetensors file of float64 arrays:
log-probs, entropies and values of every loss token, the sums of both losses, and both models' parameters after a step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from megatron_t1.config.compose import load_run_config
from megatron_t1.model.backend import Backend, select_backend

MODELS = {"actor": "policy", "critic": "value"}


def compute(run: Path, backend: Backend, *, replay: bool = True) -> dict[str, np.ndarray]:
    """What one step of both roles computes on `backend`, in a process that has joined its parallel state."""
    from megatron_t1.model.convert import load_hf
    from megatron_t1.training.context import Context
    from megatron_t1.training.engine import Engine
    from megatron_t1.training.objectives import actor_objective, critic_objective
    from megatron_t1.training.samples import load_rollouts

    config = load_run_config(run)
    context = Context(config, backend, 0)
    samples = load_rollouts(context.paths.rollouts(0), config, context.contract_facts()).samples
    add_fields(samples)
    found: dict[str, np.ndarray] = {}
    for role, kind in MODELS.items():
        options = getattr(config.train, role)
        engine = Engine(config, backend, kind, options, replay=replay)
        load_hf(engine.chunks, Path(config.model.path), kind)
        if kind == "value":  # a head of zeros would hide everything below it
            head = engine.chunks[-1].output_layer.weight
            with torch.no_grad():
                head.copy_(torch.linspace(-1.0, 1.0, head.shape[1])[None])
        engine.parameters_changed()
        batches = engine.micro_batches(context.groups(samples))
        read = engine.logprobs if kind == "policy" else engine.values

        def loss(output, batch, kind=kind, engine=engine, options=options):
            if kind == "policy":
                return actor_objective(engine.logprobs(output, batch), batch, options)
            return critic_objective(engine.values(output, batch)["values"], batch, options)

        for number, scored in enumerate(engine.score(batches, read)):
            found.update({f"{role}/{name}/{number}": values.double().cpu().numpy() for name, values in scored.items()})
        sums = engine.train_step(batches, loss)
        found.update({f"{role}/sums/{name}": total.double().cpu().numpy() for name, total in sums.items()})
        for name, parameter in engine.chunks[0].named_parameters():
            found[f"{role}/after/{name}"] = parameter.detach().double().cpu().numpy()
    return found


def add_fields(samples: list) -> None:
    """Targets in the place of a critic's, the same on every device."""
    for number, sample in enumerate(samples):
        random = np.random.default_rng(number)
        for name in ("advantages", "returns", "old_values"):
            sample.fields[name] = random.standard_normal(sample.loss_tokens).astype(np.float32)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray], part: str) -> float:
    """Of all numbers under "ROLE/PART/", relative to the largest of them."""
    names = [name for name in one if name.split("/")[1] == part]
    assert names and one.keys() == other.keys()
    scale = max(float(np.abs(other[name]).max()) for name in names)
    return max(float(np.abs(one[name] - other[name]).max()) for name in names) / scale


def main() -> None:
    from megatron_t1.config.schema import LayoutConfig

    run, name, file = sys.argv[1:]
    backend = select_backend(name)
    backend.prepare()
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    found = compute(Path(run), backend)
    destroy_parallel()
    save_file({key: np.ascontiguousarray(value) for key, value in found.items()}, file)


if __name__ == "__main__":
    main()
