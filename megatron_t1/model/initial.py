"""A small random model to start from: a Hugging Face directory with tokenizer, configuration and weights.

Everything is a function of the architecture, the seed and the corpus: the same input gives the same bytes, on any
machine. The directory appears complete or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.config.families import family_problems, layer_types, number_problems
from megatron_t1.config.schema import ArchitectureConfig, ModelConfig
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.model.initial_tokenizer import END_OF_TEXT, END_OF_TURN, chat_template, train_tokenizer
from megatron_t1.model.initial_weights import write_weights

VOCAB_MULTIPLE = 64  # vLLM's CPU kernels and tensor parallelism want round embedding shapes
DTYPES = ("float32", "bfloat16")
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)


def create_initial_model(out_dir: str | Path, config: ModelConfig, seed: int, corpus: Iterable[str]) -> Path:
    """Write a randomly initialised checkpoint that vLLM, transformers and `model.convert` load.

    Args:
        out_dir: directory to create; must not exist or be empty.
        config: `architecture` and `dtype` are used. `architecture.vocab_size` 0: what the tokenizer needs, rounded up.
        seed: of the weights.
        corpus: plain texts the tokenizer is trained on (instructions, commands, outputs), without control tokens.

    Returns:
        The directory: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

    Raises:
        ConfigError: the architecture can't be built; all reasons are listed.
        T1Error: `out_dir` is in use, or the corpus is empty.
    """
    out = Path(out_dir).resolve()
    architecture = config.architecture
    problems = architecture_problems(architecture, config.dtype)
    if problems:
        raise ConfigError("this start model can't be built: " + "; ".join(problems), where="model.architecture")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise T1Error("the model directory exists already", where=str(out), remedy="remove it or name another one")

    tokenizer = train_tokenizer(corpus, vocab_size=architecture.vocab_size)
    vocab_size = architecture.vocab_size or _round_up(tokenizer.get_vocab_size(), VOCAB_MULTIPLE)
    end_of_text, end_of_turn = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)

    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}{atomic.TEMPORARY_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        atomic.write_text(temporary / "tokenizer.json", tokenizer.to_str(pretty=True))
        atomic.write_json(
            temporary / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_OF_TURN,
                "pad_token": END_OF_TEXT,
                "model_max_length": architecture.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
                "chat_template": chat_template(),
            },
        )
        atomic.write_json(
            temporary / "config.json", hf_config(architecture, config.dtype, vocab_size, end_of_turn, end_of_text)
        )
        atomic.write_json(
            temporary / "generation_config.json", {"eos_token_id": [end_of_turn], "pad_token_id": end_of_text}
        )
        write_weights(temporary / "model.safetensors", architecture, config.dtype, vocab_size, seed)
        atomic.fsync_path(temporary)
        if out.exists():
            out.rmdir()
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    atomic.fsync_path(out.parent)
    return out


def architecture_problems(architecture: ArchitectureConfig, dtype: str) -> list[str]:
    """Why no start model can be made of these numbers; empty when one can."""
    a = architecture
    problems = [f"{name} is {getattr(a, name)}: must be at least 1" for name in SIZES if getattr(a, name) < 1]
    if not problems:
        problems = [*family_problems(a), *number_problems(a)]
    if dtype not in DTYPES:
        problems.append(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
    if a.vocab_size % VOCAB_MULTIPLE:
        problems.append(f"vocab_size {a.vocab_size} isn't a multiple of {VOCAB_MULTIPLE}")
    if a.mtp_num_hidden_layers:
        problems.append("mtp_num_hidden_layers: a start model has no multi-token prediction")
    return problems


def hf_config(a: ArchitectureConfig, dtype: str, vocab_size: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """config.json of a Qwen3MoeForCausalLM or a Qwen3_5MoeForCausalLM, with the names of the published checkpoints."""
    return {
        **(_hybrid_settings(a) if a.family == "qwen3_5_moe" else _full_attention_settings(a)),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": eos_id,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "hidden_size": a.hidden_size,
        "initializer_range": a.initializer_range,
        "max_position_embeddings": a.max_position_embeddings,
        "moe_intermediate_size": a.moe_intermediate_size,
        "num_attention_heads": a.num_attention_heads,
        "num_experts": a.num_experts,
        "num_experts_per_tok": a.num_experts_per_tok,
        "num_hidden_layers": a.num_hidden_layers,
        "num_key_value_heads": a.num_key_value_heads,
        "output_router_logits": False,
        "pad_token_id": pad_id,
        "rms_norm_eps": a.rms_norm_eps,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": a.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _full_attention_settings(a: ArchitectureConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "intermediate_size": a.intermediate_size,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_theta": a.rope_theta,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _hybrid_settings(a: ArchitectureConfig) -> dict[str, Any]:
    pairs = int(a.head_dim * a.partial_rotary_factor) // 2
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True,
        "full_attention_interval": a.full_attention_interval,
        "layer_types": layer_types(a),
        "linear_conv_kernel_dim": a.linear_conv_kernel_dim,
        "linear_key_head_dim": a.linear_key_head_dim,
        "linear_num_key_heads": a.linear_num_key_heads,
        "linear_num_value_heads": a.linear_num_value_heads,
        "linear_value_head_dim": a.linear_value_head_dim,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": a.rope_theta,
            "partial_rotary_factor": a.partial_rotary_factor,
            # Which rotary pairs stand for time, height and width; a text has one position in all three.
            "mrope_section": [pairs // 3 + (axis < pairs % 3) for axis in range(3)],
            "mrope_interleaved": True,
        },
        "shared_expert_intermediate_size": a.shared_expert_intermediate_size,
    }


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
