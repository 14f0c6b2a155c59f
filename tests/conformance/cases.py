"""What every chat format must come through unharmed. A case returns a remark for the table, or raises."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_t1.rollout.formats import ChatFormat, Command, FormatProblem, Submit
from megatron_t1.rollout.formats.protocol import ONE_CALL
from megatron_t1.trajectory.record import Origin
from tests.conformance.play import Play
from tests.conformance.turns import Turns

BINARY = "".join(map(chr, range(1, 32))) + "\x7f\x00\x1b[31mred\x1b[0m \ufffd\u202e\u200b \U0001f9ea e\u0301 \r\n\r"
THOUGHT = "Schritt {}: I check é, 漢字 and what was written before."


def reasoning(chat: ChatFormat, turns: Turns, count: int) -> str:
    """Reasoning in every turn, none of which is lost or changed."""
    # verl#6719, verl#6779, verl#6854, verl#7322, prime-rl#1334
    play = Play(chat)
    for number in range(count):
        ids = turns.call(f"cat {number}.txt", reasoning=THOUGHT.format(number))
        assert play.turn(ids, f"line {number}\n") == Command(f"cat {number}.txt")
    record = play.finish()
    text = chat.decode(record.ids[record.loss_mask])
    shown = sum(THOUGHT.format(number) in text for number in range(count))
    assert shown in (0, count)
    return f"{count} turns" if shown else f"{count} turns, the family has no reasoning"


def arguments(chat: ChatFormat, turns: Turns, count: int) -> str:  # prime-rl#2278, prime-rl#2513
    """Nested and non-ASCII arguments, and a lower-case false that many templates would write as False."""
    play = Play(chat)
    for number in range(count):
        ids = turns.call(f"echo é{number} 漢字", arguments=True)
        assert play.turn(ids) == Command(f"echo é{number} 漢字")
    text = chat.decode(play.finish().ids)
    if "false" not in chat.decode(play.sampled[0]):
        return f"{count} turns, one argument only"
    assert text.count("false") >= count and "False" not in text
    return f"{count} turns"


def empty_output(chat: ChatFormat, turns: Turns, count: int) -> str:
    play = Play(chat)
    for _ in range(count):
        play.turn(turns.call(), "", times=None)
    play.finish()
    return f"{count} turns"


def binary_output(chat: ChatFormat, turns: Turns, count: int) -> str:
    play = Play(chat, f"Do {BINARY} it.")
    for number in range(count):
        play.turn(turns.call(), f"{BINARY}{number}")
    play.finish()
    return f"{count} turns"


def control_text(chat: ChatFormat, turns: Turns, count: int) -> str:
    """Special tokens, role markers and whole turns written by the environment stay text: nothing is forged."""
    names = sorted(chat.decode(np.array([token])) for token in chat.tokenizer.control_ids)
    call, answer = chat.decode(turns.call("rm -rf /")), chat.decode(turns.answer())
    opening = chat.decode(play_opening(chat))
    attacks = [*names, call, answer, opening + answer, answer + opening + call, "".join(names), " ".join(names)]
    for attack in attacks:
        Play(chat, f"Do {attack} it.")
    play = Play(chat)
    for number in range(max(count, len(attacks))):
        action = play.turn(turns.call(), f"a {attacks[number % len(attacks)]} b")
        assert action == Command("ls")  # what is read as a call are sampled tokens and nothing else
    record = play.finish()
    assert record.loss_mask.sum() == len(turns.call()) * play.stream.turns
    return f"{len(attacks)} texts"


def play_opening(chat: ChatFormat) -> np.ndarray:
    """What stands between an output and the next turn."""
    spans = chat.begin("x").reply("observation", Turns(chat, "").call())
    text = chat.decode(spans[-1].ids)
    return np.array(chat.tokenizer.encode_template(text.rpartition("observation")[2]), np.int32)


def several_users(chat: ChatFormat, turns: Turns, count: int) -> str:
    """A user speaks again after answers; the reasoning before stays in the stream."""
    play = Play(chat)
    for number in range(count):
        last = number % 3 == 2
        ids = turns.answer(THOUGHT.format(number)) if last else turns.call(reasoning=THOUGHT.format(number))
        play.turn(ids, f"more {number}", role="user" if last else "")
    play.finish()
    return f"{count} turns, {count // 3} users"


def cut_off(chat: ChatFormat, turns: Turns, count: int) -> str:  # mini-swe-agent#851
    """The length limit in the middle of a call, of a character, of reasoning; the closing is a visible repair."""
    play = Play(chat)
    for make in (turns.cut_in_call, turns.cut_in_character, turns.cut_in_reasoning):
        action = play.turn(make(), "error format: turn cut off")
        assert isinstance(action, FormatProblem) and action.cut_off
        assert play.origins[-1] == [Origin.REPAIR, Origin.ENVIRONMENT]
        assert play.turn(turns.call()) == Command("ls")  # and the conversation goes on
    play.finish()
    return "closed by a repair"


def empty_answer(chat: ChatFormat, turns: Turns, count: int) -> str:
    """The stop token at once."""
    play = Play(chat)
    action = play.turn(np.array(chat.stop_ids[:1], np.int32))
    assert action == Submit("") or (isinstance(action, FormatProblem) and action.reason == "reasoning not closed")
    assert play.turn(turns.call()) == Command("ls")
    play.finish()
    return "submits" if isinstance(action, Submit) else action.reason


def other_stops(chat: ChatFormat, turns: Turns, count: int) -> str:
    """Each stop token of the family, also one that is the next message's own marker, which isn't written twice."""
    play = Play(chat)
    for stop in chat.stop_ids:
        play.turn(turns.ended_by(stop))
    assert play.turn(turns.call()) == Command("ls")
    play.finish()
    return f"{len(chat.stop_ids)} tokens"


def parallel_calls(chat: ChatFormat, turns: Turns, count: int) -> str:
    """Two calls in a turn: none is run, and each is answered."""
    play = Play(chat)
    answers = []
    for ids in turns.parallel():
        action = play.turn(ids, "error format: refused")
        assert isinstance(action, FormatProblem) and action.reason == ONE_CALL, action
        answers.append(chat.decode(np.concatenate(play.replies[-1])).count("refused"))
    assert play.turn(turns.call()) == Command("ls")
    play.finish()
    return f"refused, {max(answers)} answer{'s' if max(answers) > 1 else ''}"


CASES: dict[str, Callable[[ChatFormat, Turns, int], str]] = {
    case.__name__.replace("_", " "): case
    for case in (reasoning, arguments, empty_output, binary_output, control_text, several_users, cut_off, empty_answer,
                 other_stops, parallel_calls)
}  # fmt: skip
