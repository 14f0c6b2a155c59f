"""Reading exchange logs (`trajectory.exchange`): mapped frames, and sessions rebuilt to what the engine saw and said.

Nothing here knows a record or a token stream: what a session amounts to is worked out from requests and answers alone.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import IncompleteError, naming
from megatron_t1.regular import open_regular
from megatron_t1.trajectory import typed
from megatron_t1.trajectory.exchange import (
    END,
    FINISH_REASONS,
    FRAME,
    HEADER,
    MAGIC,
    NO_DIGEST,
    SCHEMA,
    SESSION,
    STATE,
    TURN,
    TURN_FIELDS,
    make_frame,
)

FACTS = {None: (typed.text, typed.number, typed.truth, typed.nothing)}
SESSION_FIELDS = {"session": typed.integer, "trajectory": typed.text, "policy": typed.integer}
STATE_FIELDS = {
    "session": typed.integer,
    "temperature?": typed.number,
    "top_p?": typed.number,
    "stop_ids?": [typed.integer],
    "weights?": (typed.text, typed.nothing),
    None: typed.anything,
}


@dataclass(frozen=True)
class LoggedTurn:
    """One request and its answer. Arrays are views of the mapped file."""

    kept: int  # tokens that the prompt shares with the previous prompt and answer, from the start
    prompt_length: int
    new_prompt: np.ndarray  # int32 [prompt_length - kept]
    sampled: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    finish_reason: str
    cached_tokens: int
    routes_start: int  # absolute position of the first row; -1: no routes were asked for
    routes_rows: int
    routes_overlap: int  # rows at the beginning that had come before
    prompt_sha256: str
    response_sha256: str
    routes_sha256: str  # of all rows
    new_routes_sha256: str  # of those after the overlap
    state: dict[str, Any]  # temperature, top_p, stop_ids, weights


@dataclass
class LoggedSession:
    trajectory: str
    policy: int
    turns: list[LoggedTurn] = field(default_factory=list)


@dataclass(frozen=True)
class Exchanged:
    """What a session amounts to: the stream as the engine saw it, T' tokens up to its last sampled one.

    Attributes:
        ids: int32 [T'].
        sampled: bool [T'].
        logprobs: float32 [T'], NaN where nothing was sampled.
        turn: int32 [T'], number of the assistant turn, -1 where nothing was sampled.
        turns: the requests whose answers are still part of the stream, in order. One that goes on where the answer
            before it ended belongs to the same assistant turn.
        problems: where the log contradicts itself.
    """

    ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    turn: np.ndarray
    turns: list[LoggedTurn]
    problems: list[str]


class ExchangeFile:
    """One log. Made by `read_exchange`.

    Attributes:
        facts: of the engine, as the writer stated them.
        sessions: by number.
        sealed: whether the END frame is there.
        whole: bytes up to the end of the last whole frame.
        size: bytes of the file.
    """

    def __init__(self, path: Path, content: memoryview | bytes):
        self.path = path
        self.facts: dict[str, Any] = {}
        self.sessions: dict[int, LoggedSession] = {}
        self.sealed = False
        self.whole = len(MAGIC)
        self.size = len(content)
        self._content = content
        self._states: dict[int, dict[str, Any]] = {}
        self._lengths: dict[int, int] = {}  # tokens of the last prompt and its answer, by session

    @property
    def torn(self) -> int:
        """Bytes after the last whole frame."""
        return self.size - self.whole

    def _read(self, verify: bool) -> None:
        for kind, start, stop in self._frames(verify):
            payload = self._content[start:stop]
            if kind == TURN:
                self._turn(payload, start)
                continue
            value = json.loads(bytes(payload))
            if kind == HEADER:
                if value["schema"] != SCHEMA:
                    raise ValueError(f"schema {value['schema']!r}, this version of megatron-t1 reads {SCHEMA}")
                self.facts = typed.check(value["facts"], FACTS, "facts")
            elif kind == SESSION:
                typed.check(value, SESSION_FIELDS, "session")
                if value["session"] in self.sessions:
                    raise ValueError(f"session {value['session']} begins twice")
                self.sessions[value["session"]] = LoggedSession(value["trajectory"], value["policy"])
                self._lengths[value["session"]] = 0
            elif kind == STATE:
                typed.check(value, STATE_FIELDS, "state")
                self._states[value.pop("session")] = value
            elif kind == END:
                before = start - FRAME.size
                if verify and hashlib.sha256(self._content[:before]).hexdigest() != value["sha256"]:
                    raise ValueError("the SHA-256 in its last frame is another one")
                self.sealed = True
            else:
                raise ValueError(f"frame of unknown kind {kind} at byte {start - FRAME.size}")
        if self.sealed and self.torn:
            raise ValueError(f"it goes on after its last frame, at byte {self.whole}")

    def _frames(self, verify: bool) -> Iterator[tuple[int, int, int]]:
        """(kind, first byte, byte after the last) of each payload; stops before a frame that is cut off by the end."""
        while self.whole + FRAME.size <= self.size:
            length, checksum, kind = FRAME.unpack_from(self._content, self.whole)
            start = self.whole + FRAME.size
            if self.sealed or start + length > self.size:
                return
            # A seal commits to every byte at once; frame by frame is for files without one.
            if verify and zlib.crc32(self._content[start : start + length], zlib.crc32(bytes([kind]))) != checksum:
                raise ValueError(f"the frame at byte {self.whole} is damaged")
            self.whole = start + length
            yield kind, start, self.whole

    def _turn(self, payload: memoryview | bytes, at: int) -> None:
        fields = TURN_FIELDS.unpack_from(payload)
        session, kept, prompt, sampled, cached, start, rows, overlap, reason, *digests = fields
        new = prompt - kept
        if new < 0 or len(payload) != TURN_FIELDS.size + 4 * new + 8 * sampled:
            raise ValueError(f"the turn at byte {at} has {len(payload)} bytes, which isn't what it states")
        # What a turn repeats must be there: a number from outside never decides how much memory is taken.
        if kept > self._lengths[session]:
            raise ValueError(f"the turn at byte {at} keeps {kept} tokens of {self._lengths[session]}")
        if start >= 0 and overlap > rows:
            raise ValueError(f"the turn at byte {at} has {rows} rows of routes, {overlap} of which had come before")
        self._lengths[session] = prompt + sampled
        offset = TURN_FIELDS.size
        arrays = []
        for dtype, count in (("<i4", new), ("<i4", sampled), ("<f4", sampled)):
            arrays.append(np.frombuffer(payload, dtype, count, offset))
            offset += 4 * count
        self.sessions[session].turns.append(
            LoggedTurn(
                kept, prompt, *arrays, FINISH_REASONS[reason], cached, start, rows, overlap,
                *(digest.hex() if digest != NO_DIGEST else "" for digest in digests),
                self._states[session],
            )
        )  # fmt: skip


def read_exchange(path: str | Path, *, verify: bool = True) -> ExchangeFile:
    """Read a log. One that ends within a frame, or without END, is returned with what is whole.

    Args:
        verify: compare checksums; without, only lengths.

    Raises:
        IncompleteError: it isn't an exchange log, is damaged before its end, or goes on after it.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            content: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = memoryview(content)
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        problem = error.strerror if isinstance(error, OSError) else error
        raise IncompleteError(f"the exchange log can't be read: {problem}", where=str(path)) from error
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise IncompleteError("this file is no exchange log", where=str(path))
    log = ExchangeFile(path, content)
    try:
        log._read(verify)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
        raise IncompleteError(
            f"the exchange log is damaged: {error if isinstance(error, ValueError) else repr(error)}",
            where=str(path),
            remedy="restore the file; without it the rollout can't be audited",
        ) from error
    return log


def seal_abandoned(paths: Iterable[Path]) -> None:
    """Seal logs whose writers were killed: cut a torn frame off, append END. Only where no writer is left.

    Raises:
        IncompleteError: a file is no exchange log, or is damaged elsewhere than at its end.
    """
    for path in paths:
        log = read_exchange(path)
        if log.sealed:
            continue
        with naming(path), open(path, "r+b") as file:
            content = file.read(log.whole)
            end = {"sha256": hashlib.sha256(content).hexdigest(), "recovered": True}
            file.truncate(log.whole)
            file.seek(log.whole)
            file.write(make_frame(END, json.dumps(end, sort_keys=True).encode()))
            file.flush()
            os.fsync(file.fileno())


def _rebuilt_size(session: LoggedSession) -> int:
    """The longest stream that the turns make, up to one that keeps more than there is."""
    longest = length = 0
    for turn in session.turns:
        if turn.kept > length:
            break
        length = turn.prompt_length + len(turn.sampled)
        longest = max(longest, length)
    return longest


def rebuild(session: LoggedSession) -> Exchanged:
    """The stream that a session's requests and answers make, checked against the SHA-256 of every prompt."""
    problems: list[str] = []
    size = _rebuilt_size(session)
    ids, owner = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    logprobs = np.full(size, np.nan, np.float32)
    length, numbers = 0, []
    for number, turn in enumerate(session.turns):
        if turn.kept > length:
            problems.append(f"request {number} keeps {turn.kept} tokens of {length}")
            break
        resumes = number > 0 and turn.kept == turn.prompt_length == length
        numbers.append(numbers[-1] if resumes else number)
        start, end = turn.prompt_length, turn.prompt_length + len(turn.sampled)
        ids[turn.kept : start], ids[start:end] = turn.new_prompt, turn.sampled
        owner[turn.kept : start], owner[start:end] = -1, number
        logprobs[turn.kept : start], logprobs[start:end] = np.nan, turn.logprobs
        if hashlib.sha256(ids[:start]).hexdigest() != turn.prompt_sha256:
            problems.append(f"the prompt of request {number} has another SHA-256 than was sent")
            break
        length = end
    owner = owner[:length]
    sampled = owner >= 0
    turn_numbers = np.full(length, -1, np.int32)
    turn_numbers[sampled] = np.unique(np.array(numbers, np.int32)[owner[sampled]], return_inverse=True)[1]
    return Exchanged(
        ids=ids[:length],
        sampled=sampled,
        logprobs=logprobs[:length],
        turn=turn_numbers,
        turns=[session.turns[number] for number in np.unique(owner[sampled]).tolist()],
        problems=problems,
    )
