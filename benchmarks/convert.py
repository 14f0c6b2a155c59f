"""The conversion of the 122B, rehearsed: a synthetic checkpoint of its names, shapes and files, few layers and experts.

    python benchmarks/convert.py [--work DIR] [--layers N] [--experts N] [--vocabulary N] [--write FILE]

Writes a vision-language checkpoint of Qwen3.5-122B-A10B's sizes (hidden 3072, experts of 1024, gated delta nets, a part
of the vision tower, a layer of multi-token prediction), loads it into Megatron models of two ranks in several layouts,
exports each, and compares every tensor bit for bit. Seconds are the slower rank's own processor time, which other
processes don't lengthen; GB/s are the whole checkpoint's bytes by these seconds. Peak memory is the largest anonymous
memory of a rank during load or export, less what it held before and the model: what the conversion itself needs.
Everything written is removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a rank imports this as benchmarks.convert
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' way to start ranks

from driving import markdown, write_between

from megatron_t1.config.compose import compose
from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig, ModelConfig
from megatron_t1.model.mapping import WeightMapping
from megatron_t1.model.names import CheckpointNames
from megatron_t1.model.safetensors_io import SafetensorsDirectory, SafetensorsWriter, TensorHeader
from tests.distributed import run_distributed
from tests.hybrid_model import hybrid_hf_config

GIB = 1 << 30
FILE_BYTES = 1 << 30
LAYOUTS = {
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
}
VISION_BLOCKS = 2  # of 27


def checkpoint_tensors(architecture: ArchitectureConfig) -> Iterator[TensorHeader]:
    """Every tensor of the synthetic checkpoint, in the order of its files."""
    mapping = WeightMapping(architecture, CheckpointNames("model.language_model.", fused_experts=True))
    for name, shape in mapping.tensors():
        yield TensorHeader(name, shape, torch.float32 if mapping.keeps_storage_type(name) else torch.bfloat16)
    for name, shape in [*_vision_tensors(architecture), *_prediction_tensors(architecture)]:
        yield TensorHeader(name, shape, torch.bfloat16)


def _vision_tensors(architecture: ArchitectureConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    settings = Qwen3_5MoeVisionConfig(depth=VISION_BLOCKS, out_hidden_size=architecture.hidden_size)
    with torch.device("meta"):
        tower = Qwen3_5MoeVisionModel(settings)
    for name, tensor in tower.state_dict().items():
        yield f"model.visual.{name}", tuple(tensor.shape)


def _prediction_tensors(architecture: ArchitectureConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A full-attention layer with a tensor for each expert matrix, and what joins embedding and hidden states."""
    hidden = architecture.hidden_size
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{name}.weight", (hidden,)
    layer = replace(architecture, num_hidden_layers=1, full_attention_interval=1)
    for name, shape in WeightMapping(layer, CheckpointNames("mtp.")).tensors():
        if name.startswith("mtp.layers."):
            yield name, shape


def write_checkpoint(directory: Path, architecture: ArchitectureConfig) -> None:
    """In files of at most FILE_BYTES, every tensor another stretch of one block of random numbers."""
    directory.mkdir(parents=True)
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02
    files: list[list[TensorHeader]] = [[]]
    for tensor in checkpoint_tensors(architecture):
        if files[-1] and sum(each.bytes for each in files[-1]) + tensor.bytes > FILE_BYTES:
            files.append([])
        files[-1].append(tensor)
    weight_map, start = {}, 0
    for number, tensors in enumerate(files, start=1):
        writer = SafetensorsWriter(directory / f"model-{number:05d}-of-{len(files):05d}.safetensors", tensors)
        for tensor in tensors:
            weight_map[tensor.name] = writer.path.name
            left, start = torch.Size(tensor.shape).numel(), (start + 7919) % len(noise)
            around = start
            while left:
                block = noise[around : around + left]
                writer.write(tensor.name, block + 1 if tensor.name.endswith("linear_attn.norm.weight") else block)
                left, around = left - len(block), 0
        writer.close()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": hybrid_hf_config(architecture, "bfloat16"),
        "vision_config": {"model_type": "qwen3_5_moe", "depth": VISION_BLOCKS},
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))


class Meter:
    """Processor time of the block, and the largest anonymous memory while it runs; mapped files don't count."""

    def __enter__(self) -> Meter:
        self.peak, self._stop = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self.seconds = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.seconds
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel doesn't say how much memory is anonymous")


def rehearse(directory: str, layout: dict[str, Any]) -> dict[str, float]:
    """One rank: build, load, export; seconds and bytes."""
    from megatron_t1.model.backend import select_backend
    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import export_hf, load_hf
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel
    from megatron_t1.model.stored import architecture_from_hf

    root, backend = Path(directory), select_backend("cpu")
    architecture = architecture_from_hf(root / "hf")
    parsed = LayoutConfig(**{"processes": 2, "expert": 1, **layout})
    initialize_parallel(parsed, backend, seed=0, architecture=architecture, timeout_s=300)
    config = Config(model=ModelConfig(dtype="bfloat16", architecture=architecture), layout=parsed)
    before = anonymous_bytes()
    chunks = build_model(config, backend, "policy", initialize=False)
    model = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
    with Meter() as load:
        report = load_hf(chunks, root / "hf", "policy")
    with Meter() as export:
        files = export_hf(chunks, root / "out", root / "hf", "bfloat16")
    destroy_parallel()
    return {
        "model": model,
        "load_s": load.seconds,
        "export_s": export.seconds,
        "load_extra": load.peak - before - model,
        "export_extra": export.peak - before - model,
        "bytes": sum(file.size for file in files if file.path.endswith(".safetensors")),
        "inexact": report.inexact,
        "converted": sum(report.converted.values()),
    }


def differences(first: Path, second: Path) -> list[str]:
    """Tensors that differ in name, type, shape or bits; one tensor's blocks in memory."""
    with SafetensorsDirectory(first) as a, SafetensorsDirectory(second) as b:
        names = a.files.keys() ^ b.files.keys()
        for name in a.files.keys() & b.files.keys():
            same = asdict(a.header(name)) == asdict(b.header(name)) and all(
                torch.equal(x, y) for x, y in zip(a.blocks(name), b.blocks(name), strict=True)
            )
            names |= set() if same else {name}
    return sorted(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/convert-rehearsal"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--write", type=Path, help="file with the marks `convert: begin` and `convert: end`")
    options = parser.parse_args()
    published = compose(["model=qwen3_5_122b_a10b"]).model.architecture
    architecture = replace(
        published,
        num_hidden_layers=options.layers,
        num_experts=options.experts,
        num_experts_per_tok=min(published.num_experts_per_tok, options.experts),
        vocab_size=options.vocabulary,
    )
    tensors = list(checkpoint_tensors(architecture))
    largest = max(tensors, key=lambda tensor: tensor.bytes)
    total = sum(tensor.bytes for tensor in tensors)
    summary = (
        f"{total / 1e9:.2f} GB in {len(tensors)} tensors: {options.layers} layers, {options.experts} experts, "
        f"{options.vocabulary:,} tokens; the largest tensor, `{largest.name}`, is {largest.bytes / GIB:.2f} GiB."
    )
    print(summary, flush=True)
    rows, wrong = [], 0
    try:
        write_checkpoint(options.work / "hf", architecture)
        for name, layout in LAYOUTS.items():
            ranks = run_distributed(
                "benchmarks.convert:rehearse", 2, timeout_s=900, directory=str(options.work.resolve()), layout=layout
            )
            differing = differences(options.work / "hf", options.work / "out")
            wrong += len(differing)
            size, worst = ranks[0]["bytes"], {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            rows.append(
                [
                    name,
                    *(f"{worst[key]:.1f} s, {size / 1e9 / worst[key]:.2f} GB/s" for key in ("load_s", "export_s")),
                    *(f"{worst[key] / GIB:.2f} GiB" for key in ("model", "load_extra", "export_extra")),
                    f"{len(differing)} of {len(tensors)}",
                ]
            )
            print(f"{rows[-1]}; {', '.join(differing[:5]) or 'no tensors'} differ", flush=True)
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    header = ["ranks", "load", "export", "model on a rank", "beyond it in load", "in export", "tensors that differ"]
    table = markdown(header, rows)
    print(table)
    if options.write:
        write_between(options.write, "convert", f"{summary}\n\n{table}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
