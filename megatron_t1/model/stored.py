"""What a checkpoint on disk says of itself, and whether that is the configured model. Works without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_t1.config.schema import ArchitectureConfig, ModelConfig
from megatron_t1.errors import ConfigError, IncompleteError, MismatchError

CONFIG_FILE = "config.json"
NESTED_CONFIG = "text_config"  # the language model's part of a vision-language model's config.json

# Numbers that change no shape and no computation of what is trained.
_FREE_FIELDS = ("initializer_range", "intermediate_size", "max_position_embeddings", "mtp_num_hidden_layers")


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
    raw = {**_text_config(raw), **raw}
    return str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")


@dataclass(frozen=True)
class _Family:
    """What config.json of one family says where it says nothing, and what it must say where it does."""

    name: str
    fixed: dict[str, Any]  # what Megatron is told to compute
    defaults: dict[str, Any]
    rope_defaults: dict[str, Any]


_COMMON_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_only_layers": []}
_QWEN3_MOE = _Family(
    "qwen3_moe",
    fixed={**_COMMON_FIXED, "norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False},
    defaults={"norm_topk_prob": False, "tie_word_embeddings": False, "head_dim": None},
    rope_defaults={"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
)
_QWEN3_5_MOE = _Family(
    "qwen3_5_moe",
    fixed={**_COMMON_FIXED, "attn_output_gate": True},
    defaults={"tie_word_embeddings": False, "head_dim": None, "intermediate_size": 0},
    rope_defaults={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
)
_FAMILIES = {"qwen3_moe": _QWEN3_MOE, "qwen3_5_moe": _QWEN3_5_MOE, "qwen3_5_moe_text": _QWEN3_5_MOE}
_DELTA_NET_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def architecture_from_hf(hf_dir: str | Path) -> ArchitectureConfig:
    """Read config.json of a Hugging Face directory; of a vision-language model the language model's numbers.

    Raises:
        IncompleteError: no readable config.json, or a number is missing in it.
        ConfigError: another model_type, or an option that Megatron isn't told to compute.
    """
    path = Path(hf_dir) / CONFIG_FILE
    whole = _read(path)
    family = _FAMILIES.get(str(whole.get("model_type")))
    if family is None:
        raise ConfigError(
            f"model_type is {whole.get('model_type')!r}; known: {', '.join(map(repr, _FAMILIES))}",
            where=str(path),
            remedy="start from a Qwen3-MoE or Qwen3.5-MoE checkpoint",
        )
    raw = _text_config(whole) or whole
    given = {**family.defaults, **{key: whole[key] for key in ("tie_word_embeddings",) if key in whole}, **raw}
    if "num_local_experts" in raw:  # as transformers 5 writes it
        given.setdefault("num_experts", raw["num_local_experts"])
    # transformers 5 writes rope_parameters; earlier ones rope_theta and rope_scaling.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if problems := _unsupported(given, rope, family):
        raise ConfigError(
            "the checkpoint has options that can't be built:\n  - " + "\n  - ".join(problems), where=str(path)
        )
    rope = {name: rope.get(name, raw.get(name, default)) for name, default in family.rope_defaults.items()}
    try:
        return ArchitectureConfig(
            family=family.name,
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
            rope_theta=float(rope["rope_theta"]),
            partial_rotary_factor=float(rope["partial_rotary_factor"]),
            rms_norm_eps=float(given["rms_norm_eps"]),
            max_position_embeddings=int(given["max_position_embeddings"]),
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            initializer_range=float(given.get("initializer_range", 0.02)),
            **(_hybrid_numbers(given) if family is _QWEN3_5_MOE else {}),
        )
    except KeyError as error:
        raise IncompleteError(f"{error} is missing", where=str(path), remedy="give a complete config.json") from error
    except (TypeError, ValueError) as error:
        raise IncompleteError(
            f"a value is no number: {error}", where=str(path), remedy="give a complete config.json"
        ) from error


def _unsupported(given: dict[str, Any], rope: dict[str, Any], family: _Family) -> list[str]:
    problems = [
        f"{key} is {given[key]!r}, and only {value!r} is supported"
        for key, value in family.fixed.items()
        if key in given and given[key] != value
    ]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        problems.append(f"rope type is {rope_type!r}, and only 'default' is supported")
    if family is _QWEN3_5_MOE and given.get("layer_types") and not _interval(given["layer_types"]):
        problems.append(f"layer_types is {given['layer_types']!r}, and only full attention in every n-th layer is")
    return problems


def _hybrid_numbers(given: dict[str, Any]) -> dict[str, int]:
    """What a hybrid model has besides."""
    layer_types = given.get("layer_types")
    return {
        "shared_expert_intermediate_size": int(given["shared_expert_intermediate_size"]),
        "full_attention_interval": _interval(layer_types) if layer_types else int(given["full_attention_interval"]),
        "mtp_num_hidden_layers": int(given.get("mtp_num_hidden_layers") or 0),
        **{name: int(given[name]) for name in _DELTA_NET_FIELDS},
    }


def _interval(layer_types: list[str]) -> int:
    """n for full attention in every n-th layer and in no other; 0 for any other order."""
    if "full_attention" not in layer_types:
        return 0
    n = layer_types.index("full_attention") + 1
    expected = ["full_attention" if (layer + 1) % n == 0 else "linear_attention" for layer in range(len(layer_types))]
    return n if list(layer_types) == expected else 0


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a vision-language model's configuration; empty for a text model's."""
    text = raw.get(NESTED_CONFIG)
    return text if isinstance(text, dict) else {}


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
