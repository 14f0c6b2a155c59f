"""Every option, with its type, unit and default; those of `cluster` are in cluster.py.

Importable without torch, vLLM or Megatron.

conf/*.yaml holds the values of the shipped settings; this file says what may stand there. Defaults that the T1 paper
does not give (learning rates, lambdas, reward scale, warm-up length, ...) are this project's own choice, marked "ours".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_t1.config.cluster import ClusterConfig

MISSING = "???"


@dataclass
class RunConfig:
    """Identity of a run. A run is a directory; everything a phase reads or writes lies below it."""

    dir: str = "runs/default"
    seed: int = 0


@dataclass
class LoopConfig:
    """What `t1 run` does: warm-up iterations (rollout, critic), then iterations (rollout, critic, actor, export)."""

    warmup_iterations: int = 2  # critic only, the actor's files stay untouched; ours
    iterations: int = 3  # with an actor update
    colocate_roles: bool = False  # one training process group hosts critic then actor: saves a start, same memory
    evaluate_every: int = 0  # actor updates between evaluations; 0: only before the first and after the last
    evaluate_first: bool = True
    evaluate_last: bool = True
    # What stays on the disk (checkpoints: train.keep_checkpoints), besides what a step still has to read:
    keep_rollouts: int = 0  # newest iterations whose records, exchange logs and values stay; 0: all
    keep_exports: int = 0  # newest exports; 0: as many as train.keep_checkpoints
    keep_evaluated: int = 0  # newest evaluated policies whose exports stay; 0: all


@dataclass
class ArchitectureConfig:
    """A decoder-only MoE transformer by its published numbers, under Hugging Face's names."""

    family: str = "qwen3_moe"  # qwen3_moe | qwen3_5_moe
    vocab_size: int = 0  # 0: the tokenizer's
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256  # of dense layers, where there are any
    moe_intermediate_size: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    initializer_range: float = 0.04
    full_attention_interval: int = 1  # every n-th layer has full attention, the others gated delta net (qwen3_5_moe)
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    mtp_num_hidden_layers: int = 0


@dataclass
class ModelConfig:
    name: str = "tiny"
    path: str = ""  # Hugging Face directory the policy starts from (config.json, safetensors, tokenizer.json)
    chat_format: str = "chatml_bash"  # how turns are written as tokens: docs/chat-formats.md
    dtype: str = "float32"  # float32 | bfloat16: of training and of the exported checkpoint
    architecture: ArchitectureConfig = field(default_factory=ArchitectureConfig)


@dataclass
class LayoutConfig:
    """Parallel sizes of the training phases. World size must be a multiple of tensor * pipeline * context."""

    processes: int = 2  # world size
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank
    context: int = 1
    expert: int = 2
    expert_tensor: int = 1
    dispatcher: str = "alltoall"  # alltoall | allgather
    recompute: str = "none"  # none | full | moe
    distributed_optimizer: bool = False
    # What is otherwise in one phase, e.g. {recompute: none}; all but the number of processes may be. An export reads
    # the actor's checkpoint in any layout.
    critic: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)
    engine_tensor: int = 1  # GPUs of one vLLM engine, where rollout.engine.tensor_parallel says ${layout.engine_tensor}

    @property
    def sizes(self) -> dict[str, int]:
        """The parallel sizes by their usual short names."""
        return {
            "TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual_pipeline, "CP": self.context,
            "EP": self.expert, "ETP": self.expert_tensor,
        }  # fmt: skip

    @property
    def sizes_text(self) -> str:
        """Those that cut something: "TP2 PP4 CP8"; "" where none does."""
        return " ".join(f"{name}{size}" for name, size in self.sizes.items() if size > 1)

    @property
    def stream_multiple(self) -> int:
        """What the tokens of a micro-batch are padded to a multiple of (`trajectory.layout`)."""
        return math.lcm(2 * self.context if self.context > 1 else 1, self.context * self.tensor)

    def of(self, phase: str) -> LayoutConfig:
        """The layout in one training phase (sft, warmup, critic, actor, export), without others' particulars."""
        own = {"critic": self.critic, "warmup": self.critic, "export": self.export}.get(phase, {})
        return replace(self, **{**own, "critic": {}, "export": {}})


@dataclass
class SandboxConfig:
    """A closed environment for one episode; `_target_` may name any class with the interface of environment.sandbox."""

    _target_: str = "megatron_t1.environment.sandbox.bubblewrap.BubblewrapSandbox"
    scratch_dir: str = ""  # below which private roots lie; empty: the system's temporary directory (TMPDIR, /tmp)
    host_uid: int = 64321  # uid and gid used when the driver is root
    # What stands in for FROM. bubblewrap: a directory that `t1 tasks base` wrote; containers: an image's name. `images`
    # maps patterns of image names ("ghcr.io/lab/ubuntu-*") to one, the first that fits; `base` serves all others
    # (bubblewrap: empty means this host's /usr).
    base: str = ""
    images: dict[str, str] = field(default_factory=dict)
    # Below which control groups are made: empty: the driver's own group; a delegated cgroup v2 directory; off: none.
    cgroup: str = ""
    cpus: float = 1.0  # processors' worth of time, where control groups can be written; 0: no limit
    memory_mb: int = 512  # all processes together, where control groups can be written; else address space of each
    disk_mb: int = 256  # all files together: a tmpfs, in memory, where the driver may mount one (as root, or in a user
    # namespace); else only watched: when the file system that holds scratch_dir is full, verdicts are untrusted
    max_files: int = 50000  # files, directories and links together; as disk_mb
    file_size_mb: int = 64  # of one file
    max_processes: int = 128
    cpu_seconds: int = 600  # of each process
    # Of container backends (docs/backends.md):
    engine: str = ""  # podman | docker | a path to one; empty: the first that is installed
    runtime: str = ""  # OCI runtime: runc | crun | runsc | ...; empty: the engine's own
    options: dict[str, Any] = field(default_factory=dict)  # of a Harbor provider, or of a user's own class
    build_network: str = ""  # of builds: none | host | a network's name; empty: the engine's own; sandboxes have none


@dataclass
class EnvConfig:
    """Tasks, episodes and what bounds them."""

    tasks: str = MISSING  # to train on: a directory of tasks, or a list of them (docs/tasks.md)
    # Several task sets in one run, name -> directory or list, in place of `tasks`; `weights` gives each one's share of
    # an iteration's tasks (1 where it names none), however many tasks it has.
    sources: dict[str, str] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    max_turns: int = 8  # assistant turns; 300 and more for the real thing
    min_turns: int = 0  # before this turn neither a submission nor lost format ends the episode: for tests of length
    command_timeout_s: float = 10.0
    output_limit: int = 200  # characters of a command's output shown to the model: head and tail are kept
    # Each part of an episode has a budget of its own, so that a slow agent leaves no less to the verifier.
    start_timeout_s: float = 900.0  # to bring a sandbox to the task's initial state; also for a step's setup.sh
    agent_timeout_s: float = 120.0  # turns and commands of all steps together; the task's own limit where it is shorter
    verifier_timeout_s: float = 30.0  # the task's own limit where it is shorter
    teardown_timeout_s: float = 60.0  # to leave nothing of a sandbox; also what a verifier may take beyond its limit
    baselines: str = ""  # file with what passes when nothing is done, by check; empty: baseline.json in the task set
    timed_out_policy: str = "score"  # score | exclude: episodes that ended by agent timeout but were verified


@dataclass
class EngineConfig:
    """vLLM server(s) of a rollout phase."""

    dtype: str = ""  # empty: model.dtype
    port: int = 0  # 0: a free one
    max_num_seqs: int = 32
    kv_cache_bytes: int = 134217728
    block_size: int = 32
    chunked_prefill: bool = True  # off: per-request seeds are possible on CPU
    enforce_eager: bool = True
    tensor_parallel: int = 1
    start_timeout_s: float = 300.0
    # Of one generation, queueing included. Above env.agent_timeout_s an engine that hangs looks like a slow agent.
    request_timeout_s: float = 600.0
    omp_threads: int = 2
    extra_args: list[str] = field(default_factory=list)


@dataclass
class SelectionConfig:
    """Which tasks of env.tasks are worth playing, by stored trials. Decided when a run begins; all off by default."""

    # Runs, directories of records, or Harbor's job folders, whose trials count; of a model like the one to be trained.
    trials: list[str] = field(default_factory=list)
    min_trials: int = 4  # trusted ones of a task, below which it is kept whatever they say; ours
    max_pass_rate: float = 1.0  # share of a task's trials that solve it: larger is left out; 0.99: always solved
    min_pass_rate: float = 0.0  # smaller is left out; with a dense reward prefer drop_untouched
    drop_untouched: bool = False  # leave out tasks in which no trial ever passed a check beyond the baseline


@dataclass
class RolloutConfig:
    tasks_per_iteration: int = 128  # ours
    samples_per_task: int = 2  # ours
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    concurrency: int = 32  # episodes in flight in one rollout worker
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens_per_turn: int = 48
    max_context: int = 512  # tokens of one trajectory; must fit train.capacity
    seeded: bool = False  # a seed per trajectory and turn; needs engine.chunked_prefill=false on CPU
    routes: bool = True  # record the experts each token took
    # What a phase that starts again does with episodes that had begun. restart: from their first turn. continue: the
    # engine's answers are kept while an episode lasts; its commands run again in a new sandbox, and the engine is asked
    # from the first request that wasn't answered, or that is another one since a command said something else.
    in_flight: str = "restart"  # restart | continue
    max_untrusted_share: float = 0.5  # more episodes without a trusted verdict than this fail the phase; ours
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class OptimizerConfig:
    lr: float = 3e-4  # ours
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    decay: str = "constant"  # constant | cosine | linear: over decay_steps of this role's own counter
    decay_steps: int = 0
    min_lr_ratio: float = 0.0
    checkpoint_every: int = 0  # mini-batches between checkpoints within a phase, to go on from when it dies; 0: none
    # stop | skip: what a loss or gradient that isn't finite does, to the phase or to its mini-batch alone
    nonfinite: str = "stop"
    # Where Megatron can't load a checkpoint's optimizer in this layout: a new one, with the old schedule, and no error.
    reset_optimizer: bool = False


@dataclass
class ActorConfig(OptimizerConfig):
    epochs: int = 1
    minibatches: int = 2  # optimizer steps per epoch
    clip_low: float = 0.2  # ours
    clip_high: float = 0.28  # ours
    dual_clip: float = 0.0  # 0: off; otherwise > 1
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # of the KL to the reference policy, per token; 0: no reference role
    kl_estimator: str = "k3"  # k1 | k2 | k3; as a loss k1 has no pull on average (docs/ppo.md)
    reference: str = ""  # Hugging Face directory of the reference policy; empty: model.path
    old_logprobs: str = "sampler"  # sampler | recomputed: which policy is "old" in the PPO ratio
    # none | truncated | band | sequence: factor for the sampler/trainer gap; only with old_logprobs=recomputed
    correction: str = "none"
    correction_cap: float = 2.0  # largest factor
    correction_low: float = 0.5  # of the band: tokens with a smaller factor, or one above the cap, are rejected


@dataclass
class CriticConfig(OptimizerConfig):
    lr: float = 5e-4  # ours
    epochs: int = 2
    minibatches: int = 4
    warmup_epochs: int = 4  # passes over each warm-up iteration's rollouts, or the most there may be; ours
    # Trajectories of whole tasks that a warm-up is not trained on: it ends when their explained variance stops rising,
    # and the best critic is kept. 0: all of warmup_epochs; otherwise at least 64.
    warmup_holdout: int = 0
    warmup_min_epochs: int = 2
    warmup_patience: int = 2  # epochs without a new best
    value_clip: float = 0.0  # 0: off
    loss: str = "mse"  # mse | huber
    huber_delta: float = 1.0
    head_bias: str = "mean_return"  # zero | mean_return: start of the scalar head's bias at the first critic phase
    # RUN/critic of a warm-up on stored rollouts, from which the first critic phase starts with a new optimizer; empty:
    # from model.path.
    start: str = ""
    rollouts: list[str] = field(default_factory=list)  # of that warm-up (`t1 train critic`): runs, or their rollouts


@dataclass
class GaeConfig:
    gamma: float = 1.0
    lambda_actor: float = 1.0  # ours
    lambda_critic: float = 1.0  # ours
    length_adaptive_alpha: float = 0.0  # VAPO: lambda_actor = 1 - 1 / (alpha * sampled tokens); 0: off
    turn_level: bool = False  # discount and trace between turns only, not between tokens of one turn
    advantages: str = "raw"  # raw | centred | whitened over the global batch


@dataclass
class ReplayConfig:
    """Rollout routing replay (R3)."""

    actor: bool = True
    critic: bool = False  # explained variance is the same with and without (docs/routing-replay.md)
    reference: bool = True  # with train.actor.kl_coef > 0
    load: bool = False  # how evenly the replayed experts load the model, as metrics of each update
    measure_gap: bool = True  # one more log-prob pass without replay, to report what replay changes
    # Mean |log p trainer - log p sampler| with replay above which the actor phase ends before its update: other weights
    # or other arithmetic. 0: off; -1: 1e-3 where trainer and engine compute in float32, else off; ours. Needs
    # measure_gap or old_logprobs=recomputed.
    max_gap: float = -1.0


@dataclass
class SftConfig(OptimizerConfig):
    lr: float = 2e-3  # ours
    weight_decay: float = 0.01
    warmup_steps: int = 30
    decay: str = "cosine"
    min_lr_ratio: float = 0.05
    demonstrations: str = ""  # directory of records made by `t1 tasks demonstrate`
    tokens: int = 500_000  # tokens to train on, all of a stream counted
    tokens_per_step: int = 1024
    aux_loss_coef: float = 0.001  # load balancing; only here, never in PPO
    holdout: int = 200  # demonstrations kept out to report held-out loss


@dataclass
class TrainConfig:
    capacity: int = 4096  # tokens of one packed micro-batch: a hard limit
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    gae: GaeConfig = field(default_factory=GaeConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss_denominator: str = "step"  # step | rollout: loss tokens of the optimizer step, or their mean over its rollout
    logprob_chunk: int = 1024  # tokens projected to the vocabulary at a time
    head_dtype: str = "model"  # model | float32: of the vocabulary projection's multiplications
    router_dtype: str = "float32"  # float32 | model: of the router's logits; vLLM computes them in the engine's type
    keep_checkpoints: int = 2  # of each role, besides the newest evaluated

    @property
    def replaying_roles(self) -> tuple[str, ...]:
        """Roles that are there and replay recorded experts: they need rollouts with routes."""
        roles = ("actor", "critic", "reference") if self.actor.kl_coef else ("actor", "critic")
        return tuple(role for role in roles if getattr(self.replay, role))


@dataclass
class RewardConfig:
    """`_target_` may name any callable with the signature of megatron_t1.environment.reward.DenseReward."""

    _target_: str = "megatron_t1.environment.reward.DenseReward"
    scale: float = 0.25  # reward of one passed check; one number for the whole training; ours
    cap: float = 0.0  # most checks of one task that are paid; 0: all; ours
    penalty: float = 0.0  # GainReward: what a check costs that passed before and doesn't now, in gained checks; ours


@dataclass
class MonitorConfig:
    """An alarm when a rollout differs from those before it: reported, never acted upon. All ours."""

    history: int = 5  # earlier iterations whose median is compared with; an alarm needs at least 2
    length: float = 1.5  # factor, up or down, of turns and tokens of a trajectory
    checks: float = 1.25  # factor, up or down, of checks that a task has
    reward_per_check: float = 1.25  # factor, up or down
    errors: float = 0.05  # rise of the share of episodes whose verifier, sandbox or engine failed


@dataclass
class EvalConfig:
    tasks: str = MISSING
    attempts: int = 2
    max_turns: int = 0  # 0: env.max_turns
    solved_at: float = 0.95  # score from which a graded task counts as solved (reported beside all checks passed)
    temperature: float = 1.0
    limit: int = 0  # 0: all tasks


@dataclass
class PlanConfig:
    """What `t1 plan` and the check before a start assume. Nothing that is trained depends on it. All ours."""

    gpu: str = "auto"  # auto: the smallest of this machine; or a100, h100, h800, h20, h200, b200, gb200, b300
    gpu_memory_gib: float = 0.0  # of one GPU; 0: as the GPU is known to have
    ignore_memory: bool = False  # start although the model doesn't fit by estimate
    reserve_gib: float = 5.0  # of each GPU: driver, CUDA context, buffers of NCCL and cuBLAS, fragmentation
    imbalance: float = 1.3  # rows of the fullest expert-parallel rank over the mean
    mean_length: float = 0.5  # of a trajectory, over rollout.max_context; turns likewise, over env.max_turns
    sampled_share: float = 0.3  # of a trajectory's tokens that the model wrote
    utilisation: float = 0.35  # of the GPUs' peak, in training, without exchange and pipeline bubbles
    node_gb_s: float = 100.0  # that one GPU exchanges within a node, where nothing hides it
    network_gb_s: float = 40.0  # and between nodes
    decode_bandwidth: float = 0.6  # share of the memory's bandwidth that decoding reaches
    prefill_utilisation: float = 0.35  # of the GPUs' peak
    command_s: float = 5.0  # a turn's command in its sandbox
    phase_start_s: float = 90.0  # processes, communicators, kernels, before a training phase reads its model
    engine_start_s: float = 240.0  # the same of an engine, without reading weights
    storage_gb_s: float = 10.0  # all nodes together, reading or writing


@dataclass
class GenerateConfig:
    """`t1 tasks generate` and `t1 tasks demonstrate`."""

    out: str = "tasks"
    train: int = 500
    held_out: int = 200
    demonstrations: int = 7000
    demonstration_noise: float = 1.0  # multiplies each family's share of wrong commands; 0: perfect demonstrations
    demonstration_long_share: float = 0.0  # share of demonstrations with 3 or 4 sub-jobs instead of 1 or 2
    pool: str = "full"  # full | small: 8 families and half the words, learnt in minutes by a tiny model
    families: list[str] = field(default_factory=list)  # empty: all of the pool
    min_parts: int = 2  # sub-jobs of an RL task; demonstrations have 1 or 2
    max_parts: int = 4
    workers: int = 16  # sandboxes kept open at once


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    iteration: int = -1  # of a phase started by hand; -1: what the manifest says is next
    loop: LoopConfig = field(default_factory=LoopConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    extra: dict[str, Any] = field(default_factory=dict)  # for a user's own classes
