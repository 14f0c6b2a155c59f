"""What a chat format does: turn text from outside into tokens, and read commands out of sampled tokens.

A format never sees sampled text, only sampled ids, and returns spans of ids with their origin. It can't produce a
SAMPLED span: those come from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_t1.trajectory.record import Origin


@dataclass(frozen=True)
class Span:
    """Tokens to append to the stream: ids int32 [n] of one origin (ENVIRONMENT or REPAIR)."""

    ids: np.ndarray
    origin: Origin


@dataclass(frozen=True)
class Command:
    """The turn calls the shell tool."""

    text: str


@dataclass(frozen=True)
class Submit:
    """The turn ends the episode."""

    text: str = ""


@dataclass(frozen=True)
class FormatProblem:
    """The turn is neither; the model is told why. `cut_off`: it ended at the token limit (mini-swe-agent#851)."""

    reason: str
    cut_off: bool = False


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

    def open(self, instruction: str) -> np.ndarray:
        """The prompt of an episode up to where the first turn is sampled, int32 [n]."""

    def parse(self, sampled_ids: np.ndarray) -> Command | Submit | FormatProblem:
        """What a sampled turn (stop token included, where it has one) asks for."""

    def reply(self, observation: str, sampled_ids: np.ndarray) -> list[Span]:
        """What stands between a sampled turn and the next: its closing (REPAIR), observation and next opening."""

    def command(self, text: str) -> np.ndarray:
        """The turn that calls the shell with `text`, as a demonstration, int32 [n]."""

    def submission(self) -> np.ndarray:
        """The turn that ends the episode, as a demonstration, int32 [n]."""

    def decode(self, ids: np.ndarray) -> str:
        """Readable text with control tokens shown; for people only, never encoded again."""
