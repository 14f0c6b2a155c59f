"""Demonstrations: scripted commands played through the same agent loop, so that SFT sees what RL will see.

The commands of some demonstrations are wrong on purpose (generate.demonstration_noise), which leaves reinforcement
learning something to improve. No verifier runs by default: SFT doesn't read verdicts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.config.schema import Config, GenerateConfig
from megatron_t1.environment.generate.tasks import demonstration_tasks
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.rollout.agent import Attempt, run_episode
from megatron_t1.rollout.budget import EpisodeLimits
from megatron_t1.rollout.formats import load_format
from megatron_t1.rollout.pool import run_pool, sandbox_maker
from megatron_t1.rollout.progress import RolloutProgress
from megatron_t1.rollout.samplers import ScriptedSampler
from megatron_t1.rollout.signals import run_until_signal
from megatron_t1.trajectory.record import EndReason, Trajectory
from megatron_t1.trajectory.store import RolloutStore

MANIFEST_FILE = "demonstrations.json"
MANIFEST_VERSION = 1
WRITE_EVERY = 512  # episodes; those that are written are not played again after a restart
CORPUS_TASKS = 3000
_OUTPUTS = ("ok", "error 1", "error 2", "error 127", "error timeout", "error format:", "No such file or directory")


def run_demonstrate(config: Config, out: str | Path, *, verify: bool = False) -> dict[str, Any]:
    """Play `generate.demonstrations` scripted episodes and write their records (sealed) to `out`.

    Deterministic: the same options and seed give the same records. A finished `out` is left as it is, a half-finished
    one is continued.

    Args:
        verify: also run each task's verifier and keep the verdict.

    Returns:
        The manifest: settings, number of demonstrations, tokens, tokens that carry loss.

    Raises:
        T1Error: `out` holds demonstrations of other options, or a demonstration can't be played.
    """
    out = Path(out)
    chat = load_format(config.model.chat_format, config.model.path)
    settings = {
        "version": MANIFEST_VERSION,
        "seed": config.run.seed,
        "options": dataclasses.asdict(config.generate),
        "chat_format": chat.name,
        "tokenizer_sha256": chat.tokenizer_sha256,
    }
    finished = _finished(out, settings)
    if finished is not None:
        return finished
    run_until_signal(_play_all(config, chat, out, verify))
    store = RolloutStore(out)
    tokens = loss_tokens = count = 0
    for trajectory in store:
        count += 1
        tokens += len(trajectory)
        loss_tokens += int(trajectory.loss_mask.sum())
    manifest = {**settings, "demonstrations": count, "tokens": tokens, "loss_tokens": loss_tokens}
    atomic.write_json(out / MANIFEST_FILE, manifest)
    return manifest


def tokenizer_corpus(config: GenerateConfig, seed: int, tasks: int = CORPUS_TASKS) -> Iterator[str]:
    """Texts that a start model's tokenizer is trained on: instructions, commands, and what commands say."""
    for task, commands in demonstration_tasks(config, seed, tasks):
        yield task.instruction
        yield from commands
        yield from _OUTPUTS


async def _play_all(config: Config, chat: Any, out: Path, verify: bool) -> None:
    from megatron_t1.environment.verifier import verify as run_verifier

    store = RolloutStore(out)
    known = set(store.ids())
    limits = EpisodeLimits.of(config)
    finished: list[Trajectory] = []

    def write() -> None:
        store.add_many(sorted(finished, key=lambda item: item.header.trajectory_id))
        finished.clear()

    jobs = [
        (attempt, commands)
        for task, commands in demonstration_tasks(config.generate, config.run.seed, config.generate.demonstrations)
        if (attempt := Attempt(task, 0)).trajectory_id not in known
    ]
    total = len(jobs) + len(known)
    with RolloutProgress("demonstrations", total, done=len(known)) as progress:

        async def play(job: tuple[Attempt, list[str]], sandbox: Any) -> None:
            attempt, commands = job
            trajectory = await run_episode(
                attempt,
                sandbox,
                lambda: ScriptedSampler(chat, commands),
                chat,
                limits,
                verify=run_verifier if verify else None,
            )
            _require_whole(attempt.task, commands, trajectory)
            # Times are the only thing that differs between two runs of the same seed.
            header = dataclasses.replace(trajectory.header, timings_s={})
            finished.append(dataclasses.replace(trajectory, header=header))
            progress.add(trajectory)
            if len(finished) >= WRITE_EVERY:
                write()

        workers = min(config.generate.workers, max(1, len(jobs)))
        await run_pool(jobs, play, workers=workers, make_sandbox=sandbox_maker(config.env))
    write()


def _require_whole(task: Task, commands: list[str], trajectory: Trajectory) -> None:
    """A demonstration that didn't reach its end would teach to stop anywhere."""
    header = trajectory.header
    played, expected = header.counts["turns"], len(commands) + 1
    if header.end_reason != EndReason.SUBMITTED or played != expected:
        raise T1Error(
            f"the demonstration ended by {header.end_reason} after {played} of {expected} turns",
            where=f"task {task.name}",
            remedy="raise rollout.max_context, rollout.max_tokens_per_turn or env.max_turns",
        )


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    path = out / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        same = {name: manifest[name] for name in settings} == settings
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise T1Error(f"the manifest can't be read: {error}", where=str(path), remedy="remove the folder") from error
    if not same:
        raise T1Error(
            "demonstrations of other options, another seed or another tokenizer lie there",
            where=str(path),
            remedy="name another folder, or remove this one",
        )
    return manifest
