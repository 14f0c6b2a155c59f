"""What `t1 plan` says beside published runs, and for the shipped layouts; `--write FILE` puts the tables into FILE.

Published numbers: Megatron-MoE-ModelZoo, best_practice/qwen3 (step time, TFLOP/s; "natural" routing where it gives
both); Megatron-Bridge's performance archive; Megatron-LM#2772; slime#280; Bridge's recipe for the 122B.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from driving import markdown, write_between

from megatron_t1.config.compose import compose
from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig, ModelConfig, PlanConfig
from megatron_t1.planner.communication import exchange_seconds
from megatron_t1.planner.hardware import GIB, GPUS
from megatron_t1.planner.memory import training_memory
from megatron_t1.planner.preflight import Device
from megatron_t1.planner.report import comparison_text
from megatron_t1.planner.work import forward_operations

QWEN3_235B = ArchitectureConfig(
    vocab_size=151936, hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4,
    head_dim=128, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
)  # fmt: skip
QWEN3_NEXT_80B = ArchitectureConfig(
    family="qwen3_5_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16,
    num_key_value_heads=2, head_dim=256, moe_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
    shared_expert_intermediate_size=512, full_attention_interval=4, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
)  # fmt: skip
QWEN3_30B = compose(["model=qwen3_30b_a3b"]).model.architecture

# Operations of one token, forward and backward, in 1e9: step time x TFLOP/s x GPUs / tokens, or TFLOP/s / tokens/s.
OPERATIONS = (
    ("Qwen3-235B, 4k (19.7 s a step at 245 TFLOP/s)", QWEN3_235B, 4096, 19.7 * 245e12 * 256 / (2048 * 4096)),
    ("Qwen3-235B, 4k (253 TFLOP/s at 1,712 tokens/s)", QWEN3_235B, 4096, 253e12 / 1712),
    ("Qwen3-Next-80B, 4k (2.2 s a step at 89 TFLOP/s)", QWEN3_NEXT_80B, 4096, 2.2 * 89e12 * 128 / (256 * 4096)),
)


@dataclass(frozen=True)
class Run:
    """A published training run on H100s."""

    name: str
    architecture: ArchitectureConfig
    sizes: str  # processes tensor pipeline virtual expert context
    length: int
    sequences: int  # of one optimizer step
    tflops: float
    recomputed: float  # forwards that recompute adds
    reason: str = ""  # why the plan is off by more than 15%

    @property
    def layout(self) -> LayoutConfig:
        names = ("processes", "tensor", "pipeline", "virtual_pipeline", "expert", "context")
        return LayoutConfig(**dict(zip(names, map(int, self.sizes.split()), strict=True)), distributed_optimizer=True)


LONG = "256 4 8 4 8"
RUNS = (
    Run("Qwen3-235B, 4k, DeepEP", QWEN3_235B, "256 2 8 4 32 1", 4096, 2048, 245, 0.1),
    Run("Qwen3-235B, 16k", QWEN3_235B, f"{LONG} 1", 16384, 256, 237, 0.5),
    Run("Qwen3-235B, 32k", QWEN3_235B, f"{LONG} 2", 32768, 256, 277, 0.5),
    Run("Qwen3-235B, 64k", QWEN3_235B, f"{LONG} 4", 65536, 256, 320, 0.5),
    Run("Qwen3-235B, 128k", QWEN3_235B, f"{LONG} 8", 131072, 256, 357, 0.5),
    Run("Qwen3-235B, 4k, PP32", QWEN3_235B, "256 2 32 3 8 1", 4096, 2048, 200, 0.1,
        "the plan counts neither kernel launches nor what stages send each other, and here is a stage for every layer"),
    Run("Qwen3-235B, 4k, TP4", QWEN3_235B, "256 4 8 4 8 1", 4096, 2048, 167, 0.0,
        "1,024 tokens a rank, probably too few for full speed; the plan has one speed for all sizes"),
    Run("Qwen3-Next-80B, 4k", QWEN3_NEXT_80B, "128 1 4 3 32 1", 4096, 256, 89, 0.2,
        "published as not tuned; hence the default of 0.35 for plan.utilisation, where full attention reaches 0.5"),
)  # fmt: skip
# Fitted to the first five runs: kernels' share of the peak, and what one GPU exchanges unhidden. DeepEP sends a token
# once to each node, whatever number of its experts is there, so the network looks as fast as the node.
FITTED = PlanConfig(utilisation=0.5, node_gb_s=100.0, network_gb_s=100.0)


def predicted_tflops(run: Run) -> float:
    """Model operations a second and GPU, in 1e12, of a pre-training step."""
    layout = run.layout
    config = Config(model=ModelConfig(dtype="bfloat16", architecture=run.architecture), layout=layout, plan=FITTED)
    tokens, peak = run.sequences * run.length, GPUS["h100"].tflops * 1e12
    operations = forward_operations(run.architecture, run.length) * tokens
    computing = operations * (3 + run.recomputed) / (layout.processes * peak * FITTED.utilisation)
    exchange = exchange_seconds(config, 2 + run.recomputed, tokens)
    replicas = layout.processes // (layout.tensor * layout.pipeline * layout.context)
    bubble = (layout.pipeline - 1) / (run.sequences / replicas * layout.virtual_pipeline)
    return 3 * operations / layout.processes / ((computing + exchange) * (1 + bubble)) / 1e12


def memory_of(architecture: ArchitectureConfig, layout: LayoutConfig, capacity: int, steps: int = 1) -> float:
    """GiB of the fullest GPU in a training step, without the reserve."""
    config = Config(model=ModelConfig(dtype="bfloat16", architecture=architecture), layout=layout)
    config.train.capacity, config.train.logprob_chunk, config.rollout.max_context = capacity, capacity, capacity
    config.rollout.samples_per_task, config.rollout.tasks_per_iteration = 1, layout.processes * 16
    config.train.actor = replace(config.train.actor, minibatches=steps)
    return training_memory(config, "actor", reserve=0).total / GIB


def fit_rows() -> list[tuple[str, str, str, str]]:
    """Runs of which it is known whether they fit, or what they took."""
    bridge = LayoutConfig(processes=48, tensor=2, pipeline=6, expert=8, recompute="full", distributed_optimizer=True)
    small = LayoutConfig(processes=32, expert=8, recompute="full", distributed_optimizer=True)
    large = LayoutConfig(processes=32, tensor=4, pipeline=2, expert=16, recompute="full", distributed_optimizer=True)
    qwen3_5 = compose(["experiment=ppo_122b"]).model.architecture
    return [
        ("Qwen3-30B-A3B, 32 H800, EP8 (Megatron-LM#2772)", f"{45552 / 1024:.1f} GiB reserved",
         f"{memory_of(QWEN3_30B, small, 4096):.1f} GiB", "micro-batch and recompute aren't stated: 4,096 and full"),
        ("Qwen3.5-122B, 48 H100-80, TP2 PP6 EP8, 4k (Bridge's recipe)", "fits",
         f"{memory_of(qwen3_5, bridge, 4096):.1f} GiB", "of 79.6"),
        ("Qwen3-235B, 32 H100-80 (slime#280)", "fits with the optimizer in main memory only",
         f"{memory_of(QWEN3_235B, large, 4096):.1f} GiB", "of 79.6: doesn't fit"),
    ]  # fmt: skip


def tables() -> dict[str, str]:
    """Name of a marked place in the document -> what belongs there."""
    operations = [
        (name, f"{published / 1e9:.1f}", f"{(own := 3 * forward_operations(a, length)) / 1e9:.1f}",
         f"{own / published - 1:+.1%}")
        for name, a, length, published in OPERATIONS
    ]  # fmt: skip
    speeds = [
        (run.name, run.layout.sizes_text, f"{run.tflops:.0f}",
         f"{(own := predicted_tflops(run)):.0f}", f"{own / run.tflops - 1:+.0%}", run.reason)
        for run in RUNS
    ]  # fmt: skip
    found = {
        "operations": markdown(("run", "published", "plan", ""), operations),
        "speeds": markdown(("run", "layout", "TFLOP/s/GPU", "plan", "", "reason"), speeds),
        "memory": markdown(("run", "published", "plan", ""), fit_rows()),
    }
    for gpu in ("h100", "h200"):
        found[gpu] = f"```\n{_layouts(gpu)}\n```"
    return found


def _layouts(gpu: str) -> str:
    names = sorted(path.stem for path in Path("conf/layout").glob("gpus*.yaml") if "30b" not in path.stem)
    configs = [(name, compose(["experiment=ppo_122b", f"layout={name}", f"plan.gpu={gpu}"])) for name in names]
    configs.sort(key=lambda each: each[1].layout.processes)
    return comparison_text(configs, Device(GPUS[gpu], GPUS[gpu].memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    found = tables()
    for name, table in found.items():
        print(f"{name}\n{table}\n")
        if options.write:
            write_between(options.write, f"{name} table", table)


if __name__ == "__main__":
    main()
