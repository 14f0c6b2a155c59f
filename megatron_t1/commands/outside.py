"""Training phases outside the loop: `t1 train sft`, and `t1 train critic` on stored rollouts."""

from __future__ import annotations

from megatron_t1.audit.rollouts import rollouts_of
from megatron_t1.cli import Invocation
from megatron_t1.commands.configuration import command_config, print_config, require_startable
from megatron_t1.commands.run import phase, print_results, say, stoppable
from megatron_t1.config.inputs import other_reward
from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.loop.outside import OUTSIDE, run_outside
from megatron_t1.paths import RunPaths

GOES_ON = "the same command goes on from the last checkpoint of this phase, or from the beginning where it has none"


def sft(invocation: Invocation) -> int:
    """Supervised fine-tuning; leaves RUN/model."""
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config, model=True)
    config.iteration = -1
    require_startable(config, ["model.path", "train.sft.demonstrations"])
    return stoppable(lambda: _sft(config), afterwards=GOES_ON)


def _sft(config: Config) -> int:
    print_results([run_outside(config, "sft", say=say)])
    kind = OUTSIDE["sft"]
    say(f"next: t1 run run.dir=ANOTHER {kind.option}={RunPaths.of(config.run.dir).root / kind.leaves}")
    return 0


def critic(invocation: Invocation) -> int:
    """Critic warm-up on stored rollouts, where train.critic.rollouts names some; otherwise a critic phase of a run."""
    config = command_config(invocation)
    if not config.train.critic.rollouts:
        return phase(invocation)
    if invocation.print_config:
        return print_config(config, model=True)
    config.iteration = -1
    inputs = ["model.path", *(["train.critic.start"] if config.train.critic.start else [])]
    require_startable(config, inputs, more=_rollout_problems(config))
    return stoppable(lambda: _warm_up(config), afterwards=GOES_ON)


def _rollout_problems(config: Config) -> list[str]:
    """Why the stored rollouts can't be warmed up on; of imported records nobody knows the scale of their rewards."""
    try:
        targets = rollouts_of(config.train.critic.rollouts)
    except T1Error as error:
        return [f"train.critic.rollouts: {error.where}: {error.problem}"]
    runs = {str(target.root): target.run.reward for target in targets if target.run is not None}
    return [
        f"train.critic.rollouts: {root}: {line}"
        for root, reward in runs.items()
        if (line := other_reward(reward, config.reward))
    ]


def _warm_up(config: Config) -> int:
    run_outside(config, "warmup", say=say)
    from megatron_t1.report.outside import print_outside, write_warmup_plot

    say(f"plot: {write_warmup_plot(config.run.dir)}")
    print_outside(config.run.dir)
    return 0
