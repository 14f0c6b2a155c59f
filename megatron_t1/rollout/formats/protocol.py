"""What a chat format does: turn text from outside into tokens, and read commands out of sampled tokens.

A format never sees sampled text, only sampled ids, and returns spans of ids with their origin. It can't produce a
SAMPLED span: those come from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.rollout.formats.tokenizer import encodable
from megatron_t1.trajectory.record import Origin


@dataclass(frozen=True)
class Span:
    """Tokens to append to the stream: ids int32 [n] of one origin (ENVIRONMENT or REPAIR)."""

    ids: np.ndarray
    origin: Origin

    def __post_init__(self) -> None:
        if self.origin not in (Origin.ENVIRONMENT, Origin.REPAIR):
            raise ValueError(f"a chat format makes no {Origin(self.origin).name} tokens")


@dataclass(frozen=True)
class Command:
    """The turn calls the shell tool."""

    text: str


@dataclass(frozen=True)
class Submit:
    """The turn ends the episode: it has no call. An empty answer (the stop token at once) is one too."""

    text: str = ""


@dataclass(frozen=True)
class FormatProblem:
    """The turn is neither; the model is told why. `cut_off`: it ended at the token limit (mini-swe-agent#851)."""

    reason: str
    cut_off: bool = False


# Several calls in one turn: the shell has one state, so none of them is run, and each is answered with this reason.
ONE_CALL = "one complete call per turn"


class ConversationRefused(T1Error):
    """This conversation can't be continued without changing what was sampled; others of the same format can."""


class Conversation(Protocol):
    """One episode in a chat format.

    Attributes:
        prompt: int32 [n], the episode's tokens up to where the first turn is sampled.
    """

    prompt: np.ndarray

    def reply(self, observation: str, sampled_ids: np.ndarray, *, role: str = "") -> list[Span]:
        """What stands between the turn just sampled and the next: closing (REPAIR), observation, next opening.

        Args:
            observation: text from outside; no part of it becomes a control token.
            sampled_ids: int32 [n], the whole turn, stop token included where it has one; none: a turn that was opened
                and never sampled, which is closed like one that was cut off.
            role: who speaks: "tool", "user", or "" for what the turn asks for (a call is answered by the tool).

        Raises:
            ConversationRefused: the format can't continue it.
        """


class ChatFormat(Protocol):
    """One way of writing turns as tokens.

    Attributes:
        name: stated in the sampling contract.
        stop_ids: tokens that end a turn; the sampled one is part of it.
        tokenizer_sha256: of tokenizer.json.
    """

    name: str
    stop_ids: tuple[int, ...]
    tokenizer_sha256: str

    def begin(self, instruction: str) -> Conversation:
        """The conversation of a new episode."""

    def parse(self, sampled_ids: np.ndarray) -> Command | Submit | FormatProblem:
        """What a sampled turn (stop token included, where it has one) asks for."""

    def command(self, text: str) -> np.ndarray:
        """The turn that calls the shell with `text`, as a demonstration, int32 [n]."""

    def submission(self) -> np.ndarray:
        """The turn that ends the episode, as a demonstration, int32 [n]."""

    def decode(self, ids: np.ndarray) -> str:
        """Readable text with control tokens shown; for people only, never encoded again."""


class TurnByTurn:
    """A conversation of a format whose replies depend on the turn they follow and on nothing before it."""

    def __init__(self, chat: TurnFormat, instruction: str):
        self.prompt = chat.open(require_text(instruction))
        self._chat = chat

    def reply(self, observation: str, sampled_ids: np.ndarray, *, role: str = "") -> list[Span]:
        return self._chat.reply(require_text(observation), sampled_ids, role=role)


class TurnFormat(Protocol):
    """What `TurnByTurn` needs of a format; see `Conversation`."""

    def open(self, instruction: str) -> np.ndarray: ...

    def reply(self, observation: str, sampled_ids: np.ndarray, *, role: str = "") -> list[Span]: ...


def require_text(text: str) -> str:
    """`text` as it can be encoded; T1Error for anything but text: images and other parts would be expanded by a
    processor (sglang#26555)."""
    if isinstance(text, str):
        return encodable(text)
    raise T1Error(
        f"a message is {type(text).__name__}, not text",
        where="chat format",
        remedy="images and other content parts are not supported: their tokens can't be traced to what was sampled",
    )


def command_problem(text: str | None) -> str:
    """Why `text` can't be run; "" when it can."""
    if not text or not text.strip():
        return "empty command"
    return "NUL in command" if "\0" in text else ""
