"""One foreign trajectory, however it was written down, and the record that it becomes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import REFERENCE, ExchangeLog
from megatron_t1.trajectory.record import IMPORTED, Header, Origin, Trajectory, Verdict
from megatron_t1.trajectory.store import RolloutStore

END_REASON = "imported"


@dataclass(frozen=True)
class ForeignTurn:
    """One request and its answer as somebody else recorded it."""

    prompt: np.ndarray  # int32 [P], everything that was sent
    sampled: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]


@dataclass
class Foreign:
    """A trajectory of T tokens.

    Attributes:
        mask: bool [T], tokens to train on.
        logprobs: float32 [T], NaN where there is none; None: there are none at all (supervised data).
        routes: uint8 or uint16 [T, L, K]; routed: bool [T].
        turn: uint16 [T]; None: a new turn with each run of sampled tokens.
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
    exchanges: list[ForeignTurn] = field(default_factory=list)

    def record(self) -> Trajectory:
        """The record. A token with a log-prob that the mask leaves out stays sampled, and is excluded from the loss.

        Raises:
            T1Error: fields of different lengths, or a token to train on without a log-prob where others have one.
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
        turn = _turns(generated) if self.turn is None else self.turn
        verdict, reward = self._verdict()
        return Trajectory(
            header=Header(
                trajectory_id=self.name,
                task=self.task,
                attempt=0,
                iteration=0,
                policy_versions=(self.policy,) * (int(turn[-1]) + 1) if self.logprobs is not None else (),
                end_reason=END_REASON,
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
            routed=np.zeros(length, bool) if self.routed is None else self.routed,
            excluded=excluded if excluded.any() else None,
        )

    def _verdict(self) -> tuple[Verdict | None, dict[str, float]]:
        if self.passed is None and self.reward is None:
            return None, {}
        verdict = Verdict(self.passed or 0, self.total or 0, baseline=-1, trusted=True)
        return verdict, {} if self.reward is None else {"total": float(self.reward)}


def write(foreign: list[Foreign], out: str | Path, *, facts: dict[str, Any] | None = None) -> list[Trajectory]:
    """Store the records of `foreign` in `out`, sealed, with an exchange log of those whose requests are known.

    Raises:
        T1Error: a record can't be made, or another one of its name is there.
    """
    records = [item.record() for item in foreign]
    with ExchangeLog(out, facts=facts) as log:
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
                    )
                records[index] = records[index].noting(**{REFERENCE: session.reference})
    RolloutStore(out).add_many(records)
    return records


def _turns(generated: np.ndarray) -> np.ndarray:
    """uint16 [T]: a new turn begins with each run of generated tokens; what follows belongs to it."""
    begins = generated & ~np.concatenate([[False], generated[:-1]])
    return np.maximum(np.cumsum(begins) - 1, 0).astype(np.uint16)


def plain_name(text: str) -> str:
    """A trajectory id made of any text."""
    name = re.sub(r"[^A-Za-z0-9._=+@,-]+", "_", text).strip("._") or "trajectory"
    return name if len(name) <= 160 else f"{name[:140]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def token_ids(values: Any, what: str, where: str) -> np.ndarray:
    """int32 [n]. Raises T1Error for anything but a list of token ids."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise T1Error(f"{what} is not a list of token ids", where=where)
    return np.array(values, np.int32)


def numbers(values: Any, what: str, where: str) -> np.ndarray:
    """float32 [n], None becoming NaN. Raises T1Error for anything but a list of numbers and nulls."""
    good = isinstance(values, list) and all(value is None or type(value) in (int, float) for value in values)
    if not good:
        raise T1Error(f"{what} is not a list of numbers", where=where)
    return np.array([np.nan if value is None else value for value in values], np.float32)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise T1Error(f"can't be read as JSON: {error}", where=str(path)) from error


def read_contract(path: str | Path) -> SamplingContract:
    """A sampling contract from a JSON file with its fields. Raises T1Error naming what is missing or unknown."""
    raw = read_json(Path(path))
    return contract_of(raw, str(path))


def contract_of(raw: Any, where: str) -> SamplingContract:
    try:
        return SamplingContract.from_json(raw)
    except (TypeError, KeyError, AttributeError) as error:
        raise T1Error(
            f"this is no sampling contract: {error}",
            where=where,
            remedy="`t1 inspect` shows the fields of one; docs/token-streams.md says what they mean",
        ) from error
