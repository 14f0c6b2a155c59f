"""What one GPU says: the cost of replay in a layer, log-probs against their bytes, a training step of a 30B-A3B slice.

    python benchmarks/gpu.py [replay logprobs step] [--backend cuda_torch | cuda | cpu] [--small] [--repeats N]

Needs torch and megatron-core; `--backend cuda` takes Transformer Engine's layers where they are installed. Ways that
are compared take turns in every repetition; medians. `--backend cpu --small` runs every line of it without a GPU, at
sizes whose times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' stack of routers, which replay.py reads

from replay import CORE, Ways, random_routes, seconds

from megatron_t1.config.compose import compose
from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig, ModelConfig
from megatron_t1.errors import ConfigError
from megatron_t1.model.backend import Backend, select_backend
from megatron_t1.ppo.logprobs import token_logprobs
from megatron_t1.ppo.sums import Sums
from megatron_t1.training.samples import Sample

if TYPE_CHECKING:  # batches import Megatron, which a backend prepares for first
    from megatron_t1.training.batch import MicroBatch


@dataclass(frozen=True)
class Sizes:
    """Of the three parts; the small ones are for a machine without a GPU."""

    tokens: int  # through the layer with experts
    experts: int
    hidden: int
    expert_hidden: int
    loss_tokens: int  # projected to the vocabulary
    vocabularies: tuple[int, ...]
    chunk: int
    sequences: int  # of the training step
    length: int
    layers: int
    slice_of: str  # the model whose first `layers` layers are trained


FULL = Sizes(8192, 256, 3072, 1024, 8192, (32_768, 151_936, 248_320), 1024, 8, 4096, 4, "qwen3_30b_a3b")
SMALL = Sizes(256, 16, 32, 16, 64, (512,), 16, 3, 48, 2, "tiny")
BYTES_FORWARD, BYTES_BACKWARD = 8, 20  # of one fp32 logit: written and read; written, changed, read by two products


def median_seconds(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median wall-clock seconds of each call, device work included; one more round before warms up."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(repeats + 1):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if round_number:
                spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_config(architecture: ArchitectureConfig, dtype: str) -> Config:
    config = compose(["layout=single"])
    return replace(config, model=ModelConfig(dtype=dtype, architecture=architecture))


# -- replay in a layer -------------------------------------------------------------------------------------------------


def replay_rows(sizes: Sizes, backend: Backend, repeats: int) -> list[tuple[str, ...]]:
    """One layer with experts, forward and backward: its own top-k, core's replay, this project's."""
    from megatron_t1.model.build import build_model

    architecture = ArchitectureConfig(
        vocab_size=64, hidden_size=sizes.hidden, num_hidden_layers=1, num_attention_heads=sizes.hidden // 16,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=sizes.expert_hidden, num_experts=sizes.experts,
        num_experts_per_tok=8,
    )  # fmt: skip
    (model,) = build_model(model_config(architecture, "bfloat16"), backend, "policy")
    layer = model.train().decoder.layers[0].mlp
    hidden = torch.randn(sizes.tokens, 1, sizes.hidden, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    routes = random_routes(sizes.tokens, 1, sizes.experts, 8).to(backend.device)
    ways = Ways(model, [layer.router], routes, lambda: layer(hidden)[0])
    times = {name: statistics.median(pair[1] for pair in found) for name, found in seconds(ways, repeats).items()}
    base = times[CORE if CORE in times else "native top-k"]
    return [
        (f"layer, {sizes.experts} experts, {sizes.tokens} tokens: {name}", f"{1e3 * spent:.2f}", f"{spent / base:.3f}",
         f"of {CORE if CORE in times else 'native'}")
        for name, spent in times.items()
    ]  # fmt: skip


# -- log-probs against the time of their bytes -------------------------------------------------------------------------


def bytes_per_second(device: torch.device, size: int, repeats: int) -> float:
    """Of a copy on the device: what is read and what is written."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spent = median_seconds({"copy": lambda: target.copy_(source)}, device, repeats)["copy"]
    return 2 * size / spent


def logprob_rows(sizes: Sizes, backend: Backend, repeats: int) -> list[tuple[str, ...]]:
    device = backend.device
    bandwidth = bytes_per_second(device, 2**30 if device.type == "cuda" else 2**20, repeats)
    rows = [("copy", "-", f"{bandwidth / 1e9:,.0f}", "GB/s read and written")]
    for vocabulary in sizes.vocabularies:
        hidden = torch.randn(sizes.loss_tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
        weight = (torch.randn(vocabulary, sizes.hidden, device=device) * 0.02).bfloat16().requires_grad_()
        states = hidden.clone().requires_grad_()
        targets = torch.randint(0, vocabulary, (sizes.loss_tokens,), device=device)
        chunks = [slice(start, start + sizes.chunk) for start in range(0, sizes.loss_tokens, sizes.chunk)]
        gradient = torch.randn(sizes.chunk, vocabulary, device=device).bfloat16()

        def products(times: int, hidden=hidden, weight=weight, gradient=gradient, chunks=chunks) -> None:
            plain = weight.detach()
            for rows in chunks:
                hidden[rows] @ plain.t()
                if times == 4:  # again in the backward, and both gradients
                    hidden[rows] @ plain.t()
                    gradient @ plain
                    gradient.t() @ hidden[rows]

        def forward(states=states, weight=weight, targets=targets) -> torch.Tensor:
            return token_logprobs(states, weight, targets, chunk=sizes.chunk, entropy=False)[0]

        def both(forward=forward, states=states, weight=weight) -> None:
            states.grad = weight.grad = None
            forward().sum().backward()

        calls = {
            "forward": forward,
            "both": both,
            "products": lambda: products(1),
            "products of both": lambda: products(4),
        }
        times = median_seconds(calls, device, repeats)
        logits = sizes.loss_tokens * vocabulary
        for name, base, size in (
            ("forward", "products", BYTES_FORWARD),
            ("both", "products of both", BYTES_FORWARD + BYTES_BACKWARD),
        ):
            least = times[base] + logits * size / bandwidth
            title = f"log-probs, {sizes.loss_tokens} tokens, V {vocabulary}: "
            title += "forward" if name == "forward" else "forward and backward"
            rows.append((title, f"{1e3 * times[name]:.2f}", f"{times[name] / least:.2f}", "of products + bytes"))
    return rows


# -- a training step ---------------------------------------------------------------------------------------------------


def step_rows(sizes: Sizes, backend: Backend, repeats: int) -> list[tuple[str, ...]]:
    """Forward, backward and optimizer of the first layers of a model, with and without replay."""
    from megatron_t1.training.engine import Engine
    from megatron_t1.training.objectives import actor_objective

    whole = compose([f"model={sizes.slice_of}"]).model.architecture
    architecture = replace(whole, num_hidden_layers=sizes.layers, vocab_size=whole.vocab_size or 512)
    config = model_config(architecture, "bfloat16")
    config.train.actor = replace(config.train.actor, lr=1e-6)
    engine = Engine(config, backend, "policy", config.train.actor, replay=True)
    groups = [[sample] for sample in step_samples(sizes, architecture)]
    batches = {name: engine.micro_batches(groups, replay=on) for name, on in (("replay", True), ("native", False))}

    def loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        return actor_objective(engine.logprobs(output, batch), batch, config.train.actor)

    calls = {name: (lambda part=part: engine.train_step(part, loss)) for name, part in batches.items()}
    times = median_seconds(calls, backend.device, repeats)
    tokens = sizes.sequences * sizes.length
    flops = 6 * tokens * active_parameters(architecture) + attention_flops(architecture, sizes)
    peak = torch.cuda.max_memory_allocated() / 2**30 if backend.device.type == "cuda" else float("nan")
    title = f"step, {sizes.layers} layers of {sizes.slice_of}, {tokens} tokens"
    rows = []
    for name, spent in times.items():
        speed = f"{tokens / spent:,.0f} tokens/s, {flops / spent / 1e12:.1f} TFLOP/s"
        rows.append((f"{title}: {name}", f"{1e3 * spent:.1f}", f"{spent / times['native']:.3f}", f"of native; {speed}"))
    return [*rows, ("step, memory", "-", f"{peak:.1f}", "GiB at the highest")]


def step_samples(sizes: Sizes, architecture: ArchitectureConfig) -> list[Sample]:
    """Sequences of turns, 32 sampled tokens and 32 of tool output each, with random routes."""
    random = np.random.default_rng(0)
    samples = []
    for number in range(sizes.sequences):
        mask = np.arange(sizes.length) % 64 >= 32
        routes = random_routes(sizes.length, sizes.layers, architecture.num_experts, architecture.num_experts_per_tok)
        fields = {
            name: random.standard_normal(int(mask.sum())).astype(np.float32)
            for name in ("advantages", "sampler_logprobs")
        }
        samples.append(
            Sample(
                name=f"sequence {number}",
                key=str(number),
                ids=random.integers(0, architecture.vocab_size, sizes.length),
                loss_mask=mask,
                routes=routes.numpy(),
                routed=np.arange(sizes.length) < sizes.length - 1,
                reward=0.0,
                fields=fields,
            )
        )
    return samples


def active_parameters(architecture: ArchitectureConfig) -> int:
    """Of one token: attention, router, its experts, and the vocabulary's projection for the half that has a loss."""
    a = architecture
    attention = a.hidden_size * a.head_dim * (2 * a.num_attention_heads + 2 * a.num_key_value_heads)
    experts = 3 * a.hidden_size * a.moe_intermediate_size * a.num_experts_per_tok + a.hidden_size * a.num_experts
    return a.num_hidden_layers * (attention + experts) + a.hidden_size * a.vocab_size // 2


def attention_flops(architecture: ArchitectureConfig, sizes: Sizes) -> int:
    """Of causal scores and their sums, forward and backward: 3 x 2 x 2 x heads x length^2 / 2 x head size."""
    a = architecture
    return 6 * a.num_hidden_layers * a.num_attention_heads * a.head_dim * sizes.sequences * sizes.length**2


PARTS = {"replay": replay_rows, "logprobs": logprob_rows, "step": step_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--backend", choices=("cuda_torch", "cuda", "cpu"), default="cuda_torch")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    try:
        backend = select_backend(options.backend)
        backend.prepare()
    except ConfigError as error:
        sys.exit(str(error))
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel

    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    device = torch.cuda.get_device_name() if options.backend != "cpu" else "CPU"
    table = Table(title=f"{device}, backend {options.backend}, torch {torch.__version__}, median of {options.repeats}")
    for heading in ("what", "ms", "ratio or number", "unit"):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for part in options.parts or PARTS:
        for row in PARTS[part](SMALL if options.small else FULL, backend, options.repeats):
            table.add_row(*row)
    destroy_parallel()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
