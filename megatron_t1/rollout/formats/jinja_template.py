"""A model's Jinja chat template, rendered to text in a sandbox: it comes from outside and is a program."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_t1.errors import ConfigError, T1Error

TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateFailed(T1Error):
    """The template raised, or refused these messages."""


class ChatTemplate:
    """A compiled template with the special tokens of its tokenizer.

    Args:
        model_dir: where chat_template.jinja and tokenizer_config.json lie.
        path: another template file, in the place of the model's own.

    Attributes:
        sha256: of the template's text.

    Raises:
        ConfigError: there is no template, or it is no valid Jinja.
    """

    def __init__(self, model_dir: str | Path, path: str | Path | None = None):
        model_dir = Path(model_dir)
        settings = _json(model_dir / "tokenizer_config.json")
        source, self.where = _source(model_dir, path, settings)
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        self._special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name)}
        self._template, self._budget = _compile(source, self.where)

    def render(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, opening: bool) -> str:
        """The conversation as text; `opening`: with what the template writes before the next assistant turn.

        Raises:
            TemplateFailed: the template refuses these messages or breaks.
        """
        try:
            with self._budget():
                return self._template.render(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=opening, **self._special
                )
        except Exception as error:  # a template is a program, and can fail in any way
            raise TemplateFailed(
                f"the chat template refuses the conversation: {error}",
                where=f"{self.where}, {len(messages)} messages",
                remedy="use a template for tools and system messages, or another chat format",
            ) from error


def _source(model_dir: Path, path: str | Path | None, settings: dict[str, Any]) -> tuple[str, str]:
    """(text, where it was found)."""
    file = Path(path) if path else model_dir / TEMPLATE_FILE
    try:
        return file.read_text(encoding="utf-8"), str(file)
    except FileNotFoundError:
        if path:
            raise ConfigError("no such template", where=str(file), remedy="name a file: template:PATH") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template can't be read: {error}", where=str(file)) from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # named templates: the one for tools, where there is one
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("tool_use") or named.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            "the model has no chat template",
            where=f"{model_dir} ({TEMPLATE_FILE}, or chat_template in tokenizer_config.json)",
            remedy="name one with template:PATH, or use renderers:FAMILY",
        )
    return found, f"{model_dir / 'tokenizer_config.json'} (chat_template)"


def _compile(source: str, where: str) -> tuple[Any, Any]:
    """(compiled, context manager of one rendering).

    With the filters and functions that Hugging Face's `apply_chat_template` gives a template.
    """
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols

        from megatron_t1.rollout.formats.template_budget import BudgetEnvironment, budget
    except ImportError as error:
        raise ConfigError(
            f"chat templates need jinja2: {error}", where="model.chat_format", remedy="pip install jinja2"
        ) from error

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's text; here it only prints it."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller):
            return caller()

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    now = datetime.now()  # one time for all renderings: a date that changed would change what stands already
    environment = BudgetEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=now.strftime)
    try:
        with budget():  # constant expressions are computed here
            return environment.from_string(source), budget
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the chat template is no valid Jinja: {error}", where=where) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer's settings can't be read: {error}", where=str(path)) from error
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str:
    """A special token is its text, or an object that holds it."""
    return token.get("content", "") if isinstance(token, dict) else str(token)
