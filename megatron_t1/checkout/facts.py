"""What the checkout's options and the model's Hugging Face directory say about the model, and whether they agree."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.model.stored import CONFIG_FILE, architecture_from_hf
from megatron_t1.routing.replay import moe_layers
from megatron_t1.training.samples import tokenizer_digest

KNOWN_FAMILY = "qwen3_moe"  # whose weights can be read from a Hugging Face directory

# Schema field -> the checkout's option. Numbers that change shapes, routing or positions.
_COMPARED = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "layernorm_epsilon",
}


def architecture_of(args: argparse.Namespace, directory: Path) -> ArchitectureConfig:
    """The architecture in `directory`'s config.json, which must be the one the options build.

    Of a family that can't be read from Hugging Face weights only the vocabulary is taken, the rest from the options.

    Raises:
        IncompleteError: no readable config.json.
        MismatchError: options and config.json disagree; names all of them with both values.
    """
    family, vocab_size = _stated(directory)
    if family == KNOWN_FAMILY:
        stored = architecture_from_hf(directory)
    else:
        stored = ArchitectureConfig(
            family=family, vocab_size=vocab_size, **{field: _option(args, name) for field, name in _COMPARED.items()}
        )
    different = [
        f"--{name.replace('_', '-')} is {_option(args, name)}, config.json has {getattr(stored, field)}"
        for field, name in _COMPARED.items()
        if _option(args, name) != getattr(stored, field)
    ]
    if args.padded_vocab_size < vocab_size:
        different.append(f"the vocabulary is padded to {args.padded_vocab_size}, config.json has {vocab_size} tokens")
    if args.t1_role == "actor" and family == KNOWN_FAMILY:
        untied = args.untie_embeddings_and_output_weights
        if untied == stored.tie_word_embeddings:
            have = "tied" if stored.tie_word_embeddings else "untied"
            different.append(f"--untie-embeddings-and-output-weights is {untied}, config.json's are {have}")
    if different:
        raise MismatchError(
            "the checkout's options build another model: " + "; ".join(different),
            where=str(directory / CONFIG_FILE),
            remedy="give the options of the model that sampled the rollouts, or its directory as --t1-model",
        )
    return stored


def contract_facts(args: argparse.Namespace, architecture: ArchitectureConfig, directory: Path) -> dict[str, Any]:
    """Fields of the sampling contract that the model in training fixes, and the size of its vocabulary."""
    dtype = "bfloat16" if args.bf16 else "float32"
    router = {"fp32": "float32", "fp64": "float64"}.get(getattr(args, "moe_router_dtype", None), dtype)
    return {
        "tokenizer_sha256": tokenizer_digest(directory),
        "model_dtype": dtype,
        "router_dtype": router if args.num_experts else "",
        "vocab_size": architecture.vocab_size,
        "num_experts": args.num_experts or 0,
        "top_k": args.moe_router_topk if args.num_experts else 0,
        "num_moe_layers": count_moe_layers(args),
    }


def count_moe_layers(args: argparse.Namespace) -> int:
    """Decoder layers with experts."""
    shape = argparse.Namespace(
        num_moe_experts=args.num_experts, moe_layer_freq=args.moe_layer_freq, num_layers=args.num_layers
    )
    return len(moe_layers(shape))


def _stated(directory: Path) -> tuple[str, int]:
    """(model_type, vocab_size) of config.json; a multimodal one has them under text_config."""
    path = directory / CONFIG_FILE
    try:
        raw = json.loads(path.read_text())
        text = raw.get("text_config") or raw
        return str(raw["model_type"]), int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteError(
            f"no readable config.json: {error!r}", where=str(path), remedy="give --t1-model a Hugging Face directory"
        ) from error


def _option(args: argparse.Namespace, name: str) -> Any:
    if name == "layernorm_epsilon" and not hasattr(args, name):
        name = "norm_epsilon"  # as it is called before core 0.16
    value = getattr(args, name)
    if name == "num_query_groups" and not getattr(args, "group_query_attention", False):
        return args.num_attention_heads
    return 0 if value is None else value
