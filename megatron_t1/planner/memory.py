"""What each phase needs of one GPU, and whether it has that: training phases by stage, the engine of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_t1.config.dtypes import WIDTHS
from megatron_t1.config.families import has_full_attention
from megatron_t1.config.layout_rules import engine_problems
from megatron_t1.config.schema import ArchitectureConfig, Config
from megatron_t1.planner.activations import Workload, stage_activations
from megatron_t1.planner.hardware import GIB
from megatron_t1.planner.parameters import fullest_rank, total_parameters
from megatron_t1.planner.storage import record_bytes
from megatron_t1.planner.work import Volume, micro_batches

ROLE_OF = {"critic": "value", "actor": "policy", "export": "policy"}
TRAINED = ("critic", "actor")
ENGINE_SHARE = 0.9  # of a GPU's memory that vLLM takes for itself when nothing else is said
MOST_ENGINE = 64  # GPUs of an engine that is proposed
STATES = 2  # of a sequence in each gated delta net
ENGINE_BATCH = 8192  # tokens that it computes at a time, by default


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one GPU in one phase.

    Attributes:
        phase: critic, actor, export or rollout.
        terms: what -> bytes, of the fullest stage.
        by_stage: bytes of every pipeline stage together; one entry where there are none.
        notes: what follows from what is left, one line each.
        shortage: why the phase can't run although its bytes fit; "" when it can.
    """

    phase: str
    terms: dict[str, int]
    by_stage: tuple[int, ...]
    notes: tuple[str, ...] = field(default=())
    shortage: str = ""

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def problem(self, memory: int) -> str:
        """Why the phase doesn't fit into `memory` bytes; "" when it does."""
        if self.total > memory:
            return f"{self.phase} needs {self.total / GIB:.1f} GiB of each GPU, which has {memory / GIB:.1f} GiB"
        return self.shortage and f"{self.phase}: {self.shortage}"


def training_memory(config: Config, phase: str, *, fused: bool = True, reserve: int | None = None) -> PhaseMemory:
    """Of a critic, actor or export phase, when every micro-batch is as full as it may be.

    Args:
        fused: with Transformer Engine's kernels.
        reserve: bytes beside what is computed; None: plan.reserve_gib.
    """
    config = replace(config, layout=config.layout.of(phase))
    layout, dtype, role = config.layout, config.model.dtype, ROLE_OF[phase]
    a = config.model.architecture
    kept = int(config.plan.reserve_gib * GIB) if reserve is None else reserve
    ranks = fullest_rank(a, layout, dtype, role)
    stages = []
    for stage, rank in ranks.items():
        terms = {"weights": rank.weight_bytes}
        if phase in TRAINED:
            work = workload(config, phase, fused=fused)
            found = stage_activations(a, layout, dtype, role, stage, work, chunk=config.train.logprob_chunk)
            terms |= {
                "gradients": rank.gradient_bytes,
                "optimizer": rank.optimizer_bytes,
                "activations": found.kept,
                "one layer or the head": max(found.layer, found.head),
                "routes": found.routes if getattr(config.train.replay, phase) else 0,
            }
        else:
            terms["one parameter, gathered"] = _largest_parameter(a) * WIDTHS[dtype]
        stages.append({**terms, "reserve": kept})
    sums = tuple(sum(terms.values()) for terms in stages)
    return PhaseMemory(phase, stages[sums.index(max(sums))], sums)


def workload(config: Config, phase: str, *, fused: bool = True) -> Workload:
    """The most that one rank may have to compute at a time: full micro-batches, as many as an optimizer step has."""
    return Workload(
        tokens=config.train.capacity,
        micro_batches=micro_batches(config, phase, config.rollout.max_context),
        imbalance=config.plan.imbalance if config.layout.expert > 1 else 1.0,
        fused=fused,
    )


def _largest_parameter(a: ArchitectureConfig) -> int:
    return max(a.vocab_size * a.hidden_size, 2 * a.moe_intermediate_size * a.hidden_size)


# -- rollout ----------------------------------------------------------------------------------------------------------


def cache_bytes_per_token(a: ArchitectureConfig, dtype: str, tensor: int) -> int:
    """Keys and values of one token on one GPU of `tensor`; heads are copied where there are fewer than GPUs."""
    attending = sum(has_full_attention(a, layer) for layer in range(a.num_hidden_layers))
    return 2 * attending * max(1, a.num_key_value_heads // tensor) * a.head_dim * WIDTHS[dtype]


def state_bytes_per_sequence(a: ArchitectureConfig, dtype: str, tensor: int) -> int:
    """Of the gated delta nets, whatever a sequence's length: the state in float32, the convolution's last inputs.

    With prefix caching vLLM keeps the state at the last block's end beside the running one (its `MambaSpec`, "align").
    """
    layers = sum(not has_full_attention(a, layer) for layer in range(a.num_hidden_layers))
    key, value = a.linear_num_key_heads * a.linear_key_head_dim, a.linear_num_value_heads * a.linear_value_head_dim
    state = a.linear_num_value_heads * a.linear_key_head_dim * a.linear_value_head_dim * 4
    convolution = (2 * key + value) * max(0, a.linear_conv_kernel_dim - 1) * WIDTHS[dtype]
    return STATES * layers * (state + convolution) // tensor


@dataclass(frozen=True)
class EngineRoom:
    """What is left for sequences on one GPU of an engine.

    Attributes:
        weights, workspace: bytes taken before any sequence.
        cache: bytes for keys, values and states.
        per_token, per_sequence: bytes of one of each.
        replicas: engines of a rollout phase.
    """

    weights: int
    workspace: int
    cache: int
    per_token: int
    per_sequence: int
    replicas: int

    def in_flight(self, config: Config) -> int:
        """Episodes of one engine at a time, as long as there is room: no more than its share of the iteration's."""
        share = -(-Volume.of(config).trajectories // self.replicas)
        return min(config.rollout.concurrency, config.rollout.engine.max_num_seqs, share)

    def sequences(self, length: float) -> int:
        """That fit at once when each has `length` tokens."""
        return max(0, int(self.cache // (length * self.per_token + self.per_sequence)))


def engine_room(config: Config, memory: int) -> EngineRoom:
    """Of one GPU with `memory` bytes in a rollout phase."""
    engine, a = config.rollout.engine, config.model.architecture
    dtype, tensor = engine.dtype or config.model.dtype, engine.tensor_parallel
    weights = total_parameters(a) * WIDTHS[dtype] // tensor
    routes = 4 * ENGINE_BATCH * a.num_hidden_layers * a.num_experts_per_tok if config.rollout.routes else 0
    batch = ENGINE_BATCH * (a.hidden_size * 8 + a.num_experts_per_tok * a.moe_intermediate_size * 4 // tensor)
    logits = 4 * engine.max_num_seqs * a.vocab_size
    workspace = int(config.plan.reserve_gib * GIB) + batch * WIDTHS[dtype] + logits + routes
    cache = engine.kv_cache_bytes or max(0, int(ENGINE_SHARE * memory) - weights - workspace)
    replicas = rollout_nodes(config) * config.cluster.rollout.processes_per_node
    return EngineRoom(
        weights, workspace, cache, cache_bytes_per_token(a, dtype, tensor), state_bytes_per_sequence(a, dtype, tensor),
        max(1, replicas),
    )  # fmt: skip


def rollout_nodes(config: Config) -> int:
    """Nodes of a rollout phase: as given, else those that the training phase takes."""
    train = config.cluster.train
    return config.cluster.rollout.nodes or train.nodes or -(-config.layout.processes // train.processes_per_node)


def rollout_memory(config: Config, memory: int) -> PhaseMemory:
    """Of an engine on GPUs with `memory` bytes; the cache is what the sequences in flight take at their mean length."""
    room, volume, limit = engine_room(config, memory), Volume.of(config), config.rollout.max_context
    at_mean, at_full = room.sequences(volume.mean_tokens), room.sequences(limit)
    wanted = room.in_flight(config)
    fitting = min(wanted, at_mean)
    cache = int(fitting * (volume.mean_tokens * room.per_token + room.per_sequence))
    notes = [
        f"{room.replicas} engines of {config.rollout.engine.tensor_parallel} GPUs; {room.cache / GIB:.1f} GiB of each "
        f"GPU for sequences: {at_mean} of mean length or {at_full} of full length ({limit} tokens)"
    ]
    if 0 < at_mean < wanted:
        notes.append(f"{wanted} episodes of each engine are in flight: vLLM preempts some, as {at_mean} fit on average")
    each, gpus = _gpus_of_a_node(config)
    if each < gpus:
        notes.append(f"engines use {each} of a node's {gpus} GPUs (cluster.rollout.processes_per_node)")
    shortage = ""
    if 0 < gpus < each:
        shortage = (
            f"{each} GPUs for the engines of a node (rollout.engine.tensor_parallel x "
            f"cluster.rollout.processes_per_node), which has {gpus}, as training has it (otherwise "
            "cluster.rollout.gpus_per_node)"
        )
    elif at_full < 1:
        shortage = f"no trajectory of rollout.max_context={limit} tokens fits beside the weights"
    terms = {"weights": room.weights, "cache and states": cache, "workspace": room.workspace}
    return PhaseMemory("rollout", terms, (sum(terms.values()),), tuple(notes), shortage)


def _gpus_of_a_node(config: Config) -> tuple[int, int]:
    """(GPUs that the engines of a node take, those that it has); 0 where that isn't known, as on one machine."""
    rollout, train = config.cluster.rollout, config.cluster.train
    has = rollout.gpus_per_node or train.gpus_per_node or train.processes_per_node
    return (
        rollout.processes_per_node * config.rollout.engine.tensor_parallel,
        has if config.cluster.launcher == "slurm" else 0,
    )


def smallest_engine(config: Config, memory: int) -> int:
    """GPUs of the smallest engine in which a rollout fits; 0 where none of up to MOST_ENGINE has room."""
    rollout = config.rollout
    for tensor in range(1, MOST_ENGINE + 1):
        engine = replace(rollout.engine, tensor_parallel=tensor)
        trial = replace(config, rollout=replace(rollout, engine=engine))
        if not engine_problems(tensor, config.model.architecture) and not rollout_memory(trial, memory).problem(memory):
            return tensor
    return 0


def host_bytes(config: Config) -> int:
    """Of one node's main memory in a training phase: the records, mapped once for all its processes."""
    return int(record_bytes(config))
