"""The policy that plays: its Hugging Face directory, the experts it has, and the contract it is sampled under."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.phase import require_recorded
from megatron_t1.rollout.engine.command import LOGPROBS_MODE, EngineBuild
from megatron_t1.rollout.engine.completion import EngineRoutes
from megatron_t1.rollout.formats import ChatFormat, load_format
from megatron_t1.trajectory.contract import SamplingContract


@dataclass(frozen=True)
class Policy:
    """One version of the actor, as the sampler needs it.

    Attributes:
        route_shape: None for a dense model.
        max_positions: longest stream in tokens that the model was made for.
    """

    version: int
    model_dir: Path
    route_shape: EngineRoutes | None
    max_positions: int

    @classmethod
    def of(cls, config: Config, version: int) -> Policy:
        """Policy `version` of the run; 0 is the start model.

        Raises:
            IncompleteError: its directory isn't there.
            T1Error: the context of the rollout is longer than the model's.
        """
        if not config.model.path:
            raise T1Error(
                "no start model is named", where="model.path", remedy="set model.path, or make one with `t1 model init`"
            )
        model_dir = RunPaths.of(config.run.dir).hf(version, config.model.path)
        raw = _read_config(model_dir)
        max_positions = int(_text_part(raw).get("max_position_embeddings") or 0)
        if max_positions and config.rollout.max_context > max_positions:
            raise T1Error(
                f"rollout.max_context is {config.rollout.max_context}, the model has {max_positions} positions",
                where=str(model_dir / "config.json"),
                remedy="lower rollout.max_context",
            )
        return cls(version, model_dir, route_shape_of(raw), max_positions)

    def require_recorded(self, config: Config) -> None:
        """Raise IncompleteError unless the directory holds, byte for byte, what the export phase recorded.

        Policy 0, the start model, is compared by the loop, whose manifest knows it.
        """
        if self.version:
            exported = config.loop.warmup_iterations + self.version - 1
            require_recorded(RunPaths.of(config.run.dir), exported, "export", self.model_dir)

    def chat_format(self, config: Config) -> ChatFormat:
        return load_format(config.model.chat_format, self.model_dir)

    def contract(self, config: Config, chat: ChatFormat, build: EngineBuild, *, temperature: float) -> SamplingContract:
        """What the rollout's log-probabilities mean, as training checks it."""
        shape = self.route_shape or EngineRoutes(num_moe_layers=0, num_experts=0, top_k=0)
        return SamplingContract(
            temperature=temperature,
            top_p=config.rollout.top_p,
            logprobs_mode=LOGPROBS_MODE,
            stop_ids=tuple(chat.stop_ids),
            tokenizer_sha256=chat.tokenizer_sha256,
            chat_format=config.model.chat_format,
            engine=build.name,
            engine_dtype=engine_dtype(config),
            model_dtype=config.model.dtype,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_moe_layers=shape.num_moe_layers,
            # vLLM's gate computes in the engine's type; on CPU the exchange log has what was found in the loaded model.
            router_dtype=engine_dtype(config) if shape.num_experts else "",
        )

    def engine_facts(self, config: Config, build: EngineBuild) -> dict[str, Any]:
        """What the exchange log states about the engine, read from what is served and not from the chat format."""
        tokenizer = self.model_dir / "tokenizer.json"
        return {
            "engine": build.name,
            "engine_dtype": engine_dtype(config),
            "logprobs_mode": LOGPROBS_MODE,
            "tokenizer_sha256": atomic.sha256_file(tokenizer) if tokenizer.is_file() else "",
            "model": str(self.model_dir),
            "model_dtype": config.model.dtype,
            "chat_format": config.model.chat_format,
            **self._experts(),
        }

    def _experts(self) -> dict[str, int]:
        shape = self.route_shape
        if shape is None:
            return {}
        return {"num_experts": shape.num_experts, "top_k": shape.top_k, "num_moe_layers": shape.num_moe_layers}


def engine_dtype(config: Config) -> str:
    return config.rollout.engine.dtype or config.model.dtype


def route_shape_of(raw: dict) -> EngineRoutes | None:
    """The experts that a Hugging Face config describes; None when it is dense."""
    text = _text_part(raw)
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0
    top_k = text.get("num_experts_per_tok") or 0
    if not experts or not top_k:
        return None
    layers = int(text["num_hidden_layers"])
    dense = set(text.get("mlp_only_layers") or [])
    step = text.get("decoder_sparse_step") or 1
    first = text.get("first_k_dense_replace") or 0
    columns = tuple(
        layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0 and layer >= first
    )
    if not columns:
        return None
    return EngineRoutes(
        num_moe_layers=len(columns),
        top_k=int(top_k),
        num_experts=int(experts),
        num_layers=layers,
        columns=() if len(columns) == layers else columns,
    )


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Of a vision-language model's configuration the language model's."""
    return raw.get("text_config") or raw


def _read_config(model_dir: Path) -> dict:
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise IncompleteError(
            f"the policy can't be read: {error}",
            where=str(path),
            remedy="check model.path; later policies are written by the export phase",
        ) from error
    if not isinstance(raw, dict):
        raise IncompleteError("config.json is no object", where=str(path))
    return raw
