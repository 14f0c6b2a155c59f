"""Supervised fine-tuning on demonstration records: the start of the pipeline.

Reads `model.path` and `train.sft.demonstrations`; writes RUN/model, a Hugging Face directory that `t1 run` and vLLM
start from, and a torch_dist checkpoint RUN/checkpoints/sft/iter_0001.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from megatron_t1.errors import ConfigError
from megatron_t1.model.convert import export_hf, load_hf, require_other_directory
from megatron_t1.phase import PhaseResult
from megatron_t1.ppo.sums import Sums, means, weighted
from megatron_t1.training.batch import MicroBatch
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.passes import LossFunction
from megatron_t1.training.progress import Progress
from megatron_t1.training.samples import Sample, load_demonstrations
from megatron_t1.training.updates import update_metrics

REPORTS = 20  # progress lines of a training
HOLDOUT_SEED = 1


def run_sft(context: Context) -> PhaseResult:
    config = context.config
    options, model = config.train.sft, context.paths.root / "model"
    require_other_directory(model, context.start_model)
    with context.timed("load_demonstrations"):
        facts = context.contract_facts()
        samples = load_demonstrations(
            Path(options.demonstrations), vocab_size=facts["vocab_size"], tokenizer_sha256=facts["tokenizer_sha256"]
        )
        held_out, training = split_holdout(samples, options.holdout)
    progress = Progress(context, "sft", "sft", context.start_model, [*training, *held_out], keep_steps=False)
    with context.timed("load_model"):
        engine = progress.resumed(lambda: _new_engine(context), training)
        resumed = engine is not None
        if engine is None:
            engine = _new_engine(context)
            load_hf(engine.chunks, context.start_model, role="policy")
            engine.parameters_changed()

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        logprobs = engine.logprobs(output, batch)["logprobs"]
        return -logprobs.sum(), {"loss": weighted(-logprobs, torch.ones_like(logprobs))}

    def held_out_loss() -> float:
        return means(engine.evaluate(engine.micro_batches(context.groups(held_out)), loss))["loss"]

    mean_length = sum(len(sample.ids) for sample in training) / len(training)
    decay_steps = math.ceil(options.tokens / max(options.tokens_per_step, mean_length))
    if not resumed:
        progress.began(metrics={"sft/held_out_loss_before": held_out_loss()})
    metrics = progress.start["metrics"]
    with context.timed("train"):
        trained, rate = _train(context, engine, progress, training, loss, decay_steps)
    metrics.update(
        {
            "sft/held_out_loss": held_out_loss(),
            "sft/loss": means(progress.steps[-1]).get("loss", math.nan),
            "sft/tokens": float(trained),
            "sft/optimizer_steps": float(engine.optimizer_steps),
            "sft/skipped_steps": float(len(engine.skipped)),
            "sft/tokens_per_s": rate,
            "sft/demonstrations": float(len(training)),
        }
    )
    context.say(
        f"held-out loss {metrics['sft/held_out_loss_before']:.3f} -> {metrics['sft/held_out_loss']:.3f} nats/token"
    )
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
        details={"model": str(model), "demonstrations": options.demonstrations, "skipped": engine.skipped},
    )


def _new_engine(context: Context) -> Engine:
    options = context.config.train.sft
    return Engine(context.config, context.backend, "policy", options, replay=False, aux_loss_coef=options.aux_loss_coef)


def _train(
    context: Context, engine: Engine, progress: Progress, training: list[Sample], loss: LossFunction, decay_steps: int
) -> tuple[int, float]:
    """Steps until `train.sft.tokens` are trained on, from where `progress` stands; the tokens, and how many a second.

    Raises:
        T1Error: every step was skipped.
    """
    options, started = context.config.train.sft, time.perf_counter()
    groups = step_groups(training, options.tokens_per_step, context.config.run.seed)
    trained = before = sum(len(sample.ids) for group in islice(groups, progress.taken) for sample in group)
    interval = options.tokens // REPORTS
    report_at, rate = trained + interval * (trained > 0), 0.0
    while trained < options.tokens:
        group = next(groups)
        sums = engine.train_step(
            engine.micro_batches(context.groups(group, seed=progress.taken)), loss, decay_steps=decay_steps
        )
        progress.took(sums)
        trained += sum(len(sample.ids) for sample in group)
        rate = (trained - before) / (time.perf_counter() - started)
        if trained >= report_at or trained >= options.tokens:
            report_at += interval
            context.say(
                f"sft step {progress.taken}: {trained:,} of {options.tokens:,} tokens, {rate:,.0f} tokens/s, "
                f"loss {means(sums).get('loss', math.nan):.3f} nats/token"
            )
        if trained < options.tokens:
            progress.save_if_due(engine)
    if not engine.optimizer_steps:
        update_metrics("sft", engine, progress.steps)  # says that every step was skipped
    return trained, rate


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
