"""One trajectory as training sees it, against what the engine saw and produced, token by token.

The two sides reach the tokens by different ways: one is the record, which the token stream made, read through packing
and layout; the other is rebuilt from the client's log of requests and answers. T tokens are in the record, T' were
exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_t1.audit.evidence import Evidence
from megatron_t1.audit.findings import Finding, Kind, TrajectoryAudit
from megatron_t1.audit.view import TrainedView
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import common_prefix
from megatron_t1.trajectory.exchange_reader import Exchanged, LoggedSession, rebuild
from megatron_t1.trajectory.record import IMPORTED, Header, Origin, Trajectory
from megatron_t1.trajectory.selection import trainable
from megatron_t1.trajectory.views import tokens_before_last_loss

TEMPLATE = "template_sha256"  # of the chat template: key of Header.extra, of a log's facts, of what a run expects
CONTRACT_FIELDS = frozenset(field.name for field in fields(SamplingContract))


@dataclass(frozen=True)
class Alignment:
    """Which tokens of the record are which tokens of the exchange: two parts around a middle without counterpart.

    found[:start] belongs to expected[:start], found[found_stop:] to expected[expected_stop:], as far as both go.
    """

    start: int
    found_stop: int
    expected_stop: int

    def pairs(self, found_length: int, expected_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions in the record and in the exchange of all tokens that correspond, int64 [n] each."""
        tail = min(found_length - self.found_stop, expected_length - self.expected_stop)
        found = np.concatenate([np.arange(self.start), np.arange(self.found_stop, self.found_stop + tail)])
        expected = np.concatenate([np.arange(self.start), np.arange(self.expected_stop, self.expected_stop + tail)])
        return found, expected


def align(found: np.ndarray, expected: np.ndarray) -> Alignment:
    """Streams of one length correspond place by place; of others, the longest common prefix and then suffix do."""
    if len(found) == len(expected):
        return Alignment(len(found), len(found), len(found))
    start = common_prefix(found, expected)
    if start == len(expected):  # `found` only goes on
        return Alignment(start, start, start)
    suffix = common_prefix(found[start:][::-1], expected[start:][::-1])
    return Alignment(start, len(found) - suffix, len(expected) - suffix)


def compare(
    trajectory: Trajectory,
    view: TrainedView,
    session: LoggedSession,
    facts: Mapping[str, Any],
    *,
    routes: bool = True,
) -> TrajectoryAudit:
    """Everything that is wrong with one trajectory that has an exchange log.

    Args:
        facts: what the log states about the engine.
        routes: also compare rows of routes with the digests of what the engine returned.
    """
    audit = describe(trajectory, view)
    audit.proven = True
    if session.trajectory != trajectory.header.trajectory_id:
        audit.findings.append(Finding(Kind.LOG_FOREIGN, f"the session belongs to {session.trajectory!r}"))
    exchanged = rebuild(session)
    audit.findings += [Finding(Kind.LOG_DAMAGED, problem) for problem in exchanged.problems]
    alignment = align(view.ids, exchanged.ids)
    audit.unseen = max(0, len(view.ids) - alignment.found_stop - len(exchanged.ids) + alignment.expected_stop)
    audit.findings += _drift(view, exchanged, alignment, trajectory.turn)
    audit.findings += _tokens(trajectory, view, exchanged, alignment)
    audit.findings += _contract(trajectory, session, facts, exchanged)
    if routes:
        audit.findings += _routes(trajectory, exchanged, alignment)
    return audit


def compare_unpointed(
    trajectory: Trajectory, view: TrainedView, evidence: Evidence, *, routes: bool = True
) -> TrajectoryAudit | None:
    """Of a record that points to no session: with the one that a log beside it has all the same.

    Of several plays the one that fits best is taken. That the pointer is gone is a finding in itself, also where there
    is no such session, unless nothing was sampled or the record is an import.

    Returns:
        None where there is nothing to compare with, and nothing wrong with that.
    """
    header = trajectory.header
    known = evidence.sessions_of(header.trajectory_id)
    if known:
        found = [(place, compare(trajectory, view, session, facts, routes=routes)) for place, session, facts in known]
        place, audit = min(reversed(found), key=lambda item: len(item[1].findings))
        audit.findings.append(Finding(Kind.LOG_MISSING, f"the record points to none, though it is {place}"))
        return audit
    if IMPORTED in header.extra or not (trajectory.origin == Origin.SAMPLED).any():
        return None
    audit = describe(trajectory, view)
    audit.findings.append(Finding(Kind.LOG_MISSING, "the record points to none"))
    return audit


def describe(trajectory: Trajectory, view: TrainedView) -> TrajectoryAudit:
    """What the record alone can be checked for."""
    header = trajectory.header
    sampled = trajectory.origin == Origin.SAMPLED
    audit = TrajectoryAudit(
        header.trajectory_id,
        digest=trajectory.digest,
        turns=int(trajectory.turn[-1]) + 1 if trajectory.loss_mask.any() or sampled.any() else 0,
        tokens=len(trajectory),
        loss_tokens=len(view.loss_tokens),
        excluded=int((trajectory.loss_mask != (sampled | (trajectory.origin == Origin.DEMONSTRATION))).sum()),
        trained=trainable(trajectory) or "",
    )
    audit.findings += _layout(trajectory, view)
    audit.findings += _own_routes(trajectory)
    audit.findings += _coverage(trajectory)
    return audit


def _layout(trajectory: Trajectory, view: TrainedView) -> list[Finding]:
    """The packed batch says the same as the record: ids, mask, targets, log-probs."""
    mask = trajectory.loss_mask
    at = np.flatnonzero(mask)
    same = np.array_equal(view.ids, trajectory.ids) and np.array_equal(view.loss_tokens, at)
    same = same and np.array_equal(view.targets, trajectory.ids[at])
    if same and view.logprobs.tobytes() == trajectory.logprobs[at].tobytes():
        return []
    return [Finding(Kind.LAYOUT, "ids, mask, targets or log-probs of the packed batch aren't the record's")]


def _coverage(trajectory: Trajectory) -> list[Finding]:
    found = []
    loss = trajectory.loss_mask & (trajectory.origin == Origin.SAMPLED)
    missing = np.flatnonzero(loss & ~np.isfinite(trajectory.logprobs))
    if missing.size:
        found.append(_at(Kind.LOGPROB_MISSING, "sampled, but without one", trajectory.turn, missing, missing.size))
    if trajectory.routes is not None:
        missing = np.flatnonzero(~trajectory.routed[: tokens_before_last_loss(trajectory)])
        if missing.size:
            detail = f"{missing.size} tokens before the last trained one have no recorded row"
            found.append(_at(Kind.ROUTES_MISSING, detail, trajectory.turn, missing, int(loss[missing].sum())))
    return found


def _drift(view: TrainedView, exchanged: Exchanged, alignment: Alignment, turn: np.ndarray) -> list[Finding]:
    loss, found, expected = view.loss_mask, view.ids, exchanged.ids
    if len(found) == len(expected):
        wrong = np.flatnonzero(found != expected)
        if not wrong.size:
            return []
        detail = f"token id {found[wrong[0]]}, the engine had {expected[wrong[0]]}"
        return [_at(Kind.CHANGED, detail, turn, wrong, int((loss | exchanged.sampled)[wrong].sum()))]
    start, stop, expected_stop = alignment.start, alignment.found_stop, alignment.expected_stop
    findings = []
    if stop > start or expected_stop > start:
        kind = Kind.MISSING if stop == start else Kind.INSERTED if expected_stop == start else Kind.REPLACED
        detail = (
            f"{stop - start} tokens ({_few(found[start:stop])}) where the engine had {expected_stop - start} "
            f"({_few(expected[start:expected_stop])})"
        )
        in_loss = max(int(loss[start:stop].sum()), int(exchanged.sampled[start:expected_stop].sum()))
        size = max(stop, expected_stop) - start
        at = min(start, len(turn) - 1)
        findings.append(Finding(kind, detail, at, int(turn[at]), size, in_loss))
    beyond = stop + len(expected) - expected_stop
    unlogged = np.flatnonzero(loss[beyond:]) + beyond
    if unlogged.size:
        detail = f"{unlogged.size} tokens that carry loss have no exchange"
        findings.append(_at(Kind.LOG_CUT, detail, turn, unlogged, unlogged.size))
    return findings


def _tokens(trajectory: Trajectory, view: TrainedView, exchanged: Exchanged, alignment: Alignment) -> list[Finding]:
    """Mask, log-probs and turn numbers of the tokens that correspond."""
    at, was = alignment.pairs(len(view.ids), len(exchanged.ids))
    turn, findings = trajectory.turn, []
    loss, sampled = view.loss_mask[at], exchanged.sampled[was]
    # An import's own mask; no engine's client logs a turn without saying what it was sampled under.
    foreign = IMPORTED in trajectory.header.extra and not any(turn.state for turn in exchanged.turns)
    own_mask = trajectory.excluded is not None and foreign
    excluded = trajectory.excluded[at] if own_mask else np.zeros(len(at), bool)
    for kind, wrong in ((Kind.NOT_SAMPLED, loss & ~sampled), (Kind.NOT_TRAINED, sampled & ~loss & ~excluded)):
        if wrong.any():
            findings.append(_at(kind, f"{int(wrong.sum())} tokens", turn, at[wrong], int(wrong.sum())))
    used = np.full(len(view.ids), np.nan, np.float32)
    used[view.loss_tokens] = view.logprobs
    both = loss & sampled
    differs = both & (used[at].view(np.int32) != exchanged.logprobs[was].view(np.int32))
    if differs.any():
        first = int(np.flatnonzero(differs)[0])
        detail = f"{used[at[first]]}, the engine said {exchanged.logprobs[was[first]]}"
        findings.append(_at(Kind.LOGPROB, detail, turn, at[differs], int(differs.sum())))
    wrong = sampled & (turn[at] != exchanged.turn[was])
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        detail = f"turn {turn[at[first]]}, the engine's answer was turn {exchanged.turn[was[first]]}"
        findings.append(_at(Kind.TURN, detail, turn, at[wrong], int(wrong.sum())))
    return findings


def _contract(
    trajectory: Trajectory, session: LoggedSession, facts: Mapping[str, Any], exchanged: Exchanged
) -> list[Finding]:
    header, findings = trajectory.header, []
    wrong_policies = sorted({version for version in header.policy_versions if version != session.policy})
    if wrong_policies:
        detail = f"the record says {', '.join(map(str, wrong_policies))}, the log {session.policy}"
        findings.append(Finding(Kind.POLICY, detail))
    weights = sorted({turn.state["weights"] for turn in exchanged.turns if turn.state.get("weights")})
    if len(weights) > 1:
        findings.append(Finding(Kind.POLICY, f"the engine's weights changed: {', '.join(weights)}"))
    if header.contract is None:
        if exchanged.turns and IMPORTED not in header.extra:
            findings.append(Finding(Kind.CONTRACT, "sampled, but the record has none"))
        return findings
    states = [turn.state for turn in exchanged.turns]
    stated = [{name: value for name, value in facts.items() if name in CONTRACT_FIELDS and value}]
    stated += [{name: value for name, value in state.items() if name in CONTRACT_FIELDS} for state in states]
    if facts.get(TEMPLATE):
        stated.append({TEMPLATE: facts[TEMPLATE]})
    return findings + contract_findings(header, stated, "the engine")


def contract_findings(header: Header, stated: list[dict[str, Any]], who: str) -> list[Finding]:
    """One finding for each field of a record's contract of which somebody else states another value."""
    if header.contract is None:
        return []
    have, findings, seen = {**header.contract.to_json(), TEMPLATE: header.extra.get(TEMPLATE)}, [], set()
    if IMPORTED in header.extra:  # an import's contract may leave open what its source didn't say
        have = {name: value for name, value in have.items() if value not in (None, "", 0)}
    for values in stated:
        for name, value in values.items():
            value = list(value) if isinstance(value, tuple) else value
            if name in have and have[name] != value and name not in seen:
                seen.add(name)
                findings.append(Finding(Kind.CONTRACT, f"{name}: the record has {have[name]!r}, {who} {value!r}"))
    return findings


def _own_routes(trajectory: Trajectory) -> list[Finding]:
    """Routes that can't be of the model that the record's own contract describes."""
    contract, routes = trajectory.header.contract, trajectory.routes
    if contract is None or routes is None or (IMPORTED in trajectory.header.extra and not contract.num_experts):
        return []
    _, layers, top_k = routes.shape
    found = []
    for name, said, has in (("num_moe_layers", contract.num_moe_layers, layers), ("top_k", contract.top_k, top_k)):
        if said != has:
            found.append(Finding(Kind.CONTRACT, f"{name}: the record has {said}, its routes {has}"))
    rows = trajectory.routed
    beyond = np.flatnonzero(rows & (routes.max(axis=(1, 2)) >= contract.num_experts))
    if beyond.size:
        detail = f"num_experts: the record has {contract.num_experts}, its routes expert {int(routes[beyond[0]].max())}"
        loss = int(trajectory.loss_mask[beyond].sum())
        found.append(_at(Kind.CONTRACT, detail, trajectory.turn, beyond, loss))
    return found


def _routes(trajectory: Trajectory, exchanged: Exchanged, alignment: Alignment) -> list[Finding]:
    """Rows of the record against the digests of what came with each answer, as far as positions are the same."""
    answers = [turn for turn in exchanged.turns if turn.routes_start >= 0]
    if trajectory.routes is None:
        return [Finding(Kind.ROUTES_MISSING, "the engine returned routes, the record has none")] if answers else []
    if not answers and IMPORTED in trajectory.header.extra:  # its source gave them beside the exchanges
        return []
    findings, answered = [], np.zeros(len(trajectory), bool)
    for turn in answers:
        start, stop = turn.routes_start, turn.routes_start + turn.routes_rows
        answered[start:stop] = True
        if stop > alignment.start:
            break
        whole = hashlib.sha256(np.ascontiguousarray(trajectory.routes[start:stop])).hexdigest()
        if whole == turn.routes_sha256:
            continue
        # Of rows that came again the first recording stays; in bfloat16 the second may differ.
        new = start + turn.routes_overlap
        fresh = hashlib.sha256(np.ascontiguousarray(trajectory.routes[new:stop])).hexdigest()
        if turn.routes_overlap and fresh == turn.new_routes_sha256:
            continue
        detail = f"rows {new} to {stop - 1} aren't those that came with the answer"
        if new == stop:
            findings.append(Finding(Kind.ROUTES_CHANGED, detail))
            continue
        at = np.arange(new, stop)
        findings.append(_at(Kind.ROUTES_CHANGED, detail, trajectory.turn, at, int(exchanged.sampled[new:stop].sum())))
    made_up = np.flatnonzero(trajectory.routed & ~answered)
    known = len(exchanged.ids)
    if made_up.size and alignment.start >= known and not trajectory.loss_mask[known:].any():  # else the log was cut
        detail = f"{made_up.size} tokens have a row that came with no answer"
        loss = int(trajectory.loss_mask[made_up].sum())
        findings.append(_at(Kind.ROUTES_CHANGED, detail, trajectory.turn, made_up, loss))
    return findings


def _at(kind: Kind, detail: str, turn: np.ndarray, tokens: np.ndarray, loss_tokens: int) -> Finding:
    first = int(tokens[0])
    return Finding(kind, detail, first, int(turn[first]), len(tokens), int(loss_tokens))


def _few(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:5].tolist()))
    return shown + (", ..." if len(ids) > 5 else "")
