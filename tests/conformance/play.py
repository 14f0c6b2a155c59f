"""A conversation played through stream and chat format as the agent does it, with everything checked at every turn."""

from __future__ import annotations

import json

import numpy as np

from megatron_t1.rollout.formats import ChatFormat, Command, FormatProblem, Submit
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.record import EndReason, Header, Origin, Trajectory
from tests.rollout.conftest import completion, contract


class Play:
    """`turn` appends what "was sampled", has the format answer, and holds the answer against what must be true.

    A twin conversation gets the same turns and harmless text: control tokens must be the same in both, whatever the
    environment wrote.
    """

    def __init__(self, chat: ChatFormat, instruction: str = "Do the task."):
        self.chat = chat
        self.stream = TokenStream()
        self.conversation, self.twin = chat.begin(instruction), chat.begin("x")
        assert self._controls(self.conversation.prompt) == self._controls(self.twin.prompt), "instruction"
        assert visible(instruction, chat.decode(self.conversation.prompt))
        self.stream.append(self.conversation.prompt, Origin.PROMPT)
        self.sampled: list[np.ndarray] = []
        self.origins: list[list[Origin]] = []  # of the spans of each reply
        self.replies: list[list[np.ndarray]] = []

    def turn(
        self, ids: np.ndarray, reply: str = "ok", *, role: str = "", times: int | None = 1
    ) -> Command | Submit | FormatProblem:
        """Play one turn; `times`: how often the reply must contain its text (None: not looked at)."""
        before = self.stream.ids.copy()
        ended = int(ids[-1]) in self.chat.stop_ids
        self.stream.append_sampled(completion(ids, len(before), reason="stop" if ended else "length"))
        action = self.chat.parse(ids)
        spans = self.conversation.reply(reply, ids, role=role)
        harmless = self.twin.reply("x", ids, role=role)
        for span in spans:
            self.stream.append(span.ids, span.origin)
        added = np.concatenate([span.ids for span in spans])
        assert self._controls(added) == self._controls(np.concatenate([span.ids for span in harmless]))
        assert self._controls(added), "nothing separates the turns"
        assert self.stream.ids.tolist() == [*before.tolist(), *ids.tolist(), *added.tolist()]
        assert spans[-1].origin == Origin.ENVIRONMENT
        if times is not None:
            assert visible(reply, self.chat.decode(added), times), self.chat.decode(added)
        if ended and len(added):
            assert int(added[0]) != int(ids[-1]), "the stop token is written twice"
        self.sampled.append(ids)
        self.replies.append([span.ids for span in spans])
        self.origins.append([span.origin for span in spans])
        return action

    def finish(self) -> Trajectory:
        """The record; what carries loss is what was sampled, all of it and nothing else."""
        header = Header("demo-0", "demo", 0, 0, self.stream.policy_versions, EndReason.SUBMITTED, None, {}, contract())
        record = self.stream.finish(header)
        assert record.ids[record.loss_mask].tolist() == np.concatenate(self.sampled).tolist()
        assert (record.loss_mask == (record.origin == Origin.SAMPLED)).all()
        turns = [record.turn[record.loss_mask & (record.turn == n)].size for n in range(self.stream.turns)]
        assert turns == [len(ids) for ids in self.sampled]
        return record

    def _controls(self, ids: np.ndarray) -> list[int]:
        return [token for token in ids.tolist() if token in self.chat.tokenizer.control_ids]


def visible(text: str, within: str, times: int = 1) -> bool:
    """Whether `text` stands in `within`, as it is, without white space around it, or as a JSON string."""
    forms = {text, text.strip(), json.dumps(text, ensure_ascii=False)[1:-1]}
    return any(within.count(form) >= times for form in forms)
