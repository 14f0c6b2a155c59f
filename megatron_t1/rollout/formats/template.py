"""Any Jinja chat template as a chat format, as long as it only appends to the conversation at hand.

The stream is never rendered again. To learn what stands between a turn and the next, the conversation is rendered as
text with the turns exactly as they were sampled; that text must begin with the stream's own text, all of it, and what
follows is appended. A template that drops reasoning, trims a turn or writes its arguments differently is found out at
the turn where it does so, and the conversation is refused.
"""

from __future__ import annotations

import json
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.rollout.formats.adapter import PLACEHOLDER
from megatron_t1.rollout.formats.call_syntax import (
    EXAMPLE,
    FENCED,
    FENCED_ADVICE,
    REASONING,
    REASONING_END,
    CallSyntax,
    learn,
)
from megatron_t1.rollout.formats.jinja_template import ChatTemplate, TemplateFailed
from megatron_t1.rollout.formats.protocol import (
    ONE_CALL,
    Command,
    ConversationRefused,
    FormatProblem,
    Submit,
    require_text,
)
from megatron_t1.rollout.formats.shell_tool import BASH, SUBMISSION, SYSTEM, call_message
from megatron_t1.rollout.formats.template_conversation import TemplateConversation
from megatron_t1.rollout.formats.tokenizer import PlainTokenizer

_CALL_ID = "call00000"  # nine letters and digits: some templates insist
REASONING_NOTE = "I do the next step."  # for a scripted turn of a template that can't leave reasoning empty
_ANSWER = "\ue004answer\ue005"


class TemplateFormat:
    """The template of `model_dir` (or the one in the file `path`) with its tokenizer.

    Attributes:
        template_sha256: of the template's text.
        reply_role: who brings a command's output: "tool", or "user" for a template without tools.
        end: the control token that the template writes after a turn.

    Raises:
        ConfigError: no template, or no valid one.
        T1Error: the template can't be used safely: a turn has no end token, or roles are marked with ordinary text.
    """

    def __init__(self, model_dir: str | Path, path: str | Path | None = None):
        self.name = f"template:{path}" if path else "template"
        self.tokenizer = PlainTokenizer(model_dir)
        self.tokenizer_sha256 = self.tokenizer.sha256
        self.template = ChatTemplate(model_dir, path)
        self.template_sha256 = self.template.sha256
        self._has_system, self._system = True, SYSTEM
        self._has_system = self._takes_system()
        self.tools = [BASH] if self._takes_tools() else None
        self.opening = self._opening_text()
        self.end = self._end_token()
        self.syntax = self._call_syntax()
        if self.syntax is FENCED:
            self.tools = None
            self._system = f"{SYSTEM.replace('Call bash with', 'Give')} {FENCED_ADVICE}"
            self.opening = self._opening_text()
        self.stop_ids = tuple(dict.fromkeys([self.end, *_end_ids(Path(model_dir), self.tokenizer)]))
        self.reply_role = "tool" if self._takes_tool_messages() else "user"
        self._require_role_tokens()
        own = self.encode_template(self.syntax.before + self.syntax.after)
        reasoning = [self.tokenizer.token_id(marker) for marker in (REASONING, REASONING_END)]
        self._foreign = self.tokenizer.control_ids - {*own, *reasoning}

    def begin(self, instruction: str) -> TemplateConversation:
        return TemplateConversation(self, require_text(instruction))

    def parse(self, sampled_ids: np.ndarray) -> Command | Submit | FormatProblem:
        if len(sampled_ids) == 0 or int(sampled_ids[-1]) not in self.stop_ids:
            return FormatProblem("turn cut off", cut_off=True)
        body = sampled_ids[:-1]
        if self._foreign.intersection(body.tolist()):
            return FormatProblem("control token in turn")
        before, closed, text = self.decode(body).rpartition(REASONING_END)
        if not closed and (REASONING in text or self.opens_reasoning):
            return FormatProblem("reasoning not closed")
        return self.syntax.read(text) or Submit(text.strip())

    def command(self, text: str) -> np.ndarray:
        if self.syntax is FENCED:
            return self._demonstration({"role": "assistant", "content": self.syntax.write(text)}, text)
        return self._demonstration(self._call(text, as_text=self._arguments_as_text), text)

    def submission(self) -> np.ndarray:
        return self._demonstration({"role": "assistant", "content": SUBMISSION}, "")

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids)

    @property
    def opens_reasoning(self) -> bool:
        """Whether the opening of a turn leaves the model inside its reasoning."""
        return REASONING in self.opening.rpartition(REASONING_END)[2]

    def render(self, messages: list[dict[str, Any]], *, opening: bool) -> str:
        return self.template.render(messages, tools=self.tools, opening=opening)

    def first_messages(self, instruction: str) -> list[dict[str, Any]]:
        if self._has_system:
            return [{"role": "system", "content": self._system}, {"role": "user", "content": instruction}]
        return [{"role": "user", "content": f"{self._system}\n\n{instruction}"}]

    def replies(self, role: str, text: str, sampled_ids: np.ndarray) -> list[dict[str, Any]]:
        """The messages of a reply: each call of the turn is answered by the tool, everything else by one message."""
        role = role or self.reply_role
        if role != "tool" or self.reply_role != "tool":
            return [{"role": "user", "content": text}]
        problem = self.parse(sampled_ids)
        several = isinstance(problem, FormatProblem) and problem.reason == ONE_CALL
        calls = self.decode(sampled_ids).count(self.syntax.before.split()[0]) if several and self.syntax.before else 1
        return [_tool_message(text)] * max(1, calls)

    def encode_template(self, text: str) -> list[int]:
        return self.tokenizer.encode_template(text)

    def encode(self, text: str, marked: str, outside: str) -> np.ndarray:
        """Ids of rendered `text`, int32 [n], in which `outside` can't have become a control token.

        Args:
            marked: the same rendering with PLACEHOLDER in the place of `outside`.

        Raises:
            ConversationRefused: `outside` names control tokens and the template changed it.
        """
        around = marked.split(PLACEHOLDER)
        expected = [token for part in around for token in self.tokenizer.controls(self.encode_template(part))]
        ids = self.encode_template(text)
        if self.tokenizer.controls(ids) != expected and outside:
            for written in (outside, outside.strip(), json.dumps(outside, ensure_ascii=False)[1:-1]):
                if written.join(around) == text:
                    ids = self.tokenizer.encode_around(around, written)
                    break
            if self.tokenizer.controls(ids) != expected:
                raise ConversationRefused(
                    "the template changes text that names control tokens",
                    where=f"{self.template.where}, text {outside[:80]!r}",
                    remedy="use a template that writes messages as they are",
                )
        return np.array(ids, dtype=np.int32)

    def _call(self, command: str, *, as_text: bool = False) -> dict[str, Any]:
        return call_message(command, _CALL_ID, as_text=as_text)

    def _takes_system(self) -> bool:
        try:
            return SYSTEM in self.template.render(self.first_messages("x"), tools=None, opening=True)
        except TemplateFailed:
            return False

    def _takes_tools(self) -> bool:
        try:
            self.template.render(self.first_messages("x"), tools=[BASH], opening=True)
            return True
        except TemplateFailed:
            return False

    def _opening_text(self) -> str:
        before = self.render(self.first_messages("x"), opening=False)
        after = self.render(self.first_messages("x"), opening=True)
        if not after.startswith(before):
            raise self._unusable("it changes the conversation when it opens a turn")
        return after[len(before) :]

    def _turn(self, message: dict[str, Any], follows: dict[str, Any] | None = None) -> str:
        """The text of a rendered turn after the opening, end token and all that follows included."""
        messages = self.first_messages("x")
        rendered = self.render([*messages, message, *([follows] if follows else [])], opening=False)
        rest = rendered.removeprefix(self.render(messages, opening=False))
        return rest[len(commonprefix([rest, self.opening])) :]

    def _end_token(self) -> int:
        after = self._turn({"role": "assistant", "content": _ANSWER}).partition(_ANSWER)[2]
        controls = self.tokenizer.controls(self.encode_template(after))
        prompt = self.tokenizer.controls(self.encode_template(self.render(self.first_messages("x"), opening=True)))
        if not controls or prompt[-1:] == controls[:1]:  # what comes next opens another turn already
            raise self._unusable("it writes no end token after a turn")
        return controls[0]

    def _call_syntax(self) -> CallSyntax:
        """What the template makes of a call; arguments as a mapping or as JSON text, whichever it takes."""
        for as_text in (False, True):
            try:
                turn = self._turn(self._call(EXAMPLE, as_text=as_text))
            except TemplateFailed:
                continue
            found = learn(turn.partition(self.decode(np.array([self.end])))[0]) if self.tools else None
            if found is not None:
                self._arguments_as_text = as_text
                return found
        return FENCED

    def _takes_tool_messages(self) -> bool:
        if self.syntax is FENCED:
            return False
        turn = {"role": "assistant", "content": self.syntax.write("true")}
        messages = [*self.first_messages("x"), turn]
        try:
            text = self.render([*messages, _tool_message(PLACEHOLDER)], opening=True)
            return text.count(PLACEHOLDER) == 1 and text.startswith(self.render(messages, opening=False).rstrip())
        except TemplateFailed:
            return False

    def _require_role_tokens(self) -> None:
        """A turn of the assistant must begin after a control token, or an output could write one itself."""
        turn = {"role": "assistant", "content": _ANSWER}
        reply = {**_tool_message(PLACEHOLDER), "role": self.reply_role}
        for messages in (self.first_messages(PLACEHOLDER), [*self.first_messages("x"), turn, reply]):
            after = self.render(messages, opening=True).rpartition(PLACEHOLDER)[2]
            if not self.tokenizer.controls(self.encode_template(after)):
                raise self._unusable(f"it marks roles with ordinary text ({after[:40]!r}), which any output can write")

    def _demonstration(self, message: dict[str, Any], outside: str) -> np.ndarray:
        """The ids a policy would have sampled for `message`, after the opening and up to the end token."""
        end = self.decode(np.array([self.end]))
        if self.tokenizer.names_control(outside):
            raise self._unusable(f"a demonstration names control tokens: {outside[:60]!r}")
        reasoning = {"reasoning_content": REASONING_NOTE, "content": f"{REASONING_NOTE}\n{REASONING_END}\n\n"}
        for extra in ({}, reasoning):
            turn, closed, _ = self._turn({**message, **extra}).partition(end)
            if closed and not (self.opens_reasoning and REASONING_END not in turn):
                return np.array(self.encode_template(turn + end), dtype=np.int32)
        raise self._unusable("a turn is rendered differently from how it is sampled; it can't be demonstrated")

    def _unusable(self, problem: str) -> T1Error:
        return T1Error(
            f"the chat template can't be used: {problem}",
            where=self.template.where,
            remedy="use renderers:FAMILY for a published family, or write a format of your own (package.module:Class)",
        )


def _tool_message(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": _CALL_ID, "name": "bash"}


def _end_ids(model_dir: Path, tokenizer: PlainTokenizer) -> list[int]:
    """End-of-sequence tokens that the model's files name, where they are control tokens."""
    try:
        found = json.loads((model_dir / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    listed = found if isinstance(found, list) else [found]
    return [token for token in listed if isinstance(token, int) and token in tokenizer.control_ids]
