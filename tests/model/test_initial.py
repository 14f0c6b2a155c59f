"""The random start model: deterministic, complete, and what transformers calls a Qwen3-MoE or Qwen3.5-MoE."""

import hashlib
import json
from dataclasses import replace

import pytest

from megatron_t1.config.compose import compose
from megatron_t1.config.schema import ModelConfig
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.model.initial import create_initial_model
from megatron_t1.model.initial_tokenizer import CONTROL_TOKENS, train_tokenizer
from megatron_t1.model.initial_weights import tensor_shapes

WORDS = ("alpha", "budget", "carrot", "docs")
CORPUS = [f"create the file {word}.txt and {word} in {word}/{word}" for word in WORDS] * 2


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_same_seed_same_bytes_and_another_seed_other_weights(tmp_path):
    made = [create_initial_model(tmp_path / f"m{i}", ModelConfig(), seed, CORPUS) for i, seed in enumerate((0, 0, 1))]
    first, again, other = map(digests, made)
    assert first == again
    assert set(first) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


@pytest.mark.parametrize(("model", "kind"), [("tiny", "Qwen3MoeForCausalLM"), ("tiny_hybrid", "Qwen3_5MoeForCausalLM")])
def test_transformers_loads_every_tensor(tmp_path, model, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = replace(compose([f"model={model}"]).model, dtype="bfloat16")
    model_dir = create_initial_model(tmp_path / "model", config, 3, CORPUS)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, output_loading_info=True
    )
    assert type(model).__name__ == kind
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    raw = json.loads((model_dir / "config.json").read_text())
    assert model.config.rope_parameters["rope_theta"] == config.architecture.rope_theta
    shapes = dict(tensor_shapes(config.architecture, raw["vocab_size"]))
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        torch.Size(shape).numel() for shape in shapes.values()
    )
    gate = model.model.layers[0].mlp.gate.weight.float()
    assert abs(float(gate.detach().std()) - config.architecture.initializer_range) < 0.004
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 5, 9]])).logits).all()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) <= raw["vocab_size"] and raw["vocab_size"] % 64 == 0
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "<|im_start|>user\nx<|im_end|>\n"


def test_words_roles_and_markers_are_single_tokens():
    tokenizer = train_tokenizer(CORPUS)
    for word in WORDS:
        assert len(tokenizer.encode(f" {word}").ids) == 1
    for word in (*CONTROL_TOKENS, "user", "assistant", "tool", "system", "\n"):
        assert len(tokenizer.encode(word).ids) == 1
    assert len(tokenizer.encode("123").ids) == 3  # digits stay apart: counts are written one by one
    assert tokenizer.decode(tokenizer.encode("☃\x00é").ids) == "☃\x00é"


def test_failures_name_everything_and_leave_nothing(tmp_path):
    config = ModelConfig(dtype="float16")
    config.architecture.num_experts_per_tok, config.architecture.head_dim = 32, 31
    with pytest.raises(ConfigError) as caught:
        create_initial_model(tmp_path / "model", config, 0, CORPUS)
    for part in ("float16", "num_experts_per_tok=32 exceeds num_experts=16", "head_dim=31"):
        assert part in str(caught.value)
    with pytest.raises(T1Error, match="corpus"):
        create_initial_model(tmp_path / "model", ModelConfig(), 0, [])
    with pytest.raises(ConfigError, match="linear_num_key_heads"):
        config = ModelConfig()
        config.architecture.family = "qwen3_5_moe"
        create_initial_model(tmp_path / "model", config, 0, CORPUS)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(T1Error, match="exists already"):
        create_initial_model(tmp_path / "model", ModelConfig(), 0, CORPUS)
    assert (tmp_path / "model" / "mine").exists()


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(T1Error, match="256 bytes"):
        train_tokenizer(CORPUS, vocab_size=128)
