"""The cheap part of the audit, for whoever is about to use records: tokens, mask, log-probs, turns, contract.

Rows of routes are left out: whoever calls this has compared the files' SHA-256 with their writer's already, and routes
are validated against the model when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_t1.audit.compare import compare, compare_unpointed
from megatron_t1.audit.evidence import Evidence
from megatron_t1.audit.findings import Finding
from megatron_t1.audit.view import trained_views
from megatron_t1.errors import MismatchError
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.store import RolloutStore


def require_no_drift(directory: str | Path, *, part: int = 0, parts: int = 1) -> int:
    """Compare the records of a directory with their exchange logs; return how many have one.

    Imports without a log, and records of which nothing was sampled, are not compared. Any other record without a
    pointer to a log is refused.

    Args:
        part, parts: look at every `parts`-th record only, where several processes share the work.

    Raises:
        MismatchError: training would see something else than the sampler; names trajectory, turn and token.
        IncompleteError: a record can't be read.
    """
    store = RolloutStore(directory)
    return check_records((store.load(name) for name in store.ids()[part::parts]), Evidence(directory, verify=False))


def check_records(trajectories: Iterable[Trajectory], evidence: Evidence) -> int:
    """`require_no_drift` for records in hand and their evidence."""
    compared = 0
    for trajectory in trajectories:
        found = evidence.session(trajectory.header)
        if isinstance(found, Finding):
            raise _refused(found, evidence, trajectory)
        (view,) = trained_views([trajectory])
        if found is None:
            audit = compare_unpointed(trajectory, view, evidence, routes=False)
        else:
            audit = compare(trajectory, view, *found, routes=False)
        if audit is None:
            continue
        if audit.findings:
            raise _refused(audit.findings[0], evidence, trajectory)
        compared += 1
    return compared


def _refused(finding: Finding, evidence: Evidence, trajectory: Trajectory) -> MismatchError:
    return MismatchError(
        f"training would not see what the sampler saw and produced: {finding}",
        where=f"{evidence.directory}, trajectory {trajectory.header.trajectory_id}",
        remedy=f"`t1 audit {evidence.directory}` lists everything that is wrong; make the rollout again",
    )
