"""Where a training stands by a finished step: what the manifest says beside names and digests.

Nothing is read from here to go on: positions follow from options and counters (`rollout.schedule`, `paths.Counters`),
the optimizer's from its checkpoint. Here they can be looked up, and compared between runs.
"""

from __future__ import annotations

from typing import Any

from megatron_t1 import sealed
from megatron_t1.config.schema import Config
from megatron_t1.paths import Counters
from megatron_t1.phase import PhaseResult

COUNTED = ("optimizer_steps", "learning_rate")  # of a role, where its phase reports them


def position_of(result: PhaseResult, config: Config) -> dict[str, Any]:
    """Of a rollout: seed, policy, and the positions in the run's sequence of tasks that it played (`tasks_to` is the
    first that it didn't). Of an evaluation: seed and policy. Of a role: its new version, optimizer steps, its rate.
    """
    counters = Counters(result.iteration, config.loop.warmup_iterations)
    if result.phase in ("rollout", "evaluation"):
        played = {"seed": config.run.seed, "policy": counters.policy}
        if result.phase == "rollout":
            first = result.iteration * config.rollout.tasks_per_iteration
            played |= {"tasks_from": first, "tasks_to": first + config.rollout.tasks_per_iteration}
        return played
    version = (counters.critic if result.phase == "critic" else counters.policy) + 1
    counted = {name: result.metrics[key] for name in COUNTED if (key := f"{result.phase}/{name}") in result.metrics}
    return {"seed": config.run.seed, "version": version, **counted}


def contract_of(result: PhaseResult) -> tuple[str, dict[str, Any]]:
    """What a rollout's tokens were sampled under, with its SHA-256; "" and nothing for phases that sample none."""
    contract = result.details.get("contract")
    if not isinstance(contract, dict):
        return "", {}
    return sealed.digest(contract), contract
