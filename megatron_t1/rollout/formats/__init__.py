"""Chat formats by name: `chatml_bash`, `renderers:FAMILY`, `template[:PATH]`, or the user's `package.module:Class`."""

from __future__ import annotations

import importlib
from pathlib import Path

from megatron_t1.errors import ConfigError
from megatron_t1.rollout.formats.protocol import (
    ChatFormat,
    Command,
    Conversation,
    ConversationRefused,
    FormatProblem,
    Span,
    Submit,
)

__all__ = [
    "ChatFormat",
    "Command",
    "Conversation",
    "ConversationRefused",
    "FormatProblem",
    "Span",
    "Submit",
    "load_format",
]


def load_format(name: str, model_dir: str | Path) -> ChatFormat:
    """The chat format `name` (config: model.chat_format) with the tokenizer of `model_dir`.

    Raises:
        ConfigError: no such format.
        T1Error: the tokenizer or the template doesn't fit it.
    """
    kind, _, argument = name.partition(":")
    if name == "chatml_bash":
        from megatron_t1.rollout.formats.chatml_bash import ChatmlBash

        return ChatmlBash(model_dir)
    if kind == "renderers":
        from megatron_t1.rollout.formats.rendered import RenderedFormat

        return RenderedFormat(model_dir, argument)
    if kind == "template":
        from megatron_t1.rollout.formats.template import TemplateFormat

        return TemplateFormat(model_dir, argument or None)
    try:
        return getattr(importlib.import_module(kind), argument)(model_dir)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"unknown chat format {name!r}: {error}",
            where="model.chat_format",
            remedy="use chatml_bash, renderers:FAMILY (for example renderers:qwen3.5), template, template:PATH, or "
            "package.module:Class",
        ) from error
