"""What a model directory itself says of the facts that records state in their contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_t1.audit.compare import TEMPLATE
from megatron_t1.errors import T1Error
from megatron_t1.regular import open_regular, sha256_regular
from megatron_t1.rollout.policy import route_shape_of


def facts_of_model(model_dir: str | Path, chat_format: str) -> dict[str, Any]:
    """Experts and tokenizer of a model directory, and the digest of the chat template where the format is one.

    What can't be read is left out: a run may be audited where its model no longer is.
    """
    if not str(model_dir):
        return {}
    directory = Path(model_dir)
    return {**_experts(directory), **_tokenizer(directory), **_template(directory, chat_format)}


def _experts(directory: Path) -> dict[str, int]:
    try:
        with open_regular(directory / "config.json") as file:
            shape = route_shape_of(json.load(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    if shape is None:
        return {"num_experts": 0, "top_k": 0, "num_moe_layers": 0}
    return {"num_experts": shape.num_experts, "top_k": shape.top_k, "num_moe_layers": shape.num_moe_layers}


def _tokenizer(directory: Path) -> dict[str, str]:
    try:
        return {"tokenizer_sha256": sha256_regular(directory / "tokenizer.json")}
    except OSError:
        return {}


def _template(directory: Path, chat_format: str) -> dict[str, str]:
    kind, _, path = chat_format.partition(":")
    if kind != "template":
        return {}
    from megatron_t1.rollout.formats.jinja_template import ChatTemplate

    try:
        return {TEMPLATE: ChatTemplate(directory, path or None).sha256}
    except (T1Error, OSError):
        return {}
