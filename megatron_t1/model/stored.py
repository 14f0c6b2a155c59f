"""What a checkpoint on disk says of itself, and whether that is the configured model. Works without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import ArchitectureConfig, ModelConfig
from megatron_t1.errors import ConfigError, IncompleteError, MismatchError

CONFIG_FILE = "config.json"

# Numbers that change no shape and no computation of the families here.
_FREE_FIELDS = ("initializer_range", "intermediate_size", "max_position_embeddings")


def require_equal_architecture(stored: ArchitectureConfig, built: ArchitectureConfig, *, where: str) -> None:
    """Raise MismatchError naming every number in which a checkpoint and the model differ, with both values."""
    different = [
        f"{name}: the checkpoint has {value!r}, the model {getattr(built, name)!r}"
        for name, value in asdict(stored).items()
        if name not in _FREE_FIELDS and getattr(built, name) != value
    ]
    if different:
        raise MismatchError(
            "the checkpoint is of another architecture: " + "; ".join(different),
            where=where,
            remedy="build the model from this checkpoint, or give the checkpoint it was built from",
        )


def model_differences(model: ModelConfig) -> list[str]:
    """One line for each option of `model` that `model.path`'s config.json contradicts, with both values.

    Raises:
        T1Error: as `architecture_from_hf`.
    """
    stored = asdict(architecture_from_hf(model.path))
    configured = asdict(model.architecture)
    configured["vocab_size"] = configured["vocab_size"] or stored["vocab_size"]
    different = [
        f"model.architecture.{name}={configured[name]!r}, and the checkpoint in model.path has {value!r}"
        for name, value in stored.items()
        if name not in _FREE_FIELDS and configured[name] != value
    ]
    dtype = stored_dtype(model.path)
    if dtype and dtype != model.dtype:
        different.append(f"model.dtype={model.dtype!r}, and the checkpoint in model.path has {dtype!r}")
    return different


def stored_dtype(hf_dir: str | Path) -> str:
    """The dtype that config.json states; "" where it states none."""
    raw = _read(Path(hf_dir) / CONFIG_FILE)
    return str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")


# Values that must hold where config.json has the key: what Megatron is told to compute.
_QWEN3_MOE_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
_QWEN3_MOE_DEFAULTS = {"norm_topk_prob": False, "tie_word_embeddings": False, "head_dim": None}


def architecture_from_hf(hf_dir: str | Path) -> ArchitectureConfig:
    """Read config.json of a Hugging Face directory.

    Raises:
        IncompleteError: no readable config.json, or a number is missing in it.
        ConfigError: another model_type, or an option that Megatron isn't told to compute.
    """
    path = Path(hf_dir) / CONFIG_FILE
    raw = _read(path)
    if raw.get("model_type") != "qwen3_moe":
        raise ConfigError(
            f"model_type is {raw.get('model_type')!r}; known: 'qwen3_moe'",
            where=str(path),
            remedy="start from a Qwen3-MoE checkpoint",
        )
    given = {**_QWEN3_MOE_DEFAULTS, **raw}
    if "num_local_experts" in raw:  # as transformers 5 writes it
        given.setdefault("num_experts", raw["num_local_experts"])
    wrong = [
        f"{key} is {given[key]!r}, and only {value!r} is supported"
        for key, value in _QWEN3_MOE_FIXED.items()
        if key in given and given[key] != value
    ]
    # transformers 5 writes rope_parameters; earlier ones rope_theta and rope_scaling.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        wrong.append(f"rope type is {rope_type!r}, and only 'default' is supported")
    if wrong:
        raise ConfigError(
            "the checkpoint has options that can't be built:\n  - " + "\n  - ".join(wrong), where=str(path)
        )
    try:
        return ArchitectureConfig(
            family="qwen3_moe",
            vocab_size=int(given["vocab_size"]),
            hidden_size=int(given["hidden_size"]),
            num_hidden_layers=int(given["num_hidden_layers"]),
            num_attention_heads=int(given["num_attention_heads"]),
            num_key_value_heads=int(given["num_key_value_heads"]),
            head_dim=int(given["head_dim"] or given["hidden_size"] // given["num_attention_heads"]),
            intermediate_size=int(given["intermediate_size"]),
            moe_intermediate_size=int(given["moe_intermediate_size"]),
            num_experts=int(given["num_experts"]),
            num_experts_per_tok=int(given["num_experts_per_tok"]),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            partial_rotary_factor=float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))),
            rms_norm_eps=float(given["rms_norm_eps"]),
            max_position_embeddings=int(given["max_position_embeddings"]),
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            initializer_range=float(given.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise IncompleteError(f"{error} is missing", where=str(path), remedy="give a complete config.json") from error
    except (TypeError, ValueError) as error:
        raise IncompleteError(
            f"a value is no number: {error}", where=str(path), remedy="give a complete config.json"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise IncompleteError(
            f"no readable config.json: {error}", where=str(path), remedy="give a Hugging Face model directory"
        ) from error
    return raw
