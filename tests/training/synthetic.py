"""Rollouts that nobody sampled: random ids and valid random routes in the shape of real episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.atomic import sha256_file
from megatron_t1.config.compose import save
from megatron_t1.config.schema import Config
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.training.samples import Sample
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.record import IMPORTED, EndReason, Header, Origin, Trajectory, Verdict
from megatron_t1.trajectory.store import RolloutStore
from tests.tiny_model import ARCHITECTURE, tiny_config

LAYERS, EXPERTS, TOP_K = ARCHITECTURE.num_hidden_layers, ARCHITECTURE.num_experts, ARCHITECTURE.num_experts_per_tok
GARBAGE = 255  # no expert of any tiny model


def contract(tokenizer: str = "0" * 64, **changes: Any) -> SamplingContract:
    fields = dict(
        temperature=1.0,
        top_p=1.0,
        logprobs_mode="processed",
        stop_ids=(2,),
        tokenizer_sha256=tokenizer,
        chat_format="chatml_bash",
        engine="none",
        engine_dtype="float32",
        model_dtype="float32",
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_moe_layers=LAYERS,
    )
    return SamplingContract(**{**fields, **changes})


def episode(
    name: str,
    *,
    seed: int = 0,
    turns: int = 3,
    routes: bool = True,
    demonstration: bool = False,
    agreed: SamplingContract | None = None,
    **header: Any,
) -> Trajectory:
    """Prompt, then for each turn an answer, a boundary token and tool output; the last turn has no output."""
    random = np.random.default_rng([seed, *name.encode()])
    kind = Origin.DEMONSTRATION if demonstration else Origin.SAMPLED
    origin, turn = [Origin.PROMPT] * int(random.integers(3, 9)), []
    turn += [0] * len(origin)
    for number in range(turns):
        output = 0 if number == turns - 1 else int(random.integers(2, 9))
        for what, count in ((kind, int(random.integers(1, 8))), (Origin.REPAIR, 1), (Origin.ENVIRONMENT, output)):
            origin += [what] * count
            turn += [number] * count
    origin = np.array(origin, np.uint8)
    length = len(origin)
    chosen = random.random((length, LAYERS, EXPERTS)).argsort(axis=2)[:, :, :TOP_K].astype(np.uint8)
    chosen[-1] = GARBAGE  # the very last row is never recorded: what stands there must not matter
    passed = int(random.integers(0, 5))
    fields = {
        "trajectory_id": name,
        "task": name.rpartition("-")[0],
        "attempt": 0,
        "iteration": 0,
        "policy_versions": (0,) * turns,
        "end_reason": EndReason.SUBMITTED,
        "verdict": None if demonstration else Verdict(passed=passed, total=4, baseline=0, trusted=True),
        "reward": {} if demonstration else {"total": 0.25 * passed},
        "contract": None if demonstration else agreed or contract(),
        "extra": {IMPORTED: "synthetic"},  # no engine made it: there is no exchange log
    }
    logprobs = np.where(origin == Origin.SAMPLED, -3.0 - 2.0 * random.random(length), np.nan).astype(np.float32)
    return Trajectory(
        header=Header(**{**fields, **header}),
        ids=random.integers(0, ARCHITECTURE.vocab_size, length).astype(np.int32),
        origin=origin,
        turn=np.array(turn, np.uint16),
        logprobs=logprobs,
        routes=chosen if routes else None,
        routed=(np.arange(length) < length - 1) & routes,
    )


def samples(count: int, **options: Any) -> list[Sample]:
    return [Sample.of(episode(f"task{number}-0", turns=1 + number % 4, **options)) for number in range(count)]


def write_rollout(directory: Path, model: Path, count: int = 9, seed: int = 0, iteration: int = 0) -> None:
    agreed = contract(sha256_file(model / "tokenizer.json"))
    store = RolloutStore(directory)
    store.add_many(
        episode(f"task{number}-0", seed=seed, turns=1 + number % 4, agreed=agreed, iteration=iteration)
        for number in range(count)
    )
    run_dir = directory.parents[1]
    result = PhaseResult("rollout", iteration, outputs=store.written_files(run_dir))
    result.write(RunPaths.of(run_dir).phase(iteration, "rollout"))


def run_config(run_dir: Path, model: Path, *, warmup: int = 0, **layout: Any) -> Config:
    """A run's configuration, also saved where its phases look for it."""
    config = tiny_config(**layout)
    config.run.dir = str(run_dir)
    config.model.path = str(model)
    config.loop.warmup_iterations = warmup
    config.rollout.max_context = 128
    config.train.capacity = 256
    config.train.actor = replace(config.train.actor, lr=1e-3, minibatches=2)
    config.train.critic = replace(config.train.critic, lr=2e-3, minibatches=2, epochs=1, warmup_epochs=2)
    config.train.replay.max_gap = 0.0  # the log-probs are made up
    config.cluster.backend = "cpu"
    save_config(config)
    return config


def save_config(config: Config) -> None:
    save(config, Path(config.run.dir) / "config.yaml")
