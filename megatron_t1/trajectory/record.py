"""One trajectory: everything known about an episode, one row per token. Needs numpy only.

Shapes: T tokens of the stream, L MoE layers (in global layer order), K experts per token.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory import tensorfile
from megatron_t1.trajectory.contract import CONTRACT_SHAPE, SamplingContract
from megatron_t1.trajectory.typed import anything, check, integer, nothing, number, text, truth
from megatron_t1.trajectory.validation import FIELD_DTYPES, OPTIONAL_FIELDS, validate

SCHEMA_VERSION = 2  # 1 has no `excluded`
READABLE_SCHEMAS = (1, 2)
RECORD_FORMAT = "megatron-t1 trajectory"
FIELDS = tuple(FIELD_DTYPES)
DIGEST_LENGTH = 64  # SHA-256 in hexadecimal
IMPORTED = "imported"  # key of Header.extra: the file that `t1 import` made the record of
NOT_REACHED = "not reached"  # status of a check whose step was never begun

VERDICT_SHAPE = {
    "passed": integer,
    "total": integer,
    "baseline": integer,
    "trusted": truth,
    "reason?": text,
    "checks?": {None: truth},
    "statuses?": {None: text},
    "source?": text,
    "rewards?": {None: number},
    "step_share?": number,
}
STEP_SHAPE = {"name": text, "turns": integer, "end_reason": text, "verdict": (nothing, VERDICT_SHAPE)}
HEADER_SHAPE = {
    "trajectory_id": text,
    "task": text,
    "attempt": integer,
    "iteration": integer,
    "policy_versions": [integer],
    "end_reason": text,
    "verdict": (nothing, {None: anything}),
    "reward": {None: number},
    "contract": (nothing, {None: anything}),
    "counts?": {None: number},
    "timings_s?": {None: number},
    "extra?": {None: anything},
    "steps?": [STEP_SHAPE],
    "schema?": integer,
}


class Origin(IntEnum):
    """Where a token of the stream came from. Only SAMPLED and DEMONSTRATION tokens are trained on."""

    PROMPT = 0
    SAMPLED = 1
    DEMONSTRATION = 2  # an answer written by a scripted policy: trained on by SFT, has no log-prob
    ENVIRONMENT = 3
    REPAIR = 4  # a boundary token nobody sampled


class EndReason:
    """Why an episode ended (typed, never inferred from the reward)."""

    SUBMITTED = "submitted"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    AGENT_TIMEOUT = "agent_timeout"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_LOST = "engine_lost"
    FORMAT_ERROR = "format_error"  # the agent wrote several turns in a row that are no command
    CONVERSATION_REFUSED = "conversation_refused"  # its chat format can't continue the stream token by token
    MIN_REWARD = "min_reward"  # a step earned less than the task asks for before the next one
    STEP_NOT_READY = "step_not_ready"  # a step's setup.sh or healthcheck failed before its first turn

    LOST = (SANDBOX_LOST, ENGINE_LOST)  # the infrastructure failed: says nothing about the policy
    OF_STEPS = (MIN_REWARD, STEP_NOT_READY)  # of tasks of several steps alone
    ALL = (SUBMITTED, TURN_LIMIT, TOKEN_LIMIT, AGENT_TIMEOUT, FORMAT_ERROR, CONVERSATION_REFUSED, *OF_STEPS, *LOST)


@dataclass(frozen=True)
class Verdict:
    """What the task's own verifier said. Untrusted is not zero: such a trajectory is excluded and counted."""

    passed: int
    total: int
    baseline: int  # checks that pass when nothing is done; -1 unknown
    trusted: bool
    reason: str = ""  # why it isn't trusted
    checks: dict[str, bool] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)  # of checks that neither passed nor failed: skipped, ...
    source: str = ""  # name of the file that counted them
    rewards: dict[str, float] = field(default_factory=dict)  # the task's own, where it gave any: graded scores
    step_share: float | None = None  # of a task of several steps: mean share of checks over the steps that count

    @property
    def solved(self) -> bool:
        return self.trusted and self.total > 0 and self.passed == self.total

    @property
    def score(self) -> float:
        """From 0 to 1: the task's own mean reward where it gave one, else the share of checks; NaN when untrusted."""
        if not self.trusted:
            return float("nan")
        if self.rewards:
            return sum(self.rewards.values()) / len(self.rewards)
        return self.share

    @property
    def share(self) -> float:
        """Of the checks, those that pass; of several steps each counts as much, however many checks it has."""
        if self.step_share is not None:
            return self.step_share
        return self.passed / self.total if self.total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Optional fields are left out while they are empty: a record's digest depends only on what it states."""
        raw = {name: value for name, value in self.__dict__.items() if value is not None}
        return {name: value for name, value in raw.items() if value or name not in ("statuses", "source", "rewards")}


@dataclass(frozen=True)
class StepOutcome:
    """What became of one step of a task of several.

    Attributes:
        turns: assistant turns that were played in it.
        end_reason: why its agent stopped (`EndReason`); "" for a step that was not reached.
        verdict: of its own tests, with the names of the checks as they give them; None: not reached, or not verified.
    """

    name: str
    turns: int = 0
    end_reason: str = ""
    verdict: Verdict | None = None

    @property
    def reached(self) -> bool:
        return bool(self.end_reason)

    def describe(self) -> str:
        """One line for people."""
        if not self.reached:
            return f"{self.name}: {NOT_REACHED}"
        found = "not verified" if self.verdict is None else f"{self.verdict.passed} of {self.verdict.total} checks"
        if self.verdict is not None and not self.verdict.trusted:
            found = f"not trusted: {self.verdict.reason}"
        return f"{self.name}: {self.turns} turns, {self.end_reason}, {found}"

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "verdict": None if self.verdict is None else self.verdict.to_json()}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> StepOutcome:
        return cls(**{**raw, "verdict": None if raw["verdict"] is None else Verdict(**raw["verdict"])})


@dataclass(frozen=True)
class Header:
    trajectory_id: str  # unique in its store: "<task>-<attempt>"
    task: str
    attempt: int
    iteration: int
    policy_versions: tuple[int, ...]  # one for each assistant turn
    end_reason: str
    verdict: Verdict | None  # None: a demonstration, or not verified
    reward: dict[str, float]  # components; "total" is what training uses; empty when there is no trusted verdict
    contract: SamplingContract | None  # None: demonstrations
    counts: dict[str, int] = field(default_factory=dict)  # format_errors, commands, command_timeouts, ...
    timings_s: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    steps: tuple[StepOutcome, ...] = ()  # in the task's order; empty for a task of one instruction
    schema: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        raw = dict(self.__dict__)
        if self.steps:
            raw["steps"] = [step.to_json() for step in self.steps]
        else:
            del raw["steps"]
        raw["verdict"] = None if self.verdict is None else self.verdict.to_json()
        raw["contract"] = None if self.contract is None else self.contract.to_json()
        raw["policy_versions"] = list(self.policy_versions)
        return raw

    @classmethod
    def from_json(cls, raw: Any) -> Header:
        """Raises ValueError, naming the field, for JSON of another shape; values are taken as they are."""
        check(raw, HEADER_SHAPE, "header")
        for name, shape in (("verdict", VERDICT_SHAPE), ("contract", CONTRACT_SHAPE)):
            if raw[name] is not None:
                check(raw[name], shape, f"header.{name}")
        verdict, contract = raw["verdict"], raw["contract"]
        return cls(
            **{
                **raw,
                "policy_versions": tuple(raw["policy_versions"]),
                "verdict": None if verdict is None else Verdict(**verdict),
                "steps": tuple(map(StepOutcome.from_json, raw.get("steps", ()))),
                "contract": None if contract is None else SamplingContract.from_json(contract),
            }
        )


@dataclass(frozen=True)
class Trajectory:
    """An immutable record; building one validates it.

    Attributes:
        ids: int32 [T], the stream exactly as the sampler saw and produced it.
        origin: uint8 [T], `Origin` of each token.
        turn: uint16 [T], assistant turn the token belongs to (prompt: 0; a reply belongs to the turn it answers).
        logprobs: float32 [T], the sampler's log-probability where origin is SAMPLED, NaN elsewhere.
        routes: uint8 or uint16 [T, L, K], experts taken; None when routes were not recorded.
        routed: bool [T], whether the row of `routes` was recorded (the very last token's never is).
        excluded: bool [T], sampled or demonstrated tokens that carry no loss all the same (an import's own mask); None:
            none are.

    Arrays are held as read-only views, without a copy.

    Raises (at construction):
        T1Error: a wrong dtype or length, or fields that contradict each other; names the field and the token.
    """

    header: Header
    ids: np.ndarray
    origin: np.ndarray
    turn: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray | None
    routed: np.ndarray
    excluded: np.ndarray | None = None

    def __post_init__(self) -> None:
        validate(self)
        for name, array in self.arrays().items():
            if array.flags.writeable:
                view = array.view()
                view.flags.writeable = False
                object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]: tokens that carry loss. Derived from origin and exclusions, never stored."""
        mask = (self.origin == Origin.SAMPLED) | (self.origin == Origin.DEMONSTRATION)
        return mask if self.excluded is None else mask & ~self.excluded

    @cached_property
    def digest(self) -> str:
        """SHA-256 over header and arrays: the key under which sidecars (values, advantages) refer to this record."""
        state = hashlib.sha256(dump(self.header.to_json()).encode())
        for name, array in self.arrays().items():
            state.update(f"{name} {array.dtype.str} {array.shape}".encode())
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def arrays(self) -> dict[str, np.ndarray]:
        found = {name: getattr(self, name) for name in FIELDS}
        return {name: array for name, array in found.items() if array is not None}

    def noting(self, **extra: Any) -> Trajectory:
        """The same record with more in its header's `extra`."""
        return replace(self, header=replace(self.header, extra={**self.header.extra, **extra}))

    def truncated(self, length: int) -> Trajectory:
        """The first `length` tokens (at least 1); every token-aligned field is cut together (verifiers#1394)."""
        if not 1 <= length <= len(self):
            raise ValueError(f"can't cut {len(self)} tokens to {length}")
        cut = {name: array[:length] for name, array in self.arrays().items()}
        versions = self.header.policy_versions[: int(self.turn[length - 1]) + 1]
        return replace(self, header=replace(self.header, policy_versions=versions), **cut)


def save(trajectory: Trajectory, path: str | Path) -> None:
    """Write one record as a safetensors file that is complete or absent; its digest is taken while it is written.

    Raises:
        T1Error: the file can't be written (disk full, ...).
    """
    metadata = {
        "format": RECORD_FORMAT,
        "schema": str(SCHEMA_VERSION),
        "header": dump(trajectory.header.to_json()),
    }
    tensorfile.write_describing(
        path, trajectory.arrays(), metadata, "digest", lambda: trajectory.digest, length=DIGEST_LENGTH
    )


def load(path: str | Path, *, verify: bool = False) -> Trajectory:
    """Read a record; its arrays are views of the mapped file.

    Args:
        verify: recompute the digest from the content and compare it with the one the writer stored.

    Raises:
        IncompleteError: truncated, not a record, or (`verify`) changed since it was written.
        T1Error: another schema version, or fields that contradict each other.
    """
    file = _open(path)
    return assemble(json_header(file), file.metadata.get("digest", ""), file, prefix="", where=str(path), verify=verify)


def load_header(path: str | Path) -> Header:
    """The header of a record file, without reading its arrays. Raises as `load`."""
    return parse_header(json_header(_open(path)), where=str(path))


def assemble(
    header: Any, digest: str, file: tensorfile.TensorFile, *, prefix: str, where: str, verify: bool
) -> Trajectory:
    """Build the record whose arrays are called `prefix` + field in `file`. Raises as `load`."""
    parsed = parse_header(header, where=where)
    arrays = {name: file[prefix + name] for name in FIELDS if prefix + name in file.entries}
    missing = [name for name in FIELDS if name not in arrays and name not in OPTIONAL_FIELDS]
    if missing:
        raise IncompleteError(f"the record lacks the field(s) {', '.join(missing)}", where=where)
    try:
        trajectory = Trajectory(header=parsed, **{"routes": None, **arrays})
    except T1Error as error:
        raise type(error)(error.problem, where=f"{where}, {error.where}", remedy=error.remedy) from error
    if not _is_digest(digest):
        raise IncompleteError(
            "the record carries no digest", where=where, remedy="write it with trajectory.record.save"
        )
    if verify and trajectory.digest != digest:
        raise IncompleteError(
            f"the content's digest is {trajectory.digest[:16]}..., the writer's was {digest[:16]}...",
            where=where,
            remedy="the file was changed after it was written; restore it or make the trajectory again",
        )
    trajectory.__dict__["digest"] = digest  # fills the cached property: hashing gigabytes of routes again costs seconds
    return trajectory


def _open(path: str | Path) -> tensorfile.TensorFile:
    file = tensorfile.TensorFile(path)
    require_format(file, RECORD_FORMAT)
    return file


def require_format(file: tensorfile.TensorFile, expected: str) -> None:
    """Raise T1Error unless `file` says it is of this format and of a schema version this code reads."""
    found, schema = file.metadata.get("format"), file.metadata.get("schema")
    if found != expected:
        raise IncompleteError(
            f"this file is {found or 'of unknown format'!r}, expected {expected!r}", where=str(file.path)
        )
    if schema not in map(str, READABLE_SCHEMAS):
        known = " and ".join(map(str, READABLE_SCHEMAS))
        raise T1Error(
            f"the file has schema version {schema!r}, this version of megatron-t1 reads {known}",
            where=str(file.path),
            remedy="read it with the version of megatron-t1 that wrote it",
        )


def json_header(file: tensorfile.TensorFile, key: str = "header") -> Any:
    """The JSON value stored under `key` of the file's metadata."""
    try:
        return json.loads(file.metadata[key])
    except (KeyError, ValueError, RecursionError) as error:
        raise IncompleteError(f"the file has no readable {key!r} entry ({error})", where=str(file.path)) from error


def parse_header(raw: Any, *, where: str) -> Header:
    """`Header.from_json` for JSON from outside: what doesn't fit becomes an IncompleteError."""
    try:
        return Header.from_json(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncompleteError(f"the header doesn't fit the schema: {error}", where=where) from error


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == DIGEST_LENGTH and set(text) <= set("0123456789abcdef")


def dump(value: Any) -> str:
    """Compact JSON with sorted keys; numpy scalars, which counters and rewards easily are, count as numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=lambda item: item.item())
