"""What is kept of a command's output: head and tail, in constant memory however much is written."""

from __future__ import annotations


class OutputBuffer:
    """Keeps `limit` bytes: the first half and the last half of everything fed to it."""

    def __init__(self, limit: int):
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:
            del self._tail[: len(self._tail) - self._tail_limit]

    def text(self) -> tuple[str, int]:
        """The kept text, with a marker where bytes are missing if there is room for one, and how many are missing."""
        tail = self._tail[-self._tail_limit :] if self._tail_limit else b""
        omitted = self.total - len(self._head) - len(tail)
        if not omitted:
            return _decode(bytes(self._head + tail)), 0
        marker = len(_marker(self.total))  # at most: making room for it leaves more out
        spare = self._head_limit + self._tail_limit - marker
        if spare < marker:
            return _decode(bytes(self._head + tail)), omitted
        head, tail = self._head[: (spare + 1) // 2], tail[len(tail) - spare // 2 :]
        omitted = self.total - len(head) - len(tail)
        return f"{_decode(bytes(head))}{_marker(omitted)}{_decode(bytes(tail))}", omitted


def _marker(omitted: int) -> str:
    return f"\n[... {omitted} bytes omitted ...]\n"


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\0", "")
