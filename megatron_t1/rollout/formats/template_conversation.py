"""One conversation in a Jinja template, with the proof at every reply that the template only appended to it."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_t1.rollout.formats.adapter import PLACEHOLDER
from megatron_t1.rollout.formats.call_syntax import REASONING, REASONING_END
from megatron_t1.rollout.formats.jinja_template import TemplateFailed
from megatron_t1.rollout.formats.protocol import ConversationRefused, Span, require_text
from megatron_t1.trajectory.record import Origin

if TYPE_CHECKING:
    from megatron_t1.rollout.formats.template import TemplateFormat

_CONTEXT = 40  # characters shown on both sides of a difference


class TemplateConversation:
    """See `protocol.Conversation`.

    The text of the stream is kept as it was proven: what was rendered for prompt and replies, and the sampled tokens
    decoded turn by turn. The template sees each turn as one message whose content is the decoded turn.
    """

    def __init__(self, chat: TemplateFormat, instruction: str):
        self._chat = chat
        self._messages = chat.first_messages(instruction)
        self._first = len(self._messages)
        self._way = 0  # of handing a turn to the template that was right the last time
        text = chat.render(self._messages, opening=True)
        marked = chat.render(chat.first_messages(PLACEHOLDER), opening=True)
        self.prompt = chat.encode(text, marked, instruction)
        self._pieces: list[tuple[str, np.ndarray]] = [(text, self.prompt)]

    def reply(self, observation: str, sampled_ids: np.ndarray, *, role: str = "") -> list[Span]:
        chat = self._chat
        observation = require_text(observation)
        replies = chat.replies(role, observation, sampled_ids)
        # Decoded after a token that stands before it: some tokenizers drop the first space of a text.
        last = self._pieces[-1][1][-1:]
        turn = chat.decode(np.concatenate([last, sampled_ids])).removeprefix(chat.decode(last))
        ended = len(sampled_ids) > 0 and int(sampled_ids[-1]) == chat.end
        written = turn.removesuffix(chat.decode(sampled_ids[-1:])) if ended else turn
        stream = "".join(text for text, _ in self._pieces) + turn
        self._pieces.append((turn, sampled_ids))
        message, text = self._proven(stream, written, replies)
        added = text[len(stream) :]
        # What closes the turn, and where the observation stands, shows in the turn by itself: cheaper, and the same.
        alone, before = [*self._messages[: self._first], message], self._pieces[0][0] + turn
        closing = commonprefix([added, chat.render(alone, opening=False).removeprefix(before)])
        harmless = chat.replies(role, PLACEHOLDER, sampled_ids)
        marked = chat.render([*alone, *harmless], opening=True).removeprefix(before)
        repair = np.array(chat.encode_template(closing), dtype=np.int32)
        environment = chat.encode(added[len(closing) :], marked.removeprefix(closing), observation)
        self._messages += [message, *replies]
        self._pieces += [(closing, repair), (added[len(closing) :], environment)]
        spans = [Span(repair, Origin.REPAIR), Span(environment, Origin.ENVIRONMENT)]
        return [span for span in spans if len(span.ids)]

    def _proven(self, stream: str, written: str, replies: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
        """(the turn as a message, the conversation rendered with it): the one whose rendering goes on from `stream`.

        Raises:
            ConversationRefused: there is none; names the first token that the template writes differently.
        """
        refused = None
        ways = list(enumerate(self._as_messages(written)))
        for way, message in sorted(ways, key=lambda item: item[0] != self._way):
            try:
                text = self._chat.render([*self._messages, message, *replies], opening=True)
            except TemplateFailed as error:
                refused = refused or ConversationRefused(error.problem, where=error.where, remedy=error.remedy)
                continue
            if text.startswith(stream):
                self._way = way
                return message, text
            refused = refused or self._difference(stream, text)
        raise refused

    def _as_messages(self, turn: str) -> Iterator[dict[str, Any]]:
        """The ways of handing a turn to a template: as it is, without a space that the template writes, or with its
        reasoning taken apart. Which one is right shows in what is rendered."""
        yield {"role": "assistant", "content": turn}
        if turn[:1].isspace():
            yield {"role": "assistant", "content": turn.lstrip()}
        opened = self._chat.opening.rpartition(REASONING)[2] if self._chat.opens_reasoning else None
        whole = turn if opened is None else f"{REASONING}{opened}{turn}"
        if whole is not turn:
            yield {"role": "assistant", "content": whole}
        if REASONING in whole:
            inside, _, after = whole.partition(REASONING)[2].partition(REASONING_END)
            yield {"role": "assistant", "content": after.lstrip("\n"), "reasoning_content": inside.strip("\n")}

    def _difference(self, stream: str, text: str) -> ConversationRefused:
        position, start, turn = self._token_at(len(commonprefix([stream, text])))
        before = stream[max(0, start - _CONTEXT) : start]
        return ConversationRefused(
            f"the chat template doesn't only append to this conversation: from token {position} (turn {turn}) on the "
            f"stream has {stream[start : start + _CONTEXT]!r} and the template {text[start : start + _CONTEXT]!r}, "
            f"both after {before!r}",
            where=f"{self._chat.template.where}, turn {turn}",
            remedy="use renderers:FAMILY where there is one for the model, or a template that keeps turns as they are",
        )

    def _token_at(self, character: int) -> tuple[int, int, int]:
        """(position, first character, assistant turn) of the token in which a character of the stream's text stands."""
        tokens = characters = 0
        for index, (text, ids) in enumerate(self._pieces):  # the prompt, then turn, closing and reply again and again
            inside = character - characters
            if inside < len(text) or index == len(self._pieces) - 1:
                first, last = 0, max(0, len(ids) - 1)
                while first < last:  # the first token with which the decoded text goes beyond the character
                    middle = (first + last) // 2
                    if len(self._chat.decode(ids[: middle + 1])) > inside:
                        last = middle
                    else:
                        first = middle + 1
                start = characters + len(self._chat.decode(ids[:first]))
                return tokens + first, start, max(0, (index - 1) // 3)
            characters += len(text)
            tokens += len(ids)
        raise AssertionError("the stream has a prompt")
