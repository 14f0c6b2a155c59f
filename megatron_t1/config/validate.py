"""Everything that can be known to fail before anything starts: all clashes at once, in one error (miles#2367).

`validate` looks at options alone. What lies on disk is `config.inputs`', code that options name `config.targets`'.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from megatron_t1.config import layout_rules
from megatron_t1.config.cluster import slurm_problems
from megatron_t1.config.compose import flatten
from megatron_t1.config.families import FAMILIES, HYBRID, family_problems, number_problems
from megatron_t1.config.inputs import missing_inputs
from megatron_t1.config.schema import MISSING, Config, GaeConfig, LayoutConfig
from megatron_t1.config.targets import target_problems
from megatron_t1.errors import ConfigError

CHOICES: dict[str, tuple[Any, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.architecture.family": FAMILIES,
    "layout.dispatcher": layout_rules.DISPATCHERS,
    "layout.recompute": layout_rules.RECOMPUTATIONS,
    "cluster.launcher": ("local", "slurm"),
    **{f"cluster.{kind}.container_runtime": ("pyxis", "apptainer") for kind in ("rollout", "train")},
    "cluster.backend": ("auto", "cpu", "cuda", "cuda_torch"),
    "generate.pool": ("full", "small"),
    "env.timed_out_policy": ("score", "exclude"),
    "rollout.in_flight": ("restart", "continue"),
    "rollout.engine.dtype": ("", "float32", "bfloat16"),
    "plan.gpu": ("auto", "a100", "h100", "h800", "h20", "h200", "b200", "gb200", "b300"),
    "train.actor.kl_estimator": ("k1", "k2", "k3"),
    "train.actor.old_logprobs": ("sampler", "recomputed"),
    "train.actor.correction": ("none", "truncated", "band", "sequence"),
    "train.loss_denominator": ("step", "rollout"),
    "train.head_dtype": ("model", "float32"),
    "train.router_dtype": ("float32", "model"),
    "train.critic.loss": ("mse", "huber"),
    "train.critic.head_bias": ("zero", "mean_return"),
    "train.gae.advantages": ("raw", "centred", "whitened"),
    **{f"train.{role}.decay": ("constant", "cosine", "linear") for role in ("actor", "critic", "sft")},
    **{f"train.{role}.nonfinite": ("stop", "skip") for role in ("actor", "critic", "sft")},
}
POSITIVE = (
    "layout.processes layout.tensor layout.pipeline layout.virtual_pipeline layout.context layout.expert "
    "layout.expert_tensor layout.engine_tensor env.max_turns env.command_timeout_s env.output_limit "
    "env.agent_timeout_s env.verifier_timeout_s env.start_timeout_s env.teardown_timeout_s "
    "env.sandbox.memory_mb env.sandbox.file_size_mb env.sandbox.max_processes "
    "env.sandbox.cpu_seconds env.sandbox.disk_mb env.sandbox.max_files "
    "rollout.tasks_per_iteration rollout.samples_per_task rollout.selection.min_trials rollout.concurrency "
    "rollout.temperature rollout.max_tokens_per_turn rollout.max_context rollout.engine.max_num_seqs "
    "rollout.engine.tensor_parallel rollout.engine.start_timeout_s rollout.engine.request_timeout_s "
    "rollout.engine.block_size train.capacity train.logprob_chunk train.keep_checkpoints train.actor.epochs "
    "train.actor.minibatches train.critic.epochs train.critic.minibatches train.critic.warmup_epochs "
    "train.critic.warmup_min_epochs train.critic.warmup_patience "
    "train.critic.huber_delta train.sft.tokens train.sft.tokens_per_step train.actor.correction_cap eval.attempts "
    "cluster.rollout.processes_per_node cluster.train.processes_per_node cluster.rollout.threads cluster.train.threads "
    "cluster.stop_grace_s cluster.phase_timeout_s cluster.collective_timeout_s cluster.slurm.max_clock_difference_s "
    "cluster.slurm.stop_lead_s cluster.slurm.requeue_within_s cluster.slurm.max_failures "
    "model.architecture.hidden_size model.architecture.num_hidden_layers "
    "model.architecture.num_attention_heads model.architecture.num_key_value_heads model.architecture.head_dim "
    "model.architecture.moe_intermediate_size model.architecture.num_experts model.architecture.num_experts_per_tok "
    "model.architecture.full_attention_interval generate.min_parts generate.max_parts generate.workers "
    "env.sandbox.host_uid reward.scale train.actor.eps train.critic.eps train.sft.eps plan.imbalance plan.mean_length "
    "plan.utilisation plan.decode_bandwidth plan.prefill_utilisation plan.storage_gb_s plan.node_gb_s plan.network_gb_s"
).split()
NOT_NEGATIVE = (
    "loop.warmup_iterations loop.iterations loop.evaluate_every loop.keep_rollouts loop.keep_exports "
    "loop.keep_evaluated cluster.phase_retries cluster.slurm.max_requeues cluster.slurm.spare_links "
    "cluster.rollout.nodes cluster.train.nodes "
    "cluster.rollout.gpus_per_node cluster.train.gpus_per_node rollout.engine.kv_cache_bytes eval.limit eval.max_turns "
    "env.min_turns eval.temperature reward.cap reward.penalty "
    "train.actor.entropy_coef train.actor.kl_coef train.actor.clip_low train.actor.clip_high "
    "train.critic.value_clip train.gae.length_adaptive_alpha train.sft.aux_loss_coef train.sft.holdout generate.train "
    "train.critic.warmup_holdout train.actor.checkpoint_every train.critic.checkpoint_every train.sft.checkpoint_every "
    "generate.held_out generate.demonstrations generate.demonstration_noise run.seed model.architecture.vocab_size "
    "plan.gpu_memory_gib plan.reserve_gib plan.command_s plan.phase_start_s plan.engine_start_s"
).split()
PHASES_APART = ("critic", "export")  # that may have a layout of their own
FRACTIONS = (
    "train.gae.gamma",
    "train.gae.lambda_actor",
    "train.gae.lambda_critic",
    "generate.demonstration_long_share",
    "rollout.max_untrusted_share",
    "eval.solved_at",
    "monitor.errors",
    "plan.mean_length",
    "plan.sampled_share",
    "plan.utilisation",
    "plan.decode_bandwidth",
    "plan.prefill_utilisation",
    "cluster.gpu_free_share",
    "rollout.selection.max_pass_rate",
    "rollout.selection.min_pass_rate",
    *(f"train.{role}.min_lr_ratio" for role in ("actor", "critic", "sft")),
)
# Arguments of vLLM's server that rollout.engine's other options, the model or the phase decide; in extra_args they
# would win, unseen.
OWN_ENGINE_ARGUMENTS = frozenset(
    "--model --served-model-name --dtype --host --port --max-model-len --max-num-seqs --block-size --logprobs-mode "
    "--seed --generation-config --enable-prefix-caching --enable-prompt-tokens-details --enable-scale-out "
    "--disable-uvicorn-access-log --uvicorn-log-level --kv-cache-memory-bytes --enforce-eager --enable-chunked-prefill "
    "--tensor-parallel-size -tp --enable-return-routed-experts --language-model-only --config --api-key "
    "--tokenizer".split()
)


def validate(config: Config) -> list[str]:
    """Every clash and impossible value of the options alone, as one line each; empty when there is none."""
    flat = flatten(config)
    problems = [
        f"{key}={flat[key]!r} is unknown; there are: {', '.join(repr(choice) for choice in choices)}"
        for key, choices in CHOICES.items()
        if flat[key] not in choices
    ]
    problems += [f"{key}={flat[key]} must be larger than 0" for key in POSITIVE if not flat[key] > 0]
    problems += [f"{key}={flat[key]} must not be negative" for key in NOT_NEGATIVE if flat[key] < 0]
    problems += [f"{key}={flat[key]} must lie in [0, 1]" for key in FRACTIONS if not 0 <= flat[key] <= 1]
    problems += [
        f"{key} is not a finite number"
        for key, value in flat.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    problems += phase_layout_problems(config.layout)
    if problems:
        return problems  # the arithmetic below needs sane numbers
    parts = (_layout, _cluster, _ranges, _rollout, _selection, _engine, _budgets, _training, _places, target_problems)
    return [problem for part in parts for problem in part(config)]


def check(config: Config, inputs: Iterable[str] = (), more: Iterable[str] = ()) -> None:
    """Raise one ConfigError that lists every clash, every missing input and `more` problems, one line each."""
    problems = [*validate(config), *missing_inputs(config, inputs), *more]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems),
            remedy="nothing was started; `--cfg job` prints what is in force",
        )


def _layout(config: Config) -> list[str]:
    problems, layout, model = layout_problems(config), config.layout, config.model.architecture
    if layout_rules.layout_problems(layout, model):
        near = layout_rules.nearest_layouts(layout, model)
        if changes := [layout_rules.changes(layout, each) for each in near if each != layout]:
            problems[-1] += f" (nearest layouts for {layout.processes} processes: {'; or '.join(changes)})"
    return problems


def layout_problems(config: Config) -> list[str]:
    """Why the layouts of the training phases can't work, one line for each reason."""
    model, layout = config.model.architecture, config.layout
    problems = number_problems(model)
    if clashes := layout_rules.layout_problems(layout, model, backend=config.cluster.backend):
        return problems + clashes
    for phase in PHASES_APART:
        if getattr(layout, phase):
            problems += layout_rules.layout_problems(
                layout.of(phase), model, backend=config.cluster.backend, where=f"layout.{phase}"
            )
    if config.loop.colocate_roles:
        problems += [
            f"layout.{phase} needs loop.colocate_roles=false: one process group has one layout"
            for phase in PHASES_APART
            if getattr(layout, phase)
        ]
    return problems


def phase_layout_problems(layout: LayoutConfig) -> list[str]:
    """What layout.critic and layout.export name and can't, one line each."""
    return [f"layout.{phase}.{wrong}" for phase in PHASES_APART for wrong in _not_of_a_phase(getattr(layout, phase))]


def _not_of_a_phase(own: dict[str, Any]) -> list[str]:
    """What one phase can't have for itself, or not of this type."""
    defaults = vars(LayoutConfig())
    fixed = ("processes", "critic", "export", "engine_tensor")
    problems = [f"{name} is the same in all phases" for name in own if name in fixed]
    problems += [f"{name}: the layout has no such option" for name in own if name not in defaults]
    return problems + [
        f"{name}={value!r} should be a {type(defaults[name]).__name__}"
        for name, value in own.items()
        if name in defaults and name not in fixed and type(value) is not type(defaults[name])
    ]


def train_nodes(config: Config) -> int:
    """Nodes a training phase takes."""
    resources = config.cluster.train
    return resources.nodes or -(-config.layout.processes // resources.processes_per_node)


def _cluster(config: Config) -> list[str]:
    cluster, problems = config.cluster, []
    if cluster.launcher == "local":
        for kind, resources in (("rollout", cluster.rollout), ("train", cluster.train)):
            if resources.nodes > 1:
                problems.append(
                    f"cluster.{kind}.nodes={resources.nodes}: cluster=local has one node; use cluster=slurm"
                )
            if resources.container:
                problems.append(f"cluster.{kind}.container needs cluster=slurm")
        if cluster.rollout.processes_per_node > 1:
            problems.append("cluster.rollout.processes_per_node must be 1 with cluster=local: one worker, one engine")
        return problems
    problems += slurm_problems(cluster.slurm)
    nodes, each = train_nodes(config), cluster.train.processes_per_node
    if config.layout.processes < each and cluster.train.nodes <= 1:
        return problems
    if nodes * each != config.layout.processes:
        problems.append(
            f"layout.processes={config.layout.processes} is not cluster.train.nodes x processes_per_node = "
            f"{nodes} x {each}; set cluster.train.processes_per_node to a divisor of {config.layout.processes}"
        )
    return problems


def _rollout(config: Config) -> list[str]:
    rollout, train, problems = config.rollout, config.train, []
    multiple = max(config.layout.of(phase).stream_multiple for phase in ("actor", "critic"))
    if -(-rollout.max_context // multiple) * multiple > train.capacity:
        padded = f", padded to a multiple of {multiple} (layout.context, layout.tensor)," if multiple > 1 else ""
        problems.append(
            f"rollout.max_context={rollout.max_context}{padded} exceeds train.capacity={train.capacity}: "
            "a full trajectory would not fit one micro-batch"
        )
    if rollout.max_tokens_per_turn >= rollout.max_context:
        problems.append(
            f"rollout.max_tokens_per_turn={rollout.max_tokens_per_turn} leaves no room in "
            f"rollout.max_context={rollout.max_context}"
        )
    if rollout.max_context > config.model.architecture.max_position_embeddings:
        problems.append(
            f"rollout.max_context={rollout.max_context} exceeds the model's "
            f"max_position_embeddings={config.model.architecture.max_position_embeddings}"
        )
    if rollout.seeded and rollout.engine.chunked_prefill:
        problems.append(
            "rollout.seeded=true needs rollout.engine.chunked_prefill=false: per-request seeds fail with it"
        )
    if config.model.architecture.family in HYBRID and not rollout.engine.chunked_prefill:
        problems.append(
            "rollout.engine.chunked_prefill=false: vLLM caches the state of gated delta nets "
            f"({config.model.architecture.family}) only with chunked prefill, so rollouts can't be seeded either"
        )
    if not 0 < rollout.top_p <= 1:
        problems.append(f"rollout.top_p={rollout.top_p} must lie in (0, 1]")
    if rollout.top_p < 1:
        problems.append(
            f"rollout.top_p={rollout.top_p}: training can't know which tokens were cut off, so log-probs would not be "
            "comparable; sample with top_p=1"
        )
    if not 0 <= rollout.engine.port <= 65535:
        problems.append(f"rollout.engine.port={rollout.engine.port} is not a port")
    return problems


def _selection(config: Config) -> list[str]:
    env, selection = config.env, config.rollout.selection
    problems = [f"env.weights.{name}: env.sources names no {name}" for name in env.weights if name not in env.sources]
    problems += [
        f"env.weights.{name}={weight} must be a positive number"
        for name, weight in env.weights.items()
        if not 0 < weight < math.inf
    ]
    filtering = selection.max_pass_rate < 1 or selection.min_pass_rate > 0 or selection.drop_untouched
    if filtering != bool(selection.trials):
        problems.append(
            "rollout.selection.trials and a filter (max_pass_rate below 1, min_pass_rate above 0, drop_untouched=true) "
            "need each other"
        )
    return problems


def _budgets(config: Config) -> list[str]:
    """An episode's parts fit the phase that plays it, and scoring never waits for the phase's deadline."""
    env, monitor = config.env, config.monitor
    parts = ("start_timeout_s", "agent_timeout_s", "verifier_timeout_s", "teardown_timeout_s")
    needed = sum(getattr(env, part) for part in parts)
    problems = []
    if needed > config.cluster.phase_timeout_s:  # verifiers#1245
        problems.append(
            f"cluster.phase_timeout_s={config.cluster.phase_timeout_s:g} is less than one episode may take: "
            f"{needed:g} s ({' + '.join(f'env.{part}' for part in parts)})"
        )
    if monitor.history < 2:
        problems.append(f"monitor.history={monitor.history} must be at least 2")
    problems += [
        f"monitor.{name}={getattr(monitor, name)} is a factor and must be larger than 1"
        for name in ("length", "checks", "reward_per_check")
        if not getattr(monitor, name) > 1
    ]
    return problems


def _ranges(config: Config) -> list[str]:
    """Of two options that bound the same thing from both sides, the lower bound is not above the upper one."""
    flat = flatten(config)
    pairs = [
        ("env.min_turns", "env.max_turns"),
        ("generate.min_parts", "generate.max_parts"),
        ("train.sft.tokens_per_step", "train.sft.tokens"),
        ("rollout.selection.min_pass_rate", "rollout.selection.max_pass_rate"),
    ]
    if config.eval.max_turns:
        pairs.append(("env.min_turns", "eval.max_turns"))
    if config.train.critic.warmup_holdout or config.train.critic.rollouts:  # otherwise a warm-up has a fixed length
        pairs.append(("train.critic.warmup_min_epochs", "train.critic.warmup_epochs"))
    for role in ("actor", "critic"):
        if getattr(config.train, role).decay != "constant" and getattr(config.train, role).decay_steps:
            pairs.append((f"train.{role}.warmup_steps", f"train.{role}.decay_steps"))
    problems = [f"{low}={flat[low]} exceeds {high}={flat[high]}" for low, high in pairs if flat[low] > flat[high]]
    if config.plan.imbalance < 1:
        problems.append(
            f"plan.imbalance={config.plan.imbalance}: the fullest rank has at least the mean's rows; from 1 on"
        )
    return problems


def _engine(config: Config) -> list[str]:
    engine, model = config.rollout.engine, config.model.architecture
    problems = layout_rules.engine_problems(engine.tensor_parallel, model)
    for word in engine.extra_args:
        name = word.partition("=")[0].partition(" ")[0].replace("_", "-")
        if name.replace("--no-", "--", 1) in OWN_ENGINE_ARGUMENTS:
            problems.append(
                f"rollout.engine.extra_args: {name} is decided by other options (rollout, rollout.engine, model)"
            )
    # Keys and values of one trajectory of full length, in the layers and heads that one engine process holds.
    heads = max(1, model.num_key_value_heads // engine.tensor_parallel)
    layers = max(1, model.num_hidden_layers // model.full_attention_interval)
    width = 4 if (engine.dtype or config.model.dtype) == "float32" else 2
    needed = 2 * layers * heads * model.head_dim * width * config.rollout.max_context
    if 0 < engine.kv_cache_bytes < needed:
        problems.append(
            f"rollout.engine.kv_cache_bytes={engine.kv_cache_bytes} holds no trajectory of rollout.max_context="
            f"{config.rollout.max_context} tokens, which needs {needed}; 0: the engine's own choice"
        )
    return problems


def _places(config: Config) -> list[str]:
    problems = []
    if not config.run.dir.strip():
        problems.append("run.dir is empty")
    elif os.path.abspath(config.run.dir) == "/":
        problems.append("run.dir=/ is the whole file system: name a directory of the run's own")
    held_out = os.path.abspath(config.eval.tasks)
    trained = {f"env.sources.{name}": path for name, path in config.env.sources.items()}
    for option, tasks in (trained or {"env.tasks": config.env.tasks}).items():
        if tasks not in ("", MISSING) and os.path.abspath(tasks) == held_out:
            problems.append(
                f"{option} and eval.tasks are both {tasks}: an evaluation needs tasks that aren't trained on"
            )
    return problems


def unbuildable(config: Config) -> list[str]:
    """Why no training phase can start, although the options fit each other; empty when one can."""
    return [f"model.architecture: {problem}" for problem in family_problems(config.model.architecture)]


def _training(config: Config) -> list[str]:
    train, rollout, problems = config.train, config.rollout, []
    actor = train.actor
    if actor.correction != "none" and actor.old_logprobs != "recomputed":
        problems.append(
            f"train.actor.correction={actor.correction} needs train.actor.old_logprobs=recomputed: with the sampler's "
            "log-probs as the old policy the PPO ratio already contains the gap"
        )
    if actor.correction == "band" and not 0 <= actor.correction_low < actor.correction_cap:
        problems.append("train.actor.correction=band needs 0 <= correction_low < correction_cap")
    if actor.dual_clip and actor.dual_clip <= 1:
        problems.append(f"train.actor.dual_clip={actor.dual_clip} must be 0 (off) or larger than 1")
    if actor.clip_low >= 1:
        problems.append(f"train.actor.clip_low={actor.clip_low} must be smaller than 1")
    if actor.reference and not actor.kl_coef:
        problems.append("train.actor.reference needs train.actor.kl_coef > 0: nothing else asks for a reference policy")
    if not rollout.routes:
        problems += [f"train.replay.{role}=true needs rollout.routes=true" for role in train.replaying_roles]
    if train.replay.measure_gap and not train.replay.actor:
        problems.append("train.replay.measure_gap=true compares with replay: it needs train.replay.actor=true")
    max_gap = train.replay.max_gap
    if not (max_gap >= 0 or max_gap == -1):
        problems.append(f"train.replay.max_gap={max_gap} must be a number of nats, 0 (off) or -1 (by dtype)")
    measured = train.replay.measure_gap or actor.old_logprobs == "recomputed"
    if max_gap > 0 and not (train.replay.actor and measured):
        problems.append(f"train.replay.max_gap={max_gap} needs train.replay.actor=true and measure_gap=true")
    trajectories = rollout.tasks_per_iteration * rollout.samples_per_task
    for role in ("actor", "critic"):
        options = getattr(train, role)
        if options.minibatches > trajectories:
            problems.append(f"train.{role}.minibatches={options.minibatches} exceeds the {trajectories} trajectories")
    if train.gae.length_adaptive_alpha and train.gae.lambda_actor != GaeConfig().lambda_actor:
        problems.append(
            f"train.gae.length_adaptive_alpha={train.gae.length_adaptive_alpha:g} sets the actor's lambda, and so does "
            f"lambda_actor={train.gae.lambda_actor:g}: give one of them"
        )
    held_out = train.critic.warmup_holdout
    if held_out and train.critic.rollouts:
        if held_out < 64:
            problems.append(f"train.critic.warmup_holdout={held_out} must be 0 (a tenth) or at least 64")
    elif held_out and not 64 <= held_out < trajectories:
        problems.append(
            f"train.critic.warmup_holdout={held_out} must be 0 or at least 64, and fewer than the {trajectories} "
            "trajectories of an iteration"
        )
    for role in ("actor", "critic", "sft"):
        options = getattr(train, role)
        if options.lr <= 0:
            problems.append(f"train.{role}.lr={options.lr} must be larger than 0")
        if role != "sft" and options.decay != "constant" and options.decay_steps <= 0:
            problems.append(f"train.{role}.decay={options.decay} needs train.{role}.decay_steps > 0")
        if not (0 <= options.beta1 < 1 and 0 <= options.beta2 < 1):
            problems.append(f"train.{role}.beta1 and beta2 must lie in [0, 1)")
        if options.weight_decay < 0 or options.clip_grad < 0 or options.warmup_steps < 0:
            problems.append(f"train.{role}: weight_decay, clip_grad and warmup_steps must not be negative")
    if not config.loop.warmup_iterations and not config.loop.iterations:
        problems.append("loop.warmup_iterations and loop.iterations are both 0: there is nothing to do")
    return problems
