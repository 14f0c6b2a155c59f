"""Chat formats of known model families through the `renderers` package, with its bridge from turn to turn.

`renderers` restates the chat templates of some 25 families and can continue a conversation without rendering sampled
tokens again. Here it is given one turn at a time: what follows a turn depends on how the turn ended, not on the
conversation before it, so the cost of a turn doesn't grow with its number.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.rollout.formats.protocol import Command, FormatProblem, Span, Submit
from megatron_t1.rollout.formats.tokenizer import PlainTokenizer
from megatron_t1.trajectory.record import Origin

SYSTEM = (
    "You work in a Linux terminal. Call bash with one command at a time; directory and environment stay as you leave "
    "them. When the task is done, answer without a call."
)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell and read its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
SUBMISSION = "done"
PLACEHOLDER = "\ue000outside\ue001"  # private-use characters: no template writes them
_CALL_ID = "call_0"


class RenderedFormat:
    """One family of `renderers`, e.g. "qwen3.5", with the tokenizer of `model_dir`.

    Raises:
        ConfigError: the package is missing, or has no such family.
        T1Error: the tokenizer doesn't fit the family.
    """

    def __init__(self, model_dir: str | Path, family: str):
        self.name = f"renderers:{family}"
        self.tokenizer = PlainTokenizer(model_dir)
        self.tokenizer_sha256 = self.tokenizer.sha256
        self._adapter = _Adapter(self.tokenizer, str(model_dir))
        self._renderer = _create(self._adapter, family)
        self._tools = [BASH]
        self.stop_ids = tuple(int(token) for token in self._renderer.get_stop_token_ids())
        before = self._render(self._messages("x"), opening=False)
        after = self._render(self._messages("x"), opening=True)
        if after[: len(before)] != before or len(after) == len(before):
            raise T1Error(f"{self.name} has no opening of a turn that follows the conversation", where=str(model_dir))
        self._opening = after[len(before) :]
        self._closed = self.submission()

    def open(self, instruction: str) -> np.ndarray:
        ids = self._guarded(instruction, lambda text: self._render(self._messages(text), opening=True))
        return np.array(ids, dtype=np.int32)

    def parse(self, sampled_ids: np.ndarray) -> Command | Submit | FormatProblem:
        if len(sampled_ids) == 0 or int(sampled_ids[-1]) not in self.stop_ids:
            return FormatProblem("turn cut off", cut_off=True)
        parsed = self._renderer.parse_response(sampled_ids.tolist(), tools=self._tools, prompt_ids=self._opening)
        if not parsed.tool_calls:
            if parsed.reasoning_complete is False:
                return FormatProblem("reasoning not closed")
            return Submit(parsed.content or "")
        if len(parsed.tool_calls) > 1:
            return FormatProblem("one complete call per turn")
        (call,) = parsed.tool_calls
        if str(call.status) != "ok":
            return FormatProblem(f"call: {str(call.status).replace('_', ' ')}")
        if call.name != "bash":
            return FormatProblem(f"no tool {str(call.name)[:40]!r}")
        text = _command_argument(call.arguments)
        if not text or not text.strip():
            return FormatProblem("empty command")
        if "\0" in text:
            return FormatProblem("NUL in command")
        return Command(text)

    def reply(self, observation: str, sampled_ids: np.ndarray) -> list[Span]:
        completion = sampled_ids.tolist()
        added, synthetic = self._guarded(observation, lambda text: self._bridge(completion, text))
        spans = [
            Span(np.array(added[:synthetic], dtype=np.int32), Origin.REPAIR),
            Span(np.array(added[synthetic:], dtype=np.int32), Origin.ENVIRONMENT),
        ]
        return [span for span in spans if len(span.ids)]

    def command(self, text: str) -> np.ndarray:
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "bash", "arguments": {"command": text}}}
        return self._demonstration({"role": "assistant", "content": "", "tool_calls": [call]})

    def submission(self) -> np.ndarray:
        return self._demonstration({"role": "assistant", "content": SUBMISSION})

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids)

    def _messages(self, instruction: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]

    def _render(self, messages: list[dict[str, Any]], *, opening: bool) -> list[int]:
        return [
            int(token)
            for token in self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=opening)
        ]

    def _demonstration(self, message: dict[str, Any]) -> np.ndarray:
        """The ids a policy would have sampled for `message`, after the opening and up to the stop token."""
        prompt = self._render(self._messages("x"), opening=True)
        whole = self._render([*self._messages("x"), message], opening=False)
        body = whole[len(prompt) :]
        ends = [index for index, token in enumerate(body) if token in self.stop_ids]
        if whole[: len(prompt)] != prompt or not ends:
            raise T1Error(
                f"{self.name} renders a turn differently from how it is sampled; it can't be demonstrated",
                where="model.chat_format",
                remedy="demonstrate with another chat format",
            )
        return np.array(body[: ends[0] + 1], dtype=np.int32)

    def _bridge(self, completion: list[int], observation: str) -> tuple[list[int], int]:
        """(tokens after the completion, how many of them close it in the model's place)."""
        message = {"role": "tool", "content": observation, "tool_call_id": _CALL_ID, "name": "bash"}
        bridged = self._renderer.bridge_to_next_turn(self._opening, completion, [message], tools=self._tools)
        if bridged is None:
            # The family refuses to continue after this turn (reasoning that was stopped without being closed). What
            # follows a turn is the same after any closed one.
            completion = self._closed.tolist()
            bridged = self._renderer.bridge_to_next_turn(self._opening, completion, [message], tools=self._tools)
        known = self._opening + completion
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            raise T1Error(
                f"{self.name} can't continue a turn without rendering it again",
                where="model.chat_format",
                remedy="use a family whose renderer has a bridge",
            )
        added = [int(token) for token in bridged.token_ids[len(known) :]]
        owners = list(bridged.message_indices[len(known) :])
        synthetic = next((index for index, owner in enumerate(owners) if owner >= 0), 0)
        return added, synthetic

    def _guarded(self, outside: str, render: Any) -> Any:
        """Render text from outside; prove that it brought no control token of its own."""
        if not self.tokenizer.names_control(outside):
            return render(outside)
        with self._adapter.placing(outside.strip()):
            rendered = render(PLACEHOLDER)
        neutral = render("x")
        ids, expected = (part[0] if isinstance(part, tuple) else part for part in (rendered, neutral))
        if self._controls(ids) != self._controls(expected):
            raise T1Error(
                f"{self.name} lets control tokens in text through",
                where=f"text {outside[:80]!r}",
                remedy="use the chat format chatml_bash, or report this family",
            )
        return rendered

    def _controls(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self.tokenizer.control_ids]


class _Adapter:
    """What `renderers` asks of a tokenizer. Templates may write control tokens as text; text from outside may not."""

    unk_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: PlainTokenizer, name_or_path: str):
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self._outside: str | None = None

    def encode(self, text: str, *_, **__) -> list[int]:
        if self._outside is None or PLACEHOLDER not in text:
            return self._tokenizer.encode_template(text)
        before, _, after = text.partition(PLACEHOLDER)
        return [
            *self._tokenizer.encode_template(before),
            *self._tokenizer.encode(self._outside).tolist(),
            *self._tokenizer.encode_template(after),
        ]

    def decode(self, token_ids: Any, *_, skip_special_tokens: bool = False, **__) -> str:
        return self._tokenizer.decode(np.atleast_1d(np.asarray(token_ids, dtype=np.int64)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    @contextlib.contextmanager
    def placing(self, outside: str) -> Iterator[None]:
        """Encode `outside`, as plain text, wherever the template writes the placeholder."""
        self._outside = outside
        try:
            yield
        finally:
            self._outside = None


def _create(adapter: _Adapter, family: str) -> Any:
    try:
        import renderers
    except ImportError as error:
        raise ConfigError(
            f"the package renderers can't be imported: {error}",
            where="model.chat_format",
            remedy="pip install renderers httpx",
        ) from error
    try:
        return renderers.create_renderer(adapter, renderers.config_from_name(family))
    except Exception as error:  # an assertion for a missing control token, a ValueError or KeyError for the name
        raise ConfigError(
            f"renderers has no format {family!r} for this tokenizer: {error}",
            where="model.chat_format",
            remedy="name a family of `renderers` (qwen3, qwen3.5, glm-4.5, ...) that fits model.path",
        ) from error


def _command_argument(arguments: Any) -> str | None:
    """The command of a call whose arguments are a mapping or its JSON text (transformers#45419)."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    return command if isinstance(command, str) else None
