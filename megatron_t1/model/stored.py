"""What a checkpoint on disk says of itself, and whether that is the configured model. Works without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_t1.config.families import FULL, LINEAR, family_problems, number_problems
from megatron_t1.config.schema import ArchitectureConfig, ModelConfig
from megatron_t1.errors import ConfigError, IncompleteError, MismatchError
from megatron_t1.model.config_json import CONFIG_FILE, Fields, read_config, shown

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
    raw = read_config(Path(hf_dir) / CONFIG_FILE)
    raw = {**_text_config(raw), **raw}
    return str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")


@dataclass(frozen=True)
class _Family:
    """What config.json of one family says where it says nothing, and what it must say where it does."""

    name: str
    fixed: dict[str, Any]  # what Megatron is told to compute
    defaults: dict[str, Any]
    rope_defaults: dict[str, float]


_COMMON_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_only_layers": [], "quantization_config": {}}
_QWEN3_MOE = _Family(
    "qwen3_moe",
    fixed={**_COMMON_FIXED, "norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False},
    defaults={"norm_topk_prob": False},
    rope_defaults={"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
)
_QWEN3_5_MOE = _Family(
    "qwen3_5_moe",
    fixed={**_COMMON_FIXED, "attn_output_gate": True},
    defaults={"intermediate_size": 0},
    rope_defaults={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
)
_FAMILIES = {"qwen3_moe": _QWEN3_MOE, "qwen3_5_moe": _QWEN3_5_MOE, "qwen3_5_moe_text": _QWEN3_5_MOE}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "max_position_embeddings",
)
_DELTA_NET_SIZES = (
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")  # may stand beside a vision-language model's text_config
MOST_EXPERTS = 1_000_000  # of all layers: far more than any model's, and few enough to be counted through


def architecture_from_hf(hf_dir: str | Path) -> ArchitectureConfig:
    """Read config.json of a Hugging Face directory; of a vision-language model the language model's numbers.

    Raises:
        IncompleteError: no readable config.json, or something is missing in it.
        ConfigError: another model_type, an option that Megatron isn't told to compute, or values that no model can
            have, by themselves or together; all are listed.
    """
    path = Path(hf_dir) / CONFIG_FILE
    whole = read_config(path)
    model_type = whole.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"model_type is {shown(model_type)}; known: {', '.join(map(repr, _FAMILIES))}",
            where=str(path),
            remedy="start from a Qwen3-MoE or Qwen3.5-MoE checkpoint",
        )
    raw = _text_config(whole) or whole
    above = {name: whole[name] for name in _OF_THE_WHOLE if name in whole}
    given = Fields({**family.defaults, **_without_nulls(above), **_without_nulls(raw)})
    unsupported = _unsupported(given, family)
    read = _architecture(given, family)
    if given.missing:
        raise IncompleteError(
            f"{', '.join(given.missing)}: missing", where=str(path), remedy="give a complete config.json"
        )
    problems = given.problems + unsupported
    if problems := problems or family_problems(read) + number_problems(read) + _size_problems(read):
        raise ConfigError(
            "the checkpoint has options that can't be built:\n  - " + "\n  - ".join(problems),
            where=str(path),
            remedy="give a checkpoint of a supported architecture, with the config.json it was published with",
        )
    return read


def _architecture(given: Fields, family: _Family) -> ArchitectureConfig:
    """The numbers; what is missing or wrong is noted in `given`."""
    sizes = {name: given.size(name) for name in _SIZES}
    if family is _QWEN3_5_MOE:
        sizes |= {name: given.size(name) for name in _DELTA_NET_SIZES}
        sizes["full_attention_interval"] = _interval(given, sizes["num_hidden_layers"])
        sizes["mtp_num_hidden_layers"] = given.size("mtp_num_hidden_layers", 0, least=0)
    return ArchitectureConfig(
        family=family.name,
        **sizes,
        head_dim=given.size("head_dim", max(1, sizes["hidden_size"] // sizes["num_attention_heads"])),
        intermediate_size=given.size("intermediate_size", least=0),
        num_experts=_experts(given),
        **_rotary(given, family),
        rms_norm_eps=given.number("rms_norm_eps"),
        tie_word_embeddings=given.flag("tie_word_embeddings", False),
        initializer_range=given.number("initializer_range", 0.02),
    )


def _experts(given: Fields) -> int:
    """transformers 5 writes num_local_experts."""
    names = [name for name in ("num_experts", "num_local_experts") if name in given.values]
    counts = [given.size(name) for name in names or ["num_experts"]]
    if len({*counts}) > 1:
        given.problems.append(f"num_experts is {counts[0]} and num_local_experts {counts[1]}")
    return counts[0]


def _rotary(given: Fields, family: _Family) -> dict[str, float]:
    """transformers 5 writes rope_parameters; earlier ones rope_theta and rope_scaling."""
    inner = Fields(_without_nulls({**given.part("rope_scaling"), **given.part("rope_parameters")}))
    kind = inner.values.get("rope_type", inner.values.get("type", "default"))
    if kind != "default":
        given.problems.append(f"rope type is {shown(kind)}, and only 'default' is supported")
    found = {}
    for name, default in family.rope_defaults.items():
        limit = {"most": 1.0} if name == "partial_rotary_factor" else {}
        outer = given.number(name, default, **limit)
        found[name] = inner.number(name, outer, **limit)
        if name in given.values and found[name] != outer and not inner.problems:
            given.problems.append(f"{name} is {outer:g}, and {found[name]:g} among the rope parameters")
    given.problems += inner.problems
    return found


def _unsupported(given: Fields, family: _Family) -> list[str]:
    problems = [
        f"{name} is {shown(given.values[name])}, and only {value!r} is supported"
        for name, value in family.fixed.items()
        if name in given.values and given.values[name] != value
    ]
    if family is _QWEN3_MOE and (other := {*given.names("layer_types")} - {FULL}):
        problems.append(f"layer_types has {', '.join(map(shown, sorted(other)))}, and only {FULL} is supported")
    return problems


def _interval(given: Fields, layers: int) -> int:
    """n for full attention in every n-th layer and in no other, by either option."""
    types, interval = given.names("layer_types"), given.values.get("full_attention_interval")
    if not types:
        return given.size("full_attention_interval")
    n = types.index(FULL) + 1 if FULL in types else 0
    expected = [FULL if n and (layer + 1) % n == 0 else LINEAR for layer in range(len(types))]
    if not n or types != expected:
        given.problems.append(
            f"layer_types is {shown(types)}, and only full attention in every n-th layer is supported"
        )
    elif len(types) != layers:
        given.problems.append(f"layer_types are of {len(types)} layers, and num_hidden_layers is {layers}")
    elif interval not in (None, n):
        given.problems.append(f"full_attention_interval is {shown(interval)}, and {n} by layer_types")
    return n


def _size_problems(a: ArchitectureConfig) -> list[str]:
    if a.num_hidden_layers * a.num_experts <= MOST_EXPERTS:
        return []
    return [f"num_hidden_layers={a.num_hidden_layers} x num_experts={a.num_experts}: no model has so many experts"]


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a vision-language model's configuration; empty for a text model's."""
    text = raw.get(NESTED_CONFIG)
    return text if isinstance(text, dict) else {}
