"""One foreign trajectory, however it was written down, and the record that it becomes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.importing.exchanges import ForeignTurn, require_exchanged
from megatron_t1.importing.values import COUNT_MAX, FLOAT32_MAX, read_json, shown
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import REFERENCE, ExchangeLog
from megatron_t1.trajectory.record import IMPORTED, Header, Origin, Trajectory, Verdict
from megatron_t1.trajectory.store import RolloutStore, check_id

END_REASON = "imported"
TURN_MAX = 2**16 - 1


@dataclass
class Foreign:
    """A trajectory of T tokens.

    Attributes:
        name: a plain file name; called: what it was made of (see `plain_name`), "" where that is the same.
        mask: bool [T], tokens to train on.
        logprobs: float32 [T], NaN where there is none; None: there are none at all (supervised data).
        routes: uint8 or uint16 [T, L, K]; routed: bool [T].
        turn: whole numbers [T]; None: a new turn with each run of sampled tokens.
        end_reason: why the episode ended, where that is known.
        untrusted: why its reward says nothing; "" where it does.
        exchanges: the requests that made it, where they are known; written as an exchange log.
        source: file (and line) it came from.
    """

    name: str
    task: str
    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray | None
    source: str
    routes: np.ndarray | None = None
    routed: np.ndarray | None = None
    turn: np.ndarray | None = None
    policy: int = 0
    reward: float | None = None
    passed: int | None = None
    total: int | None = None
    contract: SamplingContract | None = None
    end_reason: str = END_REASON
    untrusted: str = ""
    called: str = ""
    exchanges: list[ForeignTurn] = field(default_factory=list)

    def record(self) -> Trajectory:
        """The record. A token with a log-prob that the mask leaves out stays sampled, and is excluded from the loss.

        Raises:
            T1Error: fields of different lengths or out of range, a token to train on without a log-prob where others
                have one, exchanges that aren't those that made the ids; names the line and the field.
        """
        length = len(self.ids)
        for name in ("mask", "logprobs", "routes", "turn"):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise T1Error(f"{name} has {len(array)} entries for {length} ids", where=self.source)
        if not length or not self.mask.any():
            raise T1Error("the mask keeps no token", where=self.source, remedy="leave this trajectory out")
        logprobs = np.full(length, np.nan, np.float32) if self.logprobs is None else self.logprobs
        has = np.isfinite(logprobs)
        if self.mask[0] or has[0]:
            raise T1Error(
                "token 0 counts as sampled (mask, logprobs), but nothing precedes it that could predict it",
                where=self.source,
                remedy="give the prompt as well; a beginning-of-sequence token has mask 0 and log-prob null",
            )
        if self.logprobs is not None and (missing := np.flatnonzero(self.mask & ~has)).size:
            raise T1Error(
                f"token {missing[0]} is to be trained on, but has no log-probability",
                where=self.source,
                remedy="give one for every such token, or none at all (supervised data)",
            )
        generated = self.mask | has
        origin = np.full(length, Origin.ENVIRONMENT, np.uint8)
        origin[: int(generated.argmax())] = Origin.PROMPT
        origin[generated] = Origin.DEMONSTRATION if self.logprobs is None else Origin.SAMPLED
        excluded = has & ~self.mask
        turn = self._turn(generated)
        verdict, reward = self._verdict()
        try:
            record = self._build(origin, turn, logprobs, excluded, verdict, reward)
        except T1Error as error:
            raise T1Error(
                error.problem, where=self.source, remedy="correct it, or leave this trajectory out"
            ) from error
        if self.exchanges:
            require_exchanged(record, self.exchanges, self.source)
        return record

    def _build(
        self,
        origin: np.ndarray,
        turn: np.ndarray,
        logprobs: np.ndarray,
        excluded: np.ndarray,
        verdict: Verdict | None,
        reward: dict[str, float],
    ) -> Trajectory:
        return Trajectory(
            header=Header(
                trajectory_id=self.name,
                task=self.task,
                attempt=0,
                iteration=0,
                policy_versions=(self.policy,) * (int(turn[-1]) + 1) if self.logprobs is not None else (),
                end_reason=self.end_reason,
                verdict=verdict,
                reward=reward,
                contract=self.contract,
                extra={IMPORTED: self.source},
            ),
            ids=self.ids,
            origin=origin,
            turn=turn,
            logprobs=logprobs,
            routes=self.routes,
            routed=np.zeros(len(self.ids), bool) if self.routed is None else self.routed,
            excluded=excluded if excluded.any() else None,
        )

    def _turn(self, generated: np.ndarray) -> np.ndarray:
        """uint16 [T]: as given; else a new turn with each run of generated tokens, what follows belonging to it."""
        begins = generated & ~np.concatenate([[False], generated[:-1]])
        turn = np.maximum(np.cumsum(begins) - 1, 0) if self.turn is None else self.turn
        if (beyond := np.flatnonzero(turn > TURN_MAX)).size:
            at = int(beyond[0])
            raise T1Error(f"turn of token {at} is {turn[at]}, a record holds up to {TURN_MAX}", where=self.source)
        return turn.astype(np.uint16)

    def _verdict(self) -> tuple[Verdict | None, dict[str, float]]:
        if (self.passed is None) != (self.total is None):
            raise T1Error(
                f"passed is {self.passed} and total is {self.total}", where=self.source, remedy="give both, or neither"
            )
        if self.passed is not None and self.total is not None and self.passed > self.total:
            raise T1Error(f"passed is {self.passed}, of a total of {self.total}", where=self.source)
        if self.untrusted:
            return Verdict(self.passed or 0, self.total or 0, baseline=-1, trusted=False, reason=self.untrusted), {}
        if self.passed is None and self.reward is None:
            return None, {}
        verdict = Verdict(self.passed or 0, self.total or 0, baseline=-1, trusted=True)
        return verdict, {} if self.reward is None else {"total": float(self.reward)}


def write(foreign: list[Foreign], out: str | Path, *, facts: dict[str, Any] | None = None) -> list[Trajectory]:
    """Store the records of `foreign` in `out`, sealed, with an exchange log of those whose requests are known.

    Raises:
        T1Error: a record can't be made, or another one of its name is there; nothing was written then.
    """
    records = [item.record() for item in foreign]
    store = RolloutStore(out)
    _require_names(foreign, records, store)
    log = ExchangeLog(out, facts=facts)
    try:
        records = _logged(records, foreign, log)
        store.add_many(records)
    except BaseException:
        log.path.unlink(missing_ok=True)
        raise
    return records


def _require_names(foreign: list[Foreign], records: list[Trajectory], store: RolloutStore) -> None:
    """Names that can be stored and are used once; the store may hold the same record, but none with a log.

    A record with a log can't be stored twice, as the second one would point to another log.
    """
    seen: dict[str, Foreign] = {}
    for item, record in zip(foreign, records, strict=True):
        try:
            check_id(item.name)
        except T1Error as error:
            raise T1Error(f"id: {error.problem}", where=item.source, remedy=error.remedy) from error
        other = seen.setdefault(item.name, item)
        if other is not item:
            both = f"the ids {other.called!r} and {item.called!r} both become the file name {item.name!r}"
            same = other.called == item.called
            raise T1Error(
                f"id: another trajectory is called {item.name!r} already" if same else f"id: {both}",
                where=f"{item.source}; the other one: {other.source}",
                remedy="ids must be unique; only letters, digits and ._=+@,- of them are kept",
            )
        if item.name in store and (item.exchanges or store.load(item.name).digest != record.digest):
            raise T1Error(
                f"id: another trajectory is called {item.name!r} already",
                where=f"{item.source}; the other one: {store.directory}",
                remedy="ids must be unique; use a fresh directory for another import",
            )


def _logged(records: list[Trajectory], foreign: list[Foreign], log: ExchangeLog) -> list[Trajectory]:
    """Write the exchange log; returns the records that point to their sessions in it."""
    records = list(records)
    with log:
        for index, item in enumerate(foreign):
            if item.exchanges:
                session = log.session(item.name, item.policy)
                for turn in item.exchanges:
                    session.add(
                        turn.prompt,
                        sampled=turn.sampled,
                        logprobs=turn.logprobs,
                        response_sha256=hashlib.sha256(turn.sampled.tobytes() + turn.logprobs.tobytes()).hexdigest(),
                        finish_reason="stop",
                        state={},
                        routes=turn.routes,
                    )
                records[index] = records[index].noting(**{REFERENCE: session.reference})
    return records


def plain_name(text: str) -> str:
    """A trajectory id made of any text."""
    name = re.sub(r"[^A-Za-z0-9._=+@,-]+", "_", text).strip("._") or "trajectory"
    return name if len(name) <= 160 else f"{name[:140]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read_contract(path: str | Path) -> SamplingContract:
    """A sampling contract from a JSON file with its fields. Raises T1Error naming what is missing or unknown."""
    raw = read_json(Path(path))
    return contract_of(raw, str(path))


def _require_kind(name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless a contract's field is of its type and, where it is a number, finite and not negative."""
    accepted = (int, float) if kind is float else kind
    good = isinstance(value, accepted) and not isinstance(value, bool)
    if good and kind in (int, float):
        good = 0 <= value <= (COUNT_MAX if kind is int else FLOAT32_MAX)
    if good and kind is tuple:
        good = all(type(stop) is int and 0 <= stop <= COUNT_MAX for stop in value)
    if not good:
        raise TypeError(f"{name} is {shown(value)}")


def contract_of(raw: Any, where: str) -> SamplingContract:
    try:
        contract = SamplingContract.from_json(raw)
        for name, kind in get_type_hints(SamplingContract).items():
            _require_kind(name, getattr(contract, name), get_origin(kind) or kind)
        return contract
    except (TypeError, KeyError, AttributeError) as error:
        raise T1Error(
            f"this is no sampling contract: {error}",
            where=where,
            remedy="`t1 inspect` shows the fields of one; docs/token-streams.md says what they mean",
        ) from error
