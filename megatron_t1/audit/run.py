"""The audit of many trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1.audit.compare import compare, compare_unpointed, contract_findings, describe
from megatron_t1.audit.evidence import Evidence
from megatron_t1.audit.findings import CONTRACT, DRIFT, EVIDENCE, LOGPROBS, MASK, ROUTES, Finding, Kind, TrajectoryAudit
from megatron_t1.audit.targets import Target
from megatron_t1.audit.view import TrainedView, trained_views
from megatron_t1.errors import T1Error
from megatron_t1.phase import SMALL_BYTES, missing_outputs
from megatron_t1.regular import sha256_regular
from megatron_t1.trajectory.record import IMPORTED, Trajectory
from megatron_t1.trajectory.store import SUFFIX

BATCH_TOKENS = 65536  # trajectories are laid out together, as in training, up to about this many tokens
LONG_TURNS = 300
SHOWN_NAMES = 5
CLEAN, WRONG, UNREADABLE = 0, 1, 2  # exit statuses
GROUPS = {"mask": MASK, "logprobs": LOGPROBS, "routes": ROUTES, "contract": CONTRACT, "evidence": EVIDENCE}

Visitor = Callable[[Trajectory, TrajectoryAudit], None]


@dataclass
class TargetAudit:
    """What was found about one target: its trajectories, and its files."""

    target: Target
    trajectories: list[TrajectoryAudit] = field(default_factory=list)
    files: list[Finding] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)  # path, size, sha256; or path, unreadable

    def totals(self) -> dict[str, int]:
        """Sums over the trajectories, by what the report calls them."""
        audits = self.trajectories
        counts = {
            "trajectories": len(audits),
            "clean": sum(audit.status == "clean" for audit in audits),
            "unproven": sum(audit.status == "unproven" for audit in audits),
            "wrong": sum(audit.status == "wrong" for audit in audits),
            "unreadable": sum(audit.count({Kind.UNREADABLE}) for audit in audits)
            + sum(finding.kind == Kind.UNREADABLE for finding in self.files),
            "left_out_of_training": sum(bool(audit.trained) for audit in audits),
            "long": sum(audit.turns > LONG_TURNS for audit in audits),
            "most_turns": max((audit.turns for audit in audits), default=0),
            "turns": sum(audit.turns for audit in audits),
            "tokens": sum(audit.tokens for audit in audits),
            "loss_tokens": sum(audit.loss_tokens for audit in audits),
            "drift_in_loss": sum(audit.drift_in_loss for audit in audits),
            "drift_outside": sum(audit.drift_outside for audit in audits),
            "drifted_trajectories": sum(audit.count(DRIFT) > 0 for audit in audits),
        }
        for name, kinds in GROUPS.items():
            counts[name] = sum(audit.count(kinds) for audit in audits)
        counts["evidence"] += len(self.files)
        return counts


def audit_target(target: Target, *, visit: Visitor | None = None) -> TargetAudit:
    """Audit every record of a target.

    Args:
        visit: called with each readable record and what was found, while its arrays are at hand.
    """
    result = TargetAudit(target)
    # Asked before the records are listed: what is sealed later may hold some that weren't there yet.
    sealed = target.is_sealed
    evidence = Evidence(target.directory)
    expected = target.expected()
    for batch in _batches(target.records()):
        readable = [item for item in batch if isinstance(item[1], Trajectory)]
        views = dict(
            zip(
                (name for name, _ in readable),
                trained_views([record for _, record in readable], context_size=target.context_size) if readable else (),
                strict=True,
            )
        )
        for name, record in batch:
            if isinstance(record, T1Error):
                result.trajectories.append(
                    TrajectoryAudit(name, findings=[Finding(Kind.UNREADABLE, _one_line(record))])
                )
                continue
            audit = _audit(record, views[name], evidence, expected, target.policy)
            if visit is not None:
                visit(record, audit)
            result.trajectories.append(audit)
    result.inputs = [_input(path) for path in target.files()]
    unclear = [*target.unreadable(), *target.duplicates()]
    result.files = [*target.problems, *unclear, *_recorded(target, result.inputs)]
    if target.file is None:
        result.files += evidence.file_findings(sealed=sealed)
        if sealed and not unclear:  # nobody knows whose records are in a file that can't be read
            result.files += _unrecorded_plays(evidence.played() - {audit.trajectory for audit in result.trajectories})
    return result


def _recorded(target: Target, inputs: list[dict[str, Any]]) -> list[Finding]:
    """The files against what the phase that wrote them recorded: names, sizes, SHA-256, and no record more."""
    if target.result is None:
        return []
    assert target.root is not None
    lines = missing_outputs(target.result, target.root)
    recorded = {Path(file.path).name: file for file in target.result.outputs}
    for item in inputs:
        name = Path(item["path"]).name
        known = recorded.get(name)
        if known is None and name.endswith(SUFFIX):
            lines.append(f"{target.directory.parent.name}/{target.directory.name}/{name}: nobody recorded this file")
        elif known is not None and item.get("size") == known.size > SMALL_BYTES and item.get("sha256") != known.sha256:
            lines.append(f"{known.path}: its SHA-256 is another one than was recorded")
    return [Finding(Kind.RECORDED, line) for line in lines]


def _unrecorded_plays(names: set[str]) -> list[Finding]:
    """Of episodes whose exchange was logged. A play that was repeated has the record of the later one."""
    if not names:
        return []
    shown = ", ".join(sorted(names)[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
    return [Finding(Kind.NO_RECORD, f"{len(names)} episodes are in the exchange log only: {shown}")]


def _audit(
    record: Trajectory, view: TrainedView, evidence: Evidence, expected: dict[str, Any], policy: int | None
) -> TrajectoryAudit:
    found = evidence.session(record.header)
    if found is None:
        audit = compare_unpointed(record, view, evidence) or describe(record, view)
    elif isinstance(found, Finding):
        audit = describe(record, view)
        audit.findings.append(found)
    else:
        audit = compare(record, view, *found)
    audit.findings += contract_findings(record.header, [expected], "the run's configuration")
    others = sorted({version for version in record.header.policy_versions if version != policy})
    if policy is not None and others and IMPORTED not in record.header.extra:
        detail = f"the record says {', '.join(map(str, others))}, the run's iteration {policy}"
        audit.findings.append(Finding(Kind.POLICY, detail))
    return audit


def exit_status(audits: Iterable[TargetAudit]) -> int:
    """1 when anything is wrong, 2 when the only thing wrong is that something can't be read, 0 otherwise."""
    status = CLEAN
    for audit in audits:
        kinds = {finding.kind for found in audit.trajectories for finding in found.findings}
        kinds |= {finding.kind for finding in audit.files}
        if kinds - {Kind.UNREADABLE}:
            return WRONG
        if kinds:
            status = UNREADABLE
    return status


def _batches(records: Iterator[tuple[str, Trajectory | T1Error]]) -> Iterator[list[tuple[str, Trajectory | T1Error]]]:
    batch, tokens = [], 0
    for name, record in records:
        batch.append((name, record))
        tokens += len(record) if isinstance(record, Trajectory) else 0
        if tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _input(path: Path) -> dict[str, Any]:
    try:
        return {"path": str(path), "size": path.stat().st_size, "sha256": sha256_regular(path)}
    except OSError as error:  # what can't be opened is a finding of whoever needed it
        return {"path": str(path), "unreadable": error.strerror or str(error)}


def _one_line(error: T1Error) -> str:
    return " ".join(str(error.problem).split())
