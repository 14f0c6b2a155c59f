"""An export of a vision-language checkpoint loads in vLLM like the checkpoint: text model trained, all else carried."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_t1.config.compose import compose
from megatron_t1.model.initial import create_initial_model
from megatron_t1.model.stored import architecture_from_hf

VISION = dict(
    depth=1, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=8, out_hidden_size=128,
    num_position_embeddings=16,
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], list(range(20, 60))]


def write_vision_language(directory: Path) -> Path:
    """`model=tiny_hybrid` with a small vision tower and a layer of multi-token prediction, as Qwen3.5 is published."""
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    config = compose(["model=tiny_hybrid"]).model
    create_initial_model(directory, config, 0, ["a few words of text, and numbers: 0123456789"] * 2)
    architecture = architecture_from_hf(directory)
    torch.manual_seed(0)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    for name, tensor in Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**VISION)).state_dict().items():
        tensors[f"model.visual.{name}"] = tensor.bfloat16()
    hidden = architecture.hidden_size
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(hidden).bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {**text, "mtp_num_hidden_layers": 1},
        "vision_config": {"model_type": "qwen3_5_moe", **VISION},
        "tie_word_embeddings": False,
        "image_token_id": 1,
        "video_token_id": 2,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
    }
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


async def answers(directory: Path, log: Path) -> list:
    """What the loop's engine samples greedily from a checkpoint: tokens, log-probs and routes of each prompt."""
    from megatron_t1.config.schema import EngineConfig
    from megatron_t1.rollout.engine.client import EngineClient
    from megatron_t1.rollout.engine.server import VllmServer
    from megatron_t1.rollout.policy import route_shape_of

    shape = route_shape_of(json.loads((directory / "config.json").read_text()))
    options = EngineConfig(omp_threads=1, max_num_seqs=2)
    server = VllmServer(options, directory, "bfloat16", log, max_model_len=128, routes=True)
    async with server, EngineClient(server.url, route_shape=shape, check_alive=server.check_alive) as client:
        sampling = dict(max_tokens=12, temperature=0.0, top_p=1.0, stop_ids=[], routes_from=0)
        return [await client.generate(np.array(prompt, np.int32), **sampling) for prompt in PROMPTS]


@pytest.mark.slow
def test_the_engine_answers_alike_from_a_checkpoint_and_from_its_export(tmp_path, backend):
    pytest.importorskip("vllm")
    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import export_hf, load_hf
    from tests.tiny_model import tiny_config

    original = write_vision_language(tmp_path / "hf")
    architecture = architecture_from_hf(original)
    config = tiny_config(architecture=architecture, dtype="bfloat16")
    chunks = build_model(config, backend, "policy", initialize=False)
    report = load_hf(chunks, original, "policy")
    carried = [name for name in load_file(original / "model.safetensors") if "visual" in name or "mtp." in name]
    assert report.carried == len(carried) > 10 and report.converted == {}
    export_hf(chunks, tmp_path / "out", original, "bfloat16")
    log = tmp_path / "engine.log"
    of_original, of_export = (asyncio.run(answers(tmp_path / name, log)) for name in ("hf", "out"))
    assert "Qwen3_5MoeForConditionalGeneration" in log.read_text()
    for prompt, one, other in zip(PROMPTS, of_original, of_export, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.logprobs.tolist() == other.logprobs.tolist()
        assert one.routes.shape == (len(prompt) + 11, architecture.num_hidden_layers, architecture.num_experts_per_tok)
        assert (one.routes == other.routes).all() and np.ptp(one.routes) > 1
