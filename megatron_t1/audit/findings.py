"""What can be wrong with a trajectory, or with the files of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a finding says. The first four are drift: training sees other tokens than the sampler did."""

    CHANGED = "changed token"
    INSERTED = "inserted token"
    MISSING = "missing token"
    REPLACED = "replaced tokens"
    NOT_SAMPLED = "trained on, but not sampled"
    NOT_TRAINED = "sampled, but not trained on"
    LAYOUT = "training's own layout disagrees with the record"
    LOGPROB = "log-probability"
    LOGPROB_MISSING = "log-probability missing"
    TURN = "turn table"
    POLICY = "policy version"
    ROUTES_MISSING = "routes missing"
    ROUTES_CHANGED = "routes changed"
    CONTRACT = "sampling contract"
    LOG_MISSING = "exchange log missing"
    LOG_FOREIGN = "exchange log of another trajectory"
    LOG_CUT = "exchange log cut"
    LOG_DAMAGED = "exchange log damaged"
    RESCORED = "another log-probability when scored again"
    RECORDED = "not as the run recorded it"
    NO_RECORD = "played, but without a record"
    DUPLICATE = "one id twice"
    UNREADABLE = "unreadable"


DRIFT = frozenset({Kind.CHANGED, Kind.INSERTED, Kind.MISSING, Kind.REPLACED})
MASK = frozenset({Kind.NOT_SAMPLED, Kind.NOT_TRAINED, Kind.LAYOUT})
LOGPROBS = frozenset({Kind.LOGPROB, Kind.LOGPROB_MISSING, Kind.RESCORED})
ROUTES = frozenset({Kind.ROUTES_MISSING, Kind.ROUTES_CHANGED})
CONTRACT = frozenset({Kind.CONTRACT, Kind.POLICY, Kind.TURN})
LOGS = frozenset({Kind.LOG_MISSING, Kind.LOG_FOREIGN, Kind.LOG_CUT, Kind.LOG_DAMAGED})
EVIDENCE = LOGS | {Kind.RECORDED, Kind.NO_RECORD, Kind.DUPLICATE, Kind.UNREADABLE}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        token: position in the record of the first token concerned; None: the whole trajectory.
        tokens: how many are concerned; 0 where it isn't about tokens.
        loss_tokens: of those, tokens that carry loss or were sampled.
    """

    kind: Kind
    detail: str
    token: int | None = None
    turn: int | None = None
    tokens: int = 0
    loss_tokens: int = 0

    def __str__(self) -> str:
        places = [f"{name} {at}" for name, at in (("turn", self.turn), ("token", self.token)) if at is not None]
        return f"{self.kind}{' at ' if places else ''}{', '.join(places)}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class TrajectoryAudit:
    """What was found about one trajectory.

    Attributes:
        proven: whether it was compared with an exchange log.
        excluded: sampled tokens that the record itself keeps out of the loss.
        unseen: tokens after the last sampled one, which the engine never saw.
        trained: why PPO leaves it out ("" : it trains on it).
    """

    trajectory: str
    digest: str = ""
    turns: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    excluded: int = 0
    unseen: int = 0
    proven: bool = False
    trained: str = ""
    findings: list[Finding] = field(default_factory=list)

    def count(self, kinds: Iterable[Kind]) -> int:
        """Tokens concerned by findings of these kinds; a finding that is not about tokens counts as one."""
        return sum(max(1, finding.tokens) for finding in self.findings if finding.kind in kinds)

    @property
    def drift_in_loss(self) -> int:
        return sum(finding.loss_tokens for finding in self.findings if finding.kind in DRIFT)

    @property
    def drift_outside(self) -> int:
        return sum(finding.tokens - finding.loss_tokens for finding in self.findings if finding.kind in DRIFT)

    @property
    def status(self) -> str:
        if self.findings:
            return "wrong"
        return "clean" if self.proven else "unproven"
