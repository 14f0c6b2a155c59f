"""Operations per token, and how many tokens a training phase computes: the numbers that times are made of.

An operation is a multiplication or an addition; a matrix product of [m, k] and [k, n] has 2 m k n of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_t1.config.families import has_full_attention
from megatron_t1.config.schema import ArchitectureConfig, Config
from megatron_t1.planner.parameters import active_parameters


def forward_operations(architecture: ArchitectureConfig, length: float) -> float:
    """Operations of one token's forward in a sequence of `length` tokens, on average over the sequence.

    Causal attention meets half of the sequence on average. The gated delta net updates and reads a state of fixed size.
    """
    a = architecture
    attending = sum(has_full_attention(a, layer) for layer in range(a.num_hidden_layers))
    scores_and_values = attending * 2 * 2 * a.num_attention_heads * a.head_dim * length / 2
    state = a.linear_num_value_heads * a.linear_key_head_dim * a.linear_value_head_dim
    recurrent = (a.num_hidden_layers - attending) * 6 * state
    return 2 * active_parameters(a) + scores_and_values + recurrent


@dataclass(frozen=True)
class Volume:
    """Of one iteration, as the plan assumes it.

    Attributes:
        trajectories: all of them are trained on.
        mean_tokens: of one trajectory.
        sampled_tokens: of those, by the model; the others are prompts and tool output.
        turns: of one trajectory.
    """

    trajectories: int
    mean_tokens: float
    sampled_tokens: float
    turns: float

    @property
    def tokens(self) -> float:
        return self.trajectories * self.mean_tokens

    @classmethod
    def of(cls, config: Config) -> Volume:
        rollout, plan = config.rollout, config.plan
        mean = plan.mean_length * rollout.max_context
        return cls(
            rollout.tasks_per_iteration * rollout.samples_per_task,
            mean,
            plan.sampled_share * mean,
            max(1.0, plan.mean_length * config.env.max_turns),
        )


def micro_batches(config: Config, role: str, length: float) -> int:
    """Micro-batches of one optimizer step on one replica, with trajectories of `length` tokens packed whole."""
    layout, volume = config.layout, Volume.of(config)
    replicas = layout.processes // (layout.tensor * layout.pipeline * layout.context)
    steps = getattr(config.train, role).minibatches
    packed = max(1, int(config.train.capacity // max(1.0, length)))
    return max(1, -(-volume.trajectories // (steps * packed * replicas)))


def passes(config: Config, role: str, *, backward: float = 2.0) -> float:
    """Forwards' worth of work that a phase of `role` does for each token: scoring, then forward and backward.

    Recomputing the layers is one more forward, the experts alone about half of one.

    Args:
        backward: what a backward is worth: two forwards in operations, one in exchange between ranks.
    """
    layout, train = config.layout, config.train
    step = 1.0 + backward + {"full": 1.0, "moe": 0.5}.get(layout.recompute, 0.0)
    if role == "critic":
        return 1.0 + train.critic.epochs * step
    scoring = 1.0 + (1.0 if train.replay.measure_gap else 0.0) + (1.0 if train.actor.kl_coef else 0.0)
    return scoring + train.actor.epochs * step
