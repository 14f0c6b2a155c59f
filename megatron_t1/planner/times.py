"""How long each phase of an iteration takes, by the assumptions in `plan`: orders of magnitude, good for comparing.

Every number is of the whole allocation. What isn't in them: waiting for a scheduler, retries, evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_t1.config.dtypes import WIDTHS
from megatron_t1.config.schema import Config
from megatron_t1.planner.communication import exchange_seconds
from megatron_t1.planner.hardware import Gpu
from megatron_t1.planner.memory import ROLE_OF, engine_room
from megatron_t1.planner.parameters import total_parameters
from megatron_t1.planner.storage import checkpoint_bytes, export_bytes, record_bytes
from megatron_t1.planner.work import Volume, forward_operations, micro_batches, passes

STEP_OVERHEAD_S = 0.004  # of one decoding step: scheduling, sampling, two reductions over the engine's GPUs per layer
LONGEST = 1.0  # the longest episode, over rollout.max_context: an iteration ends when it does


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase: part -> seconds, in order; and numbers that explain them."""

    phase: str
    parts: dict[str, float]
    facts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def iteration_times(config: Config, gpu: Gpu) -> list[PhaseTime]:
    """Rollout, critic, actor and export of one iteration after the warm-up."""
    return [rollout_time(config, gpu), *(training_time(config, role, gpu) for role in ("critic", "actor")),
            export_time(config)]  # fmt: skip


def training_time(config: Config, role: str, gpu: Gpu) -> PhaseTime:
    """Of a critic or actor phase: it reads model and optimizer, computes its passes, writes both again."""
    config = replace(config, layout=config.layout.of(role))
    volume, layout, plan = Volume.of(config), config.layout, config.plan
    operations = volume.tokens * forward_operations(config.model.architecture, volume.mean_tokens)
    computing = operations * passes(config, role) / (layout.processes * gpu.tflops * 1e12 * plan.utilisation)
    exchange = exchange_seconds(config, passes(config, role, backward=1.0), volume.tokens)
    bubble = pipeline_bubble(config, role, volume.mean_tokens)
    idle = bubble * (computing + exchange)
    moved = checkpoint_bytes(config, ROLE_OF[role])
    parts = {
        "start": plan.phase_start_s,
        "read": (moved + record_bytes(config)) / (plan.storage_gb_s * 1e9),
        "compute": computing,
        "exchange": exchange,
        "bubble": idle,
        "write": moved / (plan.storage_gb_s * 1e9),
    }
    busy = layout.processes * busy_seconds(parts)
    facts = {"tokens/s/GPU": volume.tokens / busy}
    return PhaseTime(role, parts, facts)


def busy_seconds(parts: dict[str, float]) -> float:
    """Of a training phase's parts, those in which the GPUs have the model."""
    return sum(parts[name] for name in ("compute", "exchange", "bubble"))


def pipeline_bubble(config: Config, role: str, length: float) -> float:
    """Idle time over busy time of a pipeline (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    layout = config.layout
    return (layout.pipeline - 1) / (micro_batches(config, role, length) * layout.virtual_pipeline)


def export_time(config: Config) -> PhaseTime:
    moved = export_bytes(config) / (config.plan.storage_gb_s * 1e9)
    return PhaseTime("export", {"start": config.plan.phase_start_s, "read": moved, "write": moved}, {})


def rollout_time(config: Config, gpu: Gpu) -> PhaseTime:
    """Decoding reads weights, keys, values and states from memory; prompts and tool output are computed once."""
    a, plan, volume, engine = config.model.architecture, config.plan, Volume.of(config), config.rollout.engine
    room, tensor = engine_room(config, gpu.memory), engine.tensor_parallel
    share = -(-volume.trajectories // room.replicas)
    batch = min(room.in_flight(config), max(1, room.sequences(volume.mean_tokens)))
    bandwidth = gpu.bandwidth_gb_s * 1e9 * plan.decode_bandwidth
    kept = batch * (volume.mean_tokens / 2 * room.per_token + room.per_sequence)
    touched = weights_touched(config, batch) * WIDTHS[engine.dtype or config.model.dtype] / tensor
    step = STEP_OVERHEAD_S + (touched + kept) / bandwidth
    prompt = (volume.mean_tokens - volume.sampled_tokens) * forward_operations(a, volume.mean_tokens)
    prefill = prompt / (tensor * gpu.tflops * 1e12 * plan.prefill_utilisation)
    # While one sequence's prompt is computed the others of its engine wait.
    episode = volume.sampled_tokens * step + volume.turns * plan.command_s + batch * prefill
    longest = episode * LONGEST / plan.mean_length
    played = max(episode * share / batch, longest)
    weights = export_bytes(config) * room.replicas / (plan.storage_gb_s * 1e9)
    parts = {"start": plan.engine_start_s, "read": weights, "episodes": played}
    facts = {
        "engines": room.replicas, "in flight": batch, "decode step, ms": 1e3 * step, "mean episode, s": episode,
        "longest, s": longest, "sampled tokens/s": volume.trajectories * volume.sampled_tokens / played,
    }  # fmt: skip
    return PhaseTime("rollout", parts, facts)


def weights_touched(config: Config, batch: float) -> float:
    """Parameters that one decoding step of `batch` sequences reads: experts that no token takes stay where they are."""
    a = config.model.architecture
    experts = a.num_hidden_layers * a.num_experts * 3 * a.hidden_size * a.moe_intermediate_size
    taken = 1 - (1 - a.num_experts_per_tok / a.num_experts) ** batch
    return total_parameters(a) - experts * (1 - taken)
