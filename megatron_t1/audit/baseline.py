"""What the usual path would have done to the same trajectories: decode, parse, render, encode.

Each turn's sampled ids are decoded to text, the command is parsed out of it, and the conversation of instruction,
commands and outputs is written by the chat format again and encoded. The result is compared with what was sampled.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.audit.compare import align
from megatron_t1.errors import ConfigError
from megatron_t1.rollout.formats import ChatFormat, Command, load_format
from megatron_t1.trajectory.record import Header, Origin, Trajectory
from megatron_t1.trajectory.views import Span, spans

OWN_FORMATS = ("chatml_bash", "template")
_RENDERERS = re.compile(r"renderers:[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass
class Baseline:
    """How many trajectories and tokens would have drifted.

    Attributes:
        drifted: trajectories whose tokens differ anywhere.
        drifted_in_loss: trajectories with a sampled token that differs.
        loss_tokens_drifted: sampled tokens of changed turns from their first to their last difference.
        turns_drifted: sampled spans that come out as other tokens.
        problem: why there is none, or none of the rest; "" where everything was counted.
    """

    chat_format: str
    trajectories: int = 0
    drifted: int = 0
    drifted_in_loss: int = 0
    loss_tokens: int = 0
    loss_tokens_drifted: int = 0
    context_tokens_drifted: int = 0
    turns: int = 0
    turns_drifted: int = 0
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return found if self.problem else {name: value for name, value in found.items() if name != "problem"}

    def add(self, trajectory: Trajectory, chat: ChatFormat) -> None:
        """Count one trajectory."""
        sampled = trajectory.origin == Origin.SAMPLED
        self.trajectories += 1
        self.loss_tokens += int(sampled.sum())
        in_loss = outside = 0
        for span, again in rerendered(trajectory, chat):
            ids = trajectory.ids[span.start : span.stop]
            wrong = _drifted(ids, again)
            if span.origin == Origin.SAMPLED:
                self.turns += 1
                self.turns_drifted += wrong > 0
                in_loss += wrong
            else:
                outside += wrong
        self.loss_tokens_drifted += in_loss
        self.context_tokens_drifted += outside
        self.drifted_in_loss += in_loss > 0
        self.drifted += in_loss + outside > 0


def rerendered(trajectory: Trajectory, chat: ChatFormat) -> list[tuple[Span, np.ndarray]]:
    """(span, ids int32 [n] that the usual path has in its place) of each span of the trajectory, in order.

    A turn with a call becomes the format's own rendering of that call; other turns, and what is between turns, are
    decoded and encoded, with control tokens recognised by name. Spans are encoded one by one, which spares the baseline
    merges across their edges.
    """
    found = []
    for span in spans(trajectory):
        ids = trajectory.ids[span.start : span.stop]
        action = chat.parse(ids) if span.origin == Origin.SAMPLED else None
        if isinstance(action, Command):
            again = chat.command(action.text)
        else:
            again = chat.tokenizer.encode_template(chat.decode(ids))
        found.append((span, np.asarray(again, np.int32)))
    return found


def format_of_record(header: Header) -> str:
    """The name of the chat format that a record states, if it is one of this package's own.

    A record is data: it may choose among known formats, and never name code to be run or a file to be read.

    Raises:
        ConfigError: it states none, or another one.
    """
    name = header.contract.chat_format if header.contract is not None else ""
    if name in OWN_FORMATS or _RENDERERS.fullmatch(name):
        return name
    said = f"the record names the chat format {name!r}" if name else "the record names no chat format"
    raise ConfigError(said, where=f"trajectory {header.trajectory_id}", remedy="name one with --chat-format")


def baseline_format(name: str, model_dir: str | Path) -> ChatFormat:
    """The chat format that renders the baseline.

    Raises:
        ConfigError: it has no tokenizer that encodes a template's text.
    """
    chat = load_format(name, model_dir)
    if not hasattr(getattr(chat, "tokenizer", None), "encode_template"):
        raise ConfigError(f"the chat format {name} can't render the baseline", where="--baseline")
    return chat


def _drifted(ids: np.ndarray, again: np.ndarray) -> int:
    """Tokens of `ids` that differ, where both are of one length; else the longer of the two differing middles."""
    if len(ids) == len(again):
        return int((ids != again).sum())
    alignment = align(ids, again) if len(ids) < len(again) else align(again, ids)
    return max(alignment.expected_stop, alignment.found_stop) - alignment.start
