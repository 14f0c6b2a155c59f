"""Chat formats by name: `chatml_bash`, `renderers:FAMILY`, or `package.module:Class` of the user's own."""

from __future__ import annotations

import importlib
from pathlib import Path

from megatron_t1.errors import ConfigError
from megatron_t1.rollout.formats.protocol import ChatFormat, Command, FormatProblem, Span, Submit

__all__ = ["ChatFormat", "Command", "FormatProblem", "Span", "Submit", "load_format"]


def load_format(name: str, model_dir: str | Path) -> ChatFormat:
    """The chat format `name` (config: model.chat_format) with the tokenizer of `model_dir`.

    Raises:
        ConfigError: no such format.
        T1Error: the tokenizer doesn't fit it.
    """
    if name == "chatml_bash":
        from megatron_t1.rollout.formats.chatml_bash import ChatmlBash

        return ChatmlBash(model_dir)
    if name.startswith("renderers:"):
        from megatron_t1.rollout.formats.rendered import RenderedFormat

        return RenderedFormat(model_dir, name.partition(":")[2])
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)(model_dir)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"unknown chat format {name!r}: {error}",
            where="model.chat_format",
            remedy="use chatml_bash, renderers:FAMILY (for example renderers:qwen3.5), or package.module:Class",
        ) from error
