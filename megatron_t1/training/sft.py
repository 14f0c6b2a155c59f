"""Supervised fine-tuning on demonstration records: the start of the pipeline.

Reads `model.path` and `train.sft.demonstrations`; writes RUN/model, a Hugging Face directory that `t1 run` and vLLM
start from, and a torch_dist checkpoint RUN/checkpoints/sft/iter_0001.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megatron_t1.errors import ConfigError
from megatron_t1.model.convert import export_hf, load_hf
from megatron_t1.phase import PhaseResult
from megatron_t1.ppo.sums import Sums, means, weighted
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.samples import Sample, load_demonstrations

REPORTS = 20  # progress lines of a training
HOLDOUT_SEED = 1


def run_sft(context: Context) -> PhaseResult:
    config = context.config
    options = config.train.sft
    with context.timed("load_demonstrations"):
        facts = context.contract_facts()
        samples = load_demonstrations(
            Path(options.demonstrations), vocab_size=facts["vocab_size"], tokenizer_sha256=facts["tokenizer_sha256"]
        )
        held_out, training = split_holdout(samples, options.holdout)
    with context.timed("load_model"):
        engine = Engine(config, context.backend, "policy", options, replay=False, aux_loss_coef=options.aux_loss_coef)
        load_hf(engine.chunks, context.start_model, role="policy")
        engine.parameters_changed()

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        logprobs = engine.logprobs(output, batch)["logprobs"]
        return -logprobs.sum(), {"loss": weighted(-logprobs, torch.ones_like(logprobs))}

    def held_out_loss() -> float:
        return means(engine.evaluate(engine.micro_batches(context.groups(held_out)), loss))["loss"]

    mean_length = sum(len(sample.ids) for sample in training) / len(training)
    decay_steps = math.ceil(options.tokens / max(options.tokens_per_step, mean_length))
    metrics = {"sft/held_out_loss_before": held_out_loss()}
    trained, started, report_at = 0, time.perf_counter(), 0
    with context.timed("train"):
        for step, group in enumerate(step_groups(training, options.tokens_per_step, config.run.seed)):
            sums = engine.train_step(
                engine.micro_batches(context.groups(group, seed=step)), loss, decay_steps=decay_steps
            )
            trained += sum(len(sample.ids) for sample in group)
            if trained >= report_at or trained >= options.tokens:
                report_at += options.tokens // REPORTS
                rate = trained / (time.perf_counter() - started)
                context.say(
                    f"sft step {step + 1}: {trained:,} of {options.tokens:,} tokens, {rate:,.0f} tokens/s, "
                    f"loss {means(sums)['loss']:.3f} nats/token"
                )
            if trained >= options.tokens:
                break
    metrics.update(
        {
            "sft/held_out_loss": held_out_loss(),
            "sft/loss": means(sums)["loss"],
            "sft/tokens": float(trained),
            "sft/optimizer_steps": float(engine.optimizer_steps),
            "sft/tokens_per_s": trained / context.timings_s["train"],
            "sft/demonstrations": float(len(training)),
        }
    )
    context.say(
        f"held-out loss {metrics['sft/held_out_loss_before']:.3f} -> {metrics['sft/held_out_loss']:.3f} nats/token"
    )
    model = context.paths.root / "model"
    with context.timed("save"):
        files = engine.save(context.paths.checkpoint("sft", 1), 1, relative_to=context.paths.root)
    with context.timed("export"):
        exported = export_hf(
            engine.chunks, model, context.start_model, config.model.dtype, relative_to=context.paths.root
        )
    return PhaseResult(
        phase="sft",
        iteration=0,
        metrics=metrics,
        timings_s=context.timings_s,
        outputs=[*files, *exported],
        details={"model": str(model), "demonstrations": options.demonstrations},
    )


def split_holdout(samples: list[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """Held-out and training demonstrations, by a fixed permutation (the same split for every run seed)."""
    if not 0 < count < len(samples):
        raise ConfigError(
            f"train.sft.holdout={count} doesn't fit {len(samples)} demonstrations",
            where="train.sft.holdout",
            remedy="hold out at least one and fewer than there are",
        )
    order = np.random.default_rng(HOLDOUT_SEED).permutation(len(samples))
    return [samples[i] for i in order[:count]], [samples[i] for i in order[count:]]


def step_groups(samples: list[Sample], tokens_per_step: int, seed: int) -> Iterator[list[Sample]]:
    """Endless groups of about `tokens_per_step` tokens; every sample once per epoch, a new order each epoch."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(samples))
        group: list[Sample] = []
        size = 0
        for index in order:
            group.append(samples[index])
            size += len(samples[index].ids)
            if size >= tokens_per_step:
                yield group
                group, size = [], 0
        if group:
            yield group
        epoch += 1
