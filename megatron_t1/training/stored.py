"""Critic warm-up on stored rollouts alone: no sampler, no actor.

Reads  `train.critic.rollouts` (rollouts of any runs, or imported records) and `model.path`, the policy to start from
       (or `train.critic.start`, a critic to go on from).
Writes RUN/critic, the checkpoint of the best held-out explained variance; `train.critic.start` of a run takes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_t1.audit.guard import require_no_drift
from megatron_t1.audit.rollouts import rollouts_of
from megatron_t1.audit.targets import Target
from megatron_t1.config.schema import Config
from megatron_t1.model.collective import together
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, require_recorded
from megatron_t1.training.context import Context
from megatron_t1.training.critic import (
    critic_loss,
    critic_metrics,
    fill_targets,
    leave,
    load_start,
    needs_new_targets,
    new_critic,
    origin,
)
from megatron_t1.training.progress import Progress
from megatron_t1.training.results import batch_metrics, engine_timings
from megatron_t1.training.samples import Sample, SampleSet, load_rollouts
from megatron_t1.training.warmup import split_tasks, warm_up
from megatron_t1.trajectory.store import RolloutStore

LEAST_HELD_OUT, HELD_OUT_SHARE = 64, 0.1  # trajectories, where train.critic.warmup_holdout doesn't say; ours


def run_warmup(context: Context) -> PhaseResult:
    config = context.config
    with context.timed("verify"):
        directories = [_verified(target) for target in rollouts_of(config.train.critic.rollouts)]
    with context.timed("load_rollouts"):
        data = load_all(directories, context)
    wanted = config.train.critic.warmup_holdout
    held_out, training = split_tasks(data.samples, held_out_count(wanted, data), 0.0 if wanted else HELD_OUT_SHARE)
    progress = Progress(context, "warmup", "critic", origin(context), [*held_out, *training], keeps_best=True)
    with context.timed("load_model"):
        engine = progress.resumed(lambda: new_critic(context), training)
        if engine is None:
            engine = new_critic(context)
            fresh = load_start(context, engine, training)
            progress.began(newly_initialised=fresh, optimizer_steps=engine.optimizer_steps)

    def targets(epoch: int) -> None:
        if epoch == 0 or needs_new_targets(context):
            with context.timed("targets"):
                fill_targets(context, engine, training, progress)

    context.say(
        f"{len(data.samples)} trajectories of {len(directories)} rollouts, {len(held_out)} held out with their tasks"
    )
    with context.timed("update"):
        found = warm_up(
            context,
            engine,
            held_out,
            training,
            critic_loss(engine),
            progress,
            seed=config.run.seed,
            parts=steps_of_an_epoch(context, len(training)),
            before_epoch=targets,
        )
    if found.before_was_best:
        load_start(context, engine, training)
    files = leave(context, engine, progress, context.paths.warm_critic, 0)
    return PhaseResult(
        phase="warmup",
        iteration=0,
        metrics={**batch_metrics(data), **critic_metrics(engine, progress.steps), **found.metrics},
        timings_s={**context.timings_s, **engine_timings(engine)},
        outputs=files,
        details={
            "critic": str(context.paths.warm_critic),
            "rollouts": [str(directory) for directory in directories],
            "excluded": data.excluded,
            "newly_initialised": progress.start["newly_initialised"],
            "warmup": progress.history,
            "skipped": engine.skipped,
        },
    )


def _verified(target: Target) -> Path:
    """The target's directory, after its records were compared with what their makers recorded. Collective."""
    directory, rank, ranks = target.directory.resolve(), dist.get_rank(), dist.get_world_size()
    if target.result is not None:
        paths, result = RunPaths.of(target.root), target.result
        together(partial(require_recorded, paths, result.iteration, result.phase, directory, part=rank, parts=ranks))
    else:
        together(partial(_require_unchanged, directory, part=rank, parts=ranks))
    together(partial(require_no_drift, directory, part=rank, parts=ranks))
    return directory


def _require_unchanged(directory: Path, *, part: int, parts: int) -> None:
    """Compare records that no phase answers for with the digests they carry themselves."""
    store = RolloutStore(directory)
    for name in store.ids()[part::parts]:
        store.load(name, verify=True)


def load_all(directories: list[Path], context: Context) -> SampleSet:
    """What can be trained on of several rollouts; a record that lies in more than one of them counts once."""
    config, facts = _of_the_critic(context.config), context.contract_facts()
    samples: dict[str, Sample] = {}
    excluded: Counter[str] = Counter()
    for directory in directories:
        found = load_rollouts(directory, config, facts)
        excluded.update(found.excluded)
        for sample in found.samples:
            if sample.key in samples:
                excluded["also in another rollout"] += 1
            samples.setdefault(sample.key, sample)
    return SampleSet(list(samples.values()), dict(excluded))


def _of_the_critic(config: Config) -> Config:
    """The configuration without the other roles' wish for recorded routes."""
    options = replace(config.train.replay, actor=False, reference=False)
    return replace(config, train=replace(config.train, replay=options))


def held_out_count(wanted: int, data: SampleSet) -> int:
    """Trajectories to hold out: as many as asked for, or a tenth, and at least 64."""
    return wanted or max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * len(data.samples)))


def steps_of_an_epoch(context: Context, trajectories: int) -> int:
    """As many as give each optimizer step the trajectories that it has in the loop."""
    rollout, critic = context.config.rollout, context.config.train.critic
    in_a_step = rollout.tasks_per_iteration * rollout.samples_per_task / critic.minibatches
    return max(1, round(trajectories / in_a_step))
