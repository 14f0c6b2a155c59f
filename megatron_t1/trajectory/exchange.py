"""The exchange log: what was asked of the engine and what it answered, written by the client beside the records.

    DIR/exchange.<worker>.<launch>.log          one for each worker and start of a phase; append-only

    file    magic, frame, frame, ...
    frame   length of the payload uint32, CRC-32 of kind and payload uint32, kind uint8, payload; little-endian
    HEADER  JSON, first: schema and what the engine is
    SESSION JSON: number, trajectory, policy: one for each play of an episode
    STATE   JSON: what the following turns of a session were sampled under; written when it changes
    TURN    fixed fields (`_TURN`), then new prompt ids int32, sampled ids int32, log-probabilities float32
    END     JSON, last: SHA-256 of every byte before it; a file without it was cut

A turn holds only the prompt tokens that are new since the session's last request, so bytes grow linearly with tokens:
170 bytes a turn, 4 a prompt token, 8 a sampled one. The whole prompt is committed to by its SHA-256, the answer by that
of its raw bytes, taken before they were parsed, and the rows of routes by theirs.

`trajectory.exchange_reader` reads it. Records point to their session by `reference` (Header.extra["exchange"]).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error, naming

MAGIC = b"megatron-t1 exchange log\n"
SCHEMA = 1
PREFIX, SUFFIX = "exchange.", ".log"
REFERENCE = "exchange"  # key of Header.extra
HEADER, SESSION, STATE, TURN, END = range(1, 6)
FRAME = struct.Struct("<IIB")
# session, kept, prompt, sampled, cached, first row of routes (-1: no routes), rows, rows that had come before, finish
# reason; SHA-256 of the prompt, of the raw response, of all rows, and of the rows that hadn't come before
TURN_FIELDS = struct.Struct("<IIIIIiIIB32s32s32s32s")
FINISH_REASONS = ("stop", "length")
NO_DIGEST = bytes(32)


class ExchangeLog:
    """Writes one file; it appears with the first session. Not for several threads.

    Args:
        directory: of the records.
        facts: what is known of the engine: name, dtype, log-prob mode, tokenizer digest; compared with the records'
            sampling contracts by field name.
    """

    def __init__(self, directory: str | Path, *, worker: int = 0, facts: Mapping[str, Any] | None = None):
        self.path = Path(directory) / f"{PREFIX}{worker}.{secrets.token_hex(6)}{SUFFIX}"
        self._facts = dict(facts or {})
        self._file: Any = None
        self._digest = hashlib.sha256()
        self._size = 0
        self._sessions = 0
        self._closed = False

    def __enter__(self) -> ExchangeLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(OSError, T1Error):  # a disk that was full is full: the first error is the one to read
            self.close()

    def session(self, trajectory: str, policy: int) -> ExchangeSession:
        """Begin a play of an episode by policy version `policy`."""
        number = self._sessions
        self._sessions += 1
        self._json(SESSION, {"session": number, "trajectory": trajectory, "policy": int(policy)})
        return ExchangeSession(self, number)

    def sync(self) -> None:
        """Return when everything written so far is on the disk: to be called before a record that points here."""
        if self._file is not None:
            with naming(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Seal the file. Nothing can be appended any more."""
        if self._file is not None:
            self._json(END, {"sha256": self._digest.hexdigest(), "sessions": self._sessions})
            self.sync()
            self._file.close()
            self._file = None
        self._closed = True

    def append(self, kind: int, *parts: bytes | memoryview) -> None:
        """Write one frame, in one system call: a killed process leaves at most one torn frame, at the end.

        Raises:
            T1Error, OSError: it couldn't be written whole; nothing of it is left.
        """
        frame = make_frame(kind, b"".join(parts))
        with naming(self.path):
            if self._file is None:
                self._open()
            written = self._file.write(frame)
            if written != len(frame):
                self._file.truncate(self._size)
                self._file.seek(self._size)
                raise T1Error(
                    f"only {written} of {len(frame)} bytes could be written",
                    where=str(self.path),
                    remedy="free space; what was written before is intact, and the phase can be started again",
                )
        self._digest.update(frame)
        self._size += len(frame)

    def _open(self) -> None:
        if self._closed:
            raise ValueError(f"the exchange log is closed: {self.path}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "xb", buffering=0)
        self._file.write(MAGIC)
        self._digest.update(MAGIC)
        self._size = len(MAGIC)
        self._json(HEADER, {"schema": SCHEMA, "facts": self._facts})

    def _json(self, kind: int, value: Mapping[str, Any]) -> None:
        self.append(kind, json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


class ExchangeSession:
    """The requests of one play of an episode, in order. Made by `ExchangeLog.session`."""

    def __init__(self, log: ExchangeLog, number: int):
        self._log = log
        self._number = number
        self._stream = np.empty(0, np.int32)  # last prompt and its answer
        self._routes_end = 0
        self._state: dict[str, Any] | None = None

    @property
    def reference(self) -> dict[str, Any]:
        """What a record's header states under REFERENCE."""
        return {"log": self._log.path.name, "session": self._number}

    @property
    def name(self) -> str:
        """Names this play among all: the engine's session."""
        return f"{self._log.path.name}/{self._number}"

    def add(
        self,
        prompt: np.ndarray,
        *,
        sampled: np.ndarray,
        logprobs: np.ndarray,
        response_sha256: str,
        finish_reason: str,
        state: Mapping[str, Any],
        cached_tokens: int = 0,
        routes: np.ndarray | None = None,
        routes_start: int = 0,
    ) -> None:
        """Append one answered request.

        Args:
            prompt: int32 [P], all tokens that were sent.
            sampled: int32 [N]. logprobs: float32 [N].
            response_sha256: of the raw body of the answer, in hexadecimal.
            state: temperature, top_p, stop_ids and weights (the engine's name of its weights) of this request.
            routes: [R, L, K], rows from absolute position `routes_start`; None: none were asked for.
        """
        if dict(state) != self._state:
            self._state = dict(state)
            self._log._json(STATE, {"session": self._number, **self._state})
        prompt = np.ascontiguousarray(prompt, np.int32)
        kept = common_prefix(self._stream, prompt)
        rows, digests = (-1, 0, 0), (NO_DIGEST, NO_DIGEST)
        if routes is not None:
            routes = np.ascontiguousarray(routes)
            known = min(self._routes_end, kept)
            overlap = min(max(0, known - routes_start), len(routes))
            rows = routes_start, len(routes), overlap
            whole = hashlib.sha256(routes).digest()
            digests = whole, hashlib.sha256(routes[overlap:]).digest() if overlap else whole
            self._routes_end = routes_start + len(routes)
        fields = TURN_FIELDS.pack(
            self._number, kept, len(prompt), len(sampled), cached_tokens, *rows, FINISH_REASONS.index(finish_reason),
            hashlib.sha256(prompt).digest(), bytes.fromhex(response_sha256), *digests,
        )  # fmt: skip
        sampled = np.ascontiguousarray(sampled, np.int32)
        logprobs = np.ascontiguousarray(logprobs, np.float32)
        self._log.append(TURN, fields, prompt[kept:].data, sampled.data, logprobs.data)
        self._stream = np.concatenate([prompt, sampled])


def make_frame(kind: int, payload: bytes) -> bytes:
    return FRAME.pack(len(payload), zlib.crc32(payload, zlib.crc32(bytes([kind]))), kind) + payload


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens are equal."""
    length = min(len(one), len(other))
    differing = one[:length] != other[:length]
    return int(differing.argmax()) if differing.any() else length


def is_log(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def log_names(directory: str | Path) -> list[str]:
    """File names of the exchange logs in a directory, sorted."""
    try:
        return sorted(name for name in os.listdir(directory) if is_log(name))
    except FileNotFoundError:
        return []
