"""The exchange logs of a directory of records, and the session in them that a record points to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_t1.audit.findings import Finding, Kind
from megatron_t1.errors import IncompleteError
from megatron_t1.trajectory.exchange import REFERENCE, is_log, log_names
from megatron_t1.trajectory.exchange_reader import ExchangeFile, LoggedSession, read_exchange
from megatron_t1.trajectory.record import Header
from megatron_t1.trajectory.typed import anything, fits, integer, text

REFERENCE_SHAPE = {"log": text, "session": integer, None: anything}
SHOWN = 80  # characters of a pointer that is none


class Evidence:
    """Reads each log of `directory` once, when it is first needed.

    Args:
        verify: compare the logs' own checksums.
    """

    def __init__(self, directory: str | Path, *, verify: bool = True):
        self.directory = Path(directory)
        self.verify = verify
        self._logs: dict[str, ExchangeFile | IncompleteError] = {}

    def log(self, name: str) -> ExchangeFile | IncompleteError:
        if name not in self._logs:
            try:
                self._logs[name] = read_exchange(self.directory / name, verify=self.verify)
            except IncompleteError as error:
                self._logs[name] = error
        return self._logs[name]

    def session(self, header: Header) -> tuple[LoggedSession, dict[str, Any]] | Finding | None:
        """The session of a record and what its log says about the engine.

        Returns:
            a Finding when it can't be had; None for a record that points to none.
        """
        reference = header.extra.get(REFERENCE)
        if reference is None:
            return None
        if not fits(reference, REFERENCE_SHAPE):
            return Finding(Kind.LOG_MISSING, f"the record's pointer to it is {ascii(reference)[:SHOWN]}")
        name, number = reference["log"], reference["session"]
        if not is_log(name) or Path(name).name != name:
            return Finding(Kind.LOG_MISSING, f"{name!r} is no name of a log")
        if not os.path.lexists(self.directory / name):
            return Finding(Kind.LOG_MISSING, f"{name} is not beside the record")
        log = self.log(name)
        if isinstance(log, IncompleteError):
            return _finding(name, log)
        session = log.sessions.get(number)
        if session is None:
            return Finding(Kind.LOG_CUT, f"{name} has no session {number}")
        return session, log.facts

    def sessions_of(self, trajectory_id: str) -> list[tuple[str, LoggedSession, dict[str, Any]]]:
        """(place, session, facts of the engine) of every play of a trajectory that a readable log has, in order."""
        return self._by_trajectory.get(trajectory_id, [])

    @cached_property
    def _by_trajectory(self) -> dict[str, list[tuple[str, LoggedSession, dict[str, Any]]]]:
        found: dict[str, list[tuple[str, LoggedSession, dict[str, Any]]]] = {}
        for log in self._readable():
            for number, session in log.sessions.items():
                place = f"session {number} of {log.path.name}"
                found.setdefault(session.trajectory, []).append((place, session, log.facts))
        return found

    def _readable(self) -> Iterator[ExchangeFile]:
        return (log for log in map(self.log, self.names()) if isinstance(log, ExchangeFile))

    def names(self) -> list[str]:
        """Of the logs; none where the directory can't be read, which is said by whoever lists the records."""
        try:
            return log_names(self.directory)
        except OSError:
            return []

    def file_findings(self, *, sealed: bool) -> list[Finding]:
        """What is wrong with the logs as files. One without its end is wrong where the records are sealed."""
        found = []
        for name in self.names():
            log = self.log(name)
            if isinstance(log, IncompleteError):
                found.append(_finding(name, log))
            elif sealed and not log.sealed:
                found.append(Finding(Kind.LOG_CUT, f"{name} ends after {log.whole} bytes without its last frame"))
        return found

    def played(self) -> set[str]:
        """Ids of all trajectories that a readable log has a session of."""
        return {session.trajectory for log in self._readable() for session in log.sessions.values()}


def _finding(name: str, error: IncompleteError) -> Finding:
    """Of a log that couldn't be opened, or whose content is wrong."""
    kind = Kind.UNREADABLE if isinstance(error.__cause__, OSError) else Kind.LOG_DAMAGED
    return Finding(kind, f"{name}: {error.problem}")
