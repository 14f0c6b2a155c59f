"""Chat formats of known model families through the `renderers` package, with its bridge from turn to turn.

`renderers` restates the chat templates of some 30 families and can continue a conversation without rendering sampled
tokens again. Here it is given one turn at a time: what follows a turn depends on how the turn ended, not on the
conversation before it, so the cost of a turn doesn't grow with its number.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.config.targets import renderers_families
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.rollout.formats.adapter import PLACEHOLDER, RenderersTokenizer
from megatron_t1.rollout.formats.protocol import (
    ONE_CALL,
    Command,
    ConversationRefused,
    FormatProblem,
    Span,
    Submit,
    TurnByTurn,
    command_problem,
    require_text,
)
from megatron_t1.rollout.formats.shell_tool import BASH, SUBMISSION, SYSTEM, call_message, command_argument
from megatron_t1.rollout.formats.tokenizer import PlainTokenizer
from megatron_t1.trajectory.record import Origin

_CALL_ID = "functions.bash:0"  # the form of the one family (Kimi K2) that writes it into the conversation
_CUT_OFF = ("unclosed_block",)
_REASONING = "I do the next step."  # for a scripted turn of a family that can't leave its reasoning empty


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
        self._adapter = RenderersTokenizer(self.tokenizer, str(model_dir))
        self._renderer = _create(self._adapter, family)
        self._tools = [BASH]
        self.stop_ids = tuple(int(token) for token in self._renderer.get_stop_token_ids())
        before = self._render(_messages("x"), opening=False)
        after = self._render(_messages("x"), opening=True)
        if after[: len(before)] != before or not self.tokenizer.controls(after[len(before) :]):
            raise T1Error(f"{self.name} has no opening of a turn that follows the conversation", where=str(model_dir))
        self._opening = after[len(before) :]
        self._neutral: dict[tuple, list[int]] = {}
        self._closed = {"tool": self.command("true").tolist(), "user": self.submission().tolist()}
        self._call_marker = next((t for t in self._closed["tool"] if self._is_of_calls(t)), -1)
        self._call_start = commonprefix([self.decode(self.command(text)) for text in ("a", "b")]).lstrip()
        self._stop_roles = self._roles_of_stops()
        self._foreign = self._controls_of_others()

    def begin(self, instruction: str) -> TurnByTurn:
        return TurnByTurn(self, instruction)

    def open(self, instruction: str) -> np.ndarray:
        ids = self._guarded(instruction, lambda text: self._render(_messages(text), opening=True), ("open",))
        return np.array(ids, dtype=np.int32)

    def parse(self, sampled_ids: np.ndarray) -> Command | Submit | FormatProblem:
        if len(sampled_ids) == 0 or int(sampled_ids[-1]) not in self.stop_ids:
            return FormatProblem("turn cut off", cut_off=True)
        completion = sampled_ids.tolist()
        if self._foreign.intersection(completion[:-1]):
            return FormatProblem("control token in turn")
        parsed = self._parsed(completion)
        if parsed is None:
            return FormatProblem("turn can't be read")
        if not parsed.tool_calls:
            if parsed.reasoning_complete is False:
                return FormatProblem("reasoning not closed")
            text = parsed.content or ""
            return FormatProblem(ONE_CALL) if text.lstrip().startswith(self._call_start) else Submit(text)
        call = parsed.tool_calls[0]
        after = completion[call.token_span[1] :] if call.token_span else []
        if len(parsed.tool_calls) > 1 or self._call_marker in after:
            return FormatProblem(ONE_CALL)
        if str(call.status) != "ok":
            return FormatProblem(f"call: {str(call.status).replace('_', ' ')}")
        if call.name != "bash":
            return FormatProblem(f"no tool {str(call.name)[:40]!r}")
        text = command_argument(call.arguments)
        problem = command_problem(text)
        return FormatProblem(problem) if problem else Command(text)

    def reply(self, observation: str, sampled_ids: np.ndarray, *, role: str = "") -> list[Span]:
        """See `Conversation.reply`. Every call of the turn is answered, each with `observation`."""
        completion = sampled_ids.tolist()
        parsed = self._parsed(completion)
        calls = parsed.tool_calls if parsed is not None else []
        call_ids = [self._call_id(call) for call in calls if str(call.status) not in _CUT_OFF]
        stop = completion[-1] if completion and completion[-1] in self.stop_ids else None
        roles = [role] if role else ["tool", "user"] if call_ids and stop is not None else ["user", "tool"]
        if not role and stop in self._stop_roles:  # the model has written the next message's marker itself
            roles.sort(key=lambda speaker: speaker != self._stop_roles[stop])
        ending = (stop, parsed is not None and parsed.reasoning_complete is False)
        # A family may refuse to continue after this very turn (reasoning that was stopped without being closed, a stop
        # token that ends all). What follows is then that of another turn which ended in this way, or was cut off.
        for instead in (None, [stop] if stop is not None else [], []):
            for speaker in roles:
                turn = completion if instead is None else [*self._closed[speaker][:-1], *instead]
                answered = _answers(speaker, call_ids)
                added = self._guarded(
                    observation,
                    lambda text, turn=turn, answered=answered: self._bridge(
                        turn, [{**message, "content": text} for message in answered]
                    ),
                    (speaker, len(answered), *(ending if instead is None else tuple(instead))),
                )
                if added is not None:
                    return self._spans(added)
        raise ConversationRefused(
            f"{self.name} can't continue a turn without rendering it again",
            where="model.chat_format",
            remedy="use a family whose renderer has a bridge",
        )

    def command(self, text: str) -> np.ndarray:
        follows = {"role": "tool", "content": "x", "tool_call_id": _CALL_ID, "name": "bash"}
        return self._demonstration(call_message(text, _CALL_ID), follows)

    def submission(self) -> np.ndarray:
        return self._demonstration({"role": "assistant", "content": SUBMISSION}, {"role": "user", "content": "x"})

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids)

    def _render(self, messages: list[dict[str, Any]], *, opening: bool) -> list[int]:
        return [
            int(token)
            for token in self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=opening)
        ]

    def _parsed(self, completion: list[int]) -> Any:
        """None for what the family's parser breaks at."""
        try:
            return self._renderer.parse_response(completion, tools=self._tools, prompt_ids=self._opening)
        except Exception:  # a policy can sample anything: arguments nested 1,000 deep, for one
            return None

    def _call_id(self, call: Any) -> str:
        """The id that a model gave its call, which the reply repeats: sampled text brings no control tokens either."""
        found = getattr(call, "id", None)
        usable = isinstance(found, str) and 0 < len(found) <= 64 and found.isprintable()
        return found if usable and not self.tokenizer.names_control(found) else _CALL_ID

    def _demonstration(self, message: dict[str, Any], follows: dict[str, Any]) -> np.ndarray:
        """The ids a policy would have sampled for `message`, after the opening and up to the stop token.

        A family may close a turn only when another message follows, or write reasoning into every turn.
        """
        prompt = self._render(_messages("x"), opening=True)
        for extra in ({}, {"reasoning_content": _REASONING}):
            for after in ([], [follows]):
                whole = self._render([*_messages("x"), {**message, **extra}, *after], opening=False)
                if whole[: len(prompt)] == prompt and (body := self._up_to_stop(whole[len(prompt) :])):
                    return np.array(body, dtype=np.int32)
            if whole[: len(prompt)] == prompt:  # closed by what follows, before which reasoning is left out
                whole = self._render([*_messages("x"), {**message, **extra}], opening=False)
                return np.array([*whole[len(prompt) :], self.stop_ids[0]], dtype=np.int32)
        shared = len(commonprefix([whole, prompt]))
        body = self._up_to_stop(whole[shared:])
        if body and "<think>" in self.decode(np.array(prompt[shared:])):  # opened for the model and not rendered
            return np.array([*self.tokenizer.encode_template(f"{_REASONING}\n</think>\n\n"), *body], dtype=np.int32)
        raise T1Error(
            f"{self.name} renders a turn differently from how it is sampled; it can't be demonstrated",
            where="model.chat_format",
            remedy="demonstrate with another chat format",
        )

    def _up_to_stop(self, ids: list[int]) -> list[int]:
        """Up to the first stop token; nothing when there is none."""
        ends = [index for index, token in enumerate(ids) if token in self.stop_ids]
        return ids[: ends[0] + 1] if ends else []

    def _bridge(self, completion: list[int], messages: list[dict[str, Any]]) -> tuple[list[int], list[int]] | None:
        """(tokens after the completion, index of the message that each belongs to); None when the family refuses."""
        try:
            bridged = self._renderer.bridge_to_next_turn(self._opening, completion, messages, tools=self._tools)
        except Exception:  # as above: families read the turn again to see how it ended
            return None
        if bridged is None:
            return None
        known = self._opening + completion
        if list(bridged.token_ids[: len(known)]) != known:  # compared as ids: equal text is not enough (NeMo-RL#1337)
            raise ConversationRefused(
                f"{self.name} changed sampled tokens", where="model.chat_format", remedy="report this family"
            )
        added = [int(token) for token in bridged.token_ids[len(known) :]]
        return added, list(bridged.message_indices[len(known) :])

    def _spans(self, added: tuple[list[int], list[int]]) -> list[Span]:
        ids, owners = added
        closing = next((index for index, owner in enumerate(owners) if owner >= 0), 0)
        spans = [
            Span(np.array(ids[:closing], dtype=np.int32), Origin.REPAIR),
            Span(np.array(ids[closing:], dtype=np.int32), Origin.ENVIRONMENT),
        ]
        return [span for span in spans if len(span.ids)]

    def _guarded(self, outside: str, render: Callable[[str], Any], state: tuple) -> Any:
        """Render text from outside; prove that it brought no control token of its own.

        Args:
            state: what else the rendering depends on, as far as control tokens go; saves rendering harmless text.
        """
        outside = require_text(outside)
        rendered = render(outside)
        if rendered is None:
            return None
        found = self.tokenizer.controls(_ids(rendered))
        if found == self._neutral.get(state):
            return rendered
        expected = self._neutral[state] = self.tokenizer.controls(_ids(render("x")))
        if found == expected:
            return rendered
        for guard, text in ((self._adapter.plainly(), outside), (self._adapter.placing(outside.strip()), PLACEHOLDER)):
            with guard:
                rendered = render(text)
            if self.tokenizer.controls(_ids(rendered)) == expected and PLACEHOLDER not in self.decode(_ids(rendered)):
                return rendered
        raise T1Error(
            f"{self.name} lets control tokens in text through",
            where=f"text {outside[:80]!r}",
            remedy="use the chat format chatml_bash, or report this family",
        )

    def _is_of_calls(self, token: int) -> bool:
        """Whether a call has this control token, once, and nothing else has it."""
        elsewhere = (*self._closed["user"], *self.stop_ids)
        once = self._closed["tool"].count(token) == 1
        return once and token in self.tokenizer.control_ids and token not in elsewhere

    def _roles_of_stops(self) -> dict[int, str]:
        """Stop tokens that are the marker of the next message, and the role it belongs to (GLM's <|observation|>)."""
        roles = {}
        for speaker, closed in self._closed.items():
            after = {
                stop: self._bridge([*closed[:-1], stop], [{**_answers(speaker, [])[0], "content": "x"}])
                for stop in self.stop_ids
            }
            for stop, added in after.items():
                others = [other[0] for key, other in after.items() if key != stop and other is not None]
                if added is not None and [stop, *added[0]] in others:
                    roles[stop] = speaker
        return roles

    def _controls_of_others(self) -> frozenset[int]:
        """Control tokens that open messages and no turn contains: one that is sampled forges a message."""
        thinking = {**call_message("true", _CALL_ID), "reasoning_content": _REASONING}
        before = self._render(_messages("x"), opening=False)
        turn = self._render([*_messages("x"), thinking], opening=False)[len(before) :]
        own = {*self._closed["tool"], *self._closed["user"], *turn[len(commonprefix([turn, self._opening])) :]}
        around = set(self._opening)
        for speaker, closed in self._closed.items():
            added = self._bridge(closed, [{**_answers(speaker, [])[0], "content": "x"}])
            around.update(added[0] if added else [])
        foreign = (around & self.tokenizer.control_ids) - own
        return frozenset(token for token in foreign if "think" not in self.tokenizer.decode(np.array([token])))


def _messages(instruction: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]


def _answers(speaker: str, call_ids: list[str]) -> list[dict[str, Any]]:
    """The messages of a reply, without their text: one for each call where the tool speaks."""
    if speaker == "user":
        return [{"role": "user"}]
    return [{"role": "tool", "tool_call_id": call_id, "name": "bash"} for call_id in call_ids or [_CALL_ID]]


def _ids(rendered: Any) -> list[int]:
    return rendered[0] if isinstance(rendered, tuple) else rendered


def _create(adapter: RenderersTokenizer, family: str) -> Any:
    try:
        import renderers
    except ImportError as error:
        raise ConfigError(
            f"the package renderers can't be imported: {error}",
            where="model.chat_format",
            remedy="pip install renderers httpx",
        ) from error
    families = renderers_families() or []
    if family not in families:
        raise ConfigError(
            f"renderers has no format {family!r}",
            where="model.chat_format",
            remedy=f"name one of {', '.join(families)}",
        )
    try:
        # The stream keeps all reasoning: what was sampled stays, also after a new message of the user.
        kind = type(renderers.config_from_name(family))
        dropping = {"auto_drop_analysis": False} if "auto_drop_analysis" in kind.model_fields else {}
        return renderers.create_renderer(adapter, kind(thinking_retention="all", **dropping))
    except Exception as error:  # an assertion for a missing control token, a ValueError for a missing vocabulary
        raise ConfigError(
            f"the format {family!r} of renderers can't be used with this tokenizer: {error}",
            where="model.chat_format",
            remedy="name the family that model.path belongs to",
        ) from error
