"""What the engine has answered in an episode that isn't finished: a phase that starts again goes on from there.

    DIR/inflight/<trajectory>.journal       removed when the episode's record is stored

    file    frame, frame, ...               as in an exchange log (trajectory.exchange); a torn last one is dropped
    BOUND   text, first: what sampled it (policy and contract); a journal of anything else is begun anew
    ANSWER  SHA-256 of the request, seconds it took (float64), body of the answer as it was received

An episode that is continued is played from the start in a new sandbox: its commands run again, and a request that is
the recorded one to the byte gets the recorded answer, through the same parser and into the same logs as a new one. So
every token was sampled by this policy after exactly the tokens before it. Where a command says something else than the
first time, the next request differs, and the engine is asked from there on.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_t1.errors import naming
from megatron_t1.trajectory.exchange import FRAME, make_frame

FOLDER, SUFFIX = "inflight", ".journal"
BOUND, ANSWER = 1, 2
HEAD = struct.Struct("<32sd")


class Journal:
    """Of one episode; `begin` before each play.

    Args:
        directory: of the phase's records.
        bound: names what samples: policy and contract.

    Attributes:
        continued: turns of this play that were taken from the journal.
        earlier_s: seconds that the engine took for these the first time.
    """

    def __init__(self, directory: Path, trajectory: str, bound: str):
        self.path = Path(directory) / FOLDER / f"{trajectory}{SUFFIX}"
        self.bound = bound.encode()
        self.continued, self.earlier_s = 0, 0.0
        self._recorded: deque[tuple[bytes, float, bytes, int]] = deque()  # digest, seconds, body, where its frame ends
        self._file: BinaryIO | None = None
        self._plays = 0

    def begin(self) -> None:
        """The first play continues what lies there; another one is a new attempt, from the start."""
        self.close()
        self.continued, self.earlier_s, self._plays = 0, 0.0, self._plays + 1
        self._recorded.clear()
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)
            self._file.seek(0)
            frames = list(_frames(self._file.read()))
            if self._plays > 1 or not frames or frames[0][:2] != (BOUND, self.bound):
                self._file.truncate(0)
                self._file.write(make_frame(BOUND, self.bound))
                return
            self._recorded.extend(
                (*HEAD.unpack_from(payload), payload[HEAD.size :], end)
                for kind, payload, end in frames[1:]
                if kind == ANSWER and len(payload) > HEAD.size
            )
            self._file.truncate(self._recorded[-1][3] if self._recorded else frames[0][2])

    def answer(self, request: bytes) -> bytes | None:
        """The recorded answer to this request, when it is the one that came next the first time; else None."""
        if not self._recorded:
            return None
        digest, seconds, body, end = self._recorded[0]
        if digest != hashlib.sha256(request).digest():
            with naming(self.path):
                self._file.truncate(end - FRAME.size - HEAD.size - len(body))
            self._recorded.clear()
            return None
        self._recorded.popleft()
        self.continued += 1
        self.earlier_s += seconds
        return body

    def add(self, request: bytes, body: bytes, seconds: float) -> None:
        """Keep an answer that was received. Not synced: it is there after a kill, and may be lost with the machine."""
        with naming(self.path):
            self._file.write(make_frame(ANSWER, HEAD.pack(hashlib.sha256(request).digest(), seconds) + body))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """The episode's record is stored."""
        self.close()
        self.path.unlink(missing_ok=True)


def discard_all(directory: Path) -> None:
    """Remove the journals of a phase whose episodes are all finished, or not to be continued."""
    shutil.rmtree(Path(directory) / FOLDER, ignore_errors=True)


def _frames(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """(kind, payload, where it ends) of every frame up to the first that is torn or damaged."""
    position = 0
    while position + FRAME.size <= len(data):
        length, checksum, kind = FRAME.unpack_from(data, position)
        payload, position = data[position + FRAME.size : position + FRAME.size + length], position + FRAME.size + length
        if len(payload) != length or zlib.crc32(payload, zlib.crc32(bytes([kind]))) != checksum:
            return
        yield kind, payload, position
