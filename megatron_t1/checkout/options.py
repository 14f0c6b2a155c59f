"""The argument group `--t1-...` of a patched checkout, and the configuration it stands for.

Options of PPO and GAE are those of the configuration schema, under their names there. Importable without torch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import ActorConfig, Config, CriticConfig, GaeConfig
from megatron_t1.errors import ConfigError

ROLES = ("actor", "critic")

# Fields of the schema that a stock training loop can honour. The optimizer's are Megatron's own options (--lr, ...);
# what needs a second model or a second pass over the rollout isn't offered.
_ACTOR = ("clip_low", "clip_high", "dual_clip", "entropy_coef")
_CRITIC = ("value_clip", "loss", "huber_delta", "head_bias")
_GAE = ("gamma", "lambda_actor", "lambda_critic", "length_adaptive_alpha", "turn_level", "advantages")
_SECTIONS = {"actor": (ActorConfig, _ACTOR), "critic": (CriticConfig, _CRITIC), "gae": (GaeConfig, _GAE)}
_CHOICES = {
    "critic_loss": ("mse", "huber"),
    "critic_head_bias": ("zero", "mean_return"),
    "gae_advantages": ("raw", "centred", "whitened"),
}


@dataclass(frozen=True)
class Options:
    """What was asked for on the checkout's command line.

    Attributes:
        role: "actor" or "critic".
        rollouts: directory of rollout records.
        values: directory of sidecars with old values, advantages and returns.
        model: Hugging Face directory of the model in training.
        first_step: Megatron's iteration at which training on these rollouts began.
        config: PPO's options, in the schema's places.
        gae_given: those of `config.train.gae` that stood on the command line.
    """

    role: str
    rollouts: Path
    values: Path
    model: Path
    replay: bool
    epochs: int
    minibatches: int
    first_step: int
    config: Config
    gae_given: dict[str, Any]

    @property
    def steps(self) -> int:
        """Optimizer steps that are asked for; with fewer trajectories than mini-batches there are fewer."""
        return self.epochs * self.minibatches


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group.

    Raises:
        ConfigError: the checkout has options of these names already.
    """
    group = parser.add_argument_group(title="t1", description="megatron-t1: PPO on recorded rollouts, by --t1-role")
    try:
        _add(group)
    except argparse.ArgumentError as error:
        raise ConfigError(
            f"the checkout has an option of this name already: {error}",
            where="--t1-...",
            remedy="rename the checkout's option; if the patch was applied twice by hand, remove one call",
        ) from error
    return parser


def _add(group: Any) -> None:
    actor, critic = ActorConfig(), CriticConfig()
    group.add_argument("--t1-role", choices=ROLES, help="what is trained; without it this group has no effect")
    group.add_argument("--t1-rollouts", metavar="DIR", help="rollout records (RUN/rollouts/iter_N)")
    group.add_argument(
        "--t1-values",
        metavar="DIR",
        help="sidecars with old values, advantages and returns: read, and by the critic written where there are none",
    )
    group.add_argument(
        "--t1-model",
        metavar="DIR",
        help="Hugging Face directory of the model: its tokenizer is compared with the records', its weights are "
        "where training starts when there is no checkpoint to load",
    )
    group.add_argument("--t1-replay", choices=("on", "off"), help="replay recorded experts; actor: on, critic: off")
    group.add_argument("--t1-epochs", type=int, help=f"actor: {actor.epochs}, critic: {critic.epochs}")
    group.add_argument(
        "--t1-minibatches",
        type=int,
        help=f"optimizer steps per epoch; actor: {actor.minibatches}, critic: {critic.minibatches}",
    )
    group.add_argument(
        "--t1-first-step",
        type=int,
        default=0,
        help="iteration at which training on these rollouts begins: the --train-iters of the run before",
    )
    group.add_argument("--t1-logprob-chunk", type=int, default=Config().train.logprob_chunk)
    group.add_argument("--t1-timed-out-policy", choices=("score", "exclude"), default=Config().env.timed_out_policy)
    for section, (schema, names) in _SECTIONS.items():
        defaults = schema()
        for name in names:
            default = getattr(defaults, name)
            flag = f"--t1-{section}-{name}".replace("_", "-")
            # None: not given, which for values that were computed already isn't the same as the default.
            if isinstance(default, bool):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, help=f"default: {default}")
                continue
            choices = _CHOICES.get(f"{section}_{name}")
            group.add_argument(flag, type=type(default), choices=choices, help=f"default: {default}")


def options_of(args: argparse.Namespace) -> Options:
    """The options of a command line whose problems were looked for already (`checks.option_problems`)."""
    role = args.t1_role
    config = Config()
    config.env.timed_out_policy = args.t1_timed_out_policy
    train = config.train
    train.logprob_chunk = args.t1_logprob_chunk
    for section, (_, names) in _SECTIONS.items():
        for name in names:
            value = getattr(args, f"t1_{section}_{name}")
            if value is not None:
                setattr(getattr(train, section), name, value)
    own = getattr(train, role)
    own.epochs = own.epochs if args.t1_epochs is None else args.t1_epochs
    own.minibatches = own.minibatches if args.t1_minibatches is None else args.t1_minibatches
    replay = replay_wanted(args)
    train.replay.actor, train.replay.critic = role == "actor" and replay, role == "critic" and replay
    config.model.path = args.t1_model
    config.model.dtype = "bfloat16" if args.bf16 else "float32"
    return Options(
        role=role,
        rollouts=Path(args.t1_rollouts),
        values=Path(args.t1_values),
        model=Path(args.t1_model),
        replay=replay,
        epochs=own.epochs,
        minibatches=own.minibatches,
        first_step=args.t1_first_step,
        config=config,
        gae_given=gae_given(args),
    )


def gae_given(args: argparse.Namespace) -> dict[str, Any]:
    """Options of GAE that stood on the command line, by their name in the schema."""
    values = {name: getattr(args, f"t1_gae_{name}") for name in _GAE}
    return {name: value for name, value in values.items() if value is not None}


def replay_wanted(args: argparse.Namespace) -> bool:
    """Whether recorded experts are replayed: as asked for, by the role's default otherwise; never in a dense model."""
    if not args.num_experts:
        return False
    if args.t1_replay is None:
        return getattr(Config().train.replay, args.t1_role)
    return args.t1_replay == "on"
