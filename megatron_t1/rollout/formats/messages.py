"""The messages of a trajectory: a view of its stream for people and other programs, never a way back to tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_t1.rollout.formats.protocol import ChatFormat, Command, FormatProblem, Submit
from megatron_t1.trajectory.record import Origin, Trajectory
from megatron_t1.trajectory.views import spans


@dataclass(frozen=True)
class Message:
    """What was said between two changes of the speaker.

    Attributes:
        role: "prompt", "assistant" or "environment".
        text: decoded, control tokens shown. The environment's includes what closes the turn before it (REPAIR).
        turn: assistant turn that it is, or answers.
        start, stop: tokens of the stream (stop exclusive); the messages cover it without gaps.
        action: what an assistant's turn asks for; None for the others.
    """

    role: str
    text: str
    turn: int
    start: int
    stop: int
    action: Command | Submit | FormatProblem | None = None


_ROLES = {
    Origin.PROMPT: "prompt",
    Origin.SAMPLED: "assistant",
    Origin.DEMONSTRATION: "assistant",
    Origin.ENVIRONMENT: "environment",
    Origin.REPAIR: "environment",
}


def messages(trajectory: Trajectory, chat: ChatFormat) -> list[Message]:
    """The trajectory as messages in order, read with the chat format that it was sampled in."""
    runs: list[list[int]] = []  # first token, end, of spans in a row that have one role and turn
    found: list[tuple[str, int]] = []
    for span in spans(trajectory):
        speaker = (_ROLES[span.origin], span.turn)
        if found and found[-1] == speaker:
            runs[-1][1] = span.stop
        else:
            found.append(speaker)
            runs.append([span.start, span.stop])
    made = []
    for (role, turn), (start, stop) in zip(found, runs, strict=True):
        ids = trajectory.ids[start:stop]
        action = chat.parse(ids) if role == "assistant" else None
        made.append(Message(role, chat.decode(ids), turn, start, stop, action))
    return made
