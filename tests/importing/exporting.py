"""A rollout as JSON lines with its exchanges: what somebody else would hand over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.audit.evidence import Evidence
from megatron_t1.trajectory.exchange_reader import LoggedSession
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.store import RolloutStore


def export(directory: Path, path: Path) -> int:
    """Write the records of a directory to a file; returns how many."""
    evidence = Evidence(directory)
    lines = [json.dumps(line(record, evidence.session(record.header)[0])) for record in RolloutStore(directory)]
    path.write_text("\n".join(lines))
    return len(lines)


def line(record: Trajectory, session: LoggedSession) -> dict[str, Any]:
    header = record.header
    return {
        "id": header.trajectory_id,
        "task": header.task,
        "ids": record.ids.tolist(),
        "mask": record.loss_mask.astype(int).tolist(),
        "logprobs": numbers(record.logprobs),
        "routes": [row.tolist() if known else None for row, known in zip(record.routes, record.routed, strict=True)],
        "turn": record.turn.tolist(),
        "policy": header.policy_versions[0],
        "passed": header.verdict.passed,
        "total": header.verdict.total,
        "reward": header.reward["total"],
        "contract": header.contract.to_json(),
        "exchanges": exchanges(session),
    }


def exchanges(session: LoggedSession) -> list[dict[str, Any]]:
    found, stream = [], np.empty(0, np.int32)
    for turn in session.turns:
        prompt = np.concatenate([stream[: turn.kept], turn.new_prompt])
        stream = np.concatenate([prompt, turn.sampled])
        found.append({"prompt_ids": prompt.tolist(), "completion_ids": turn.sampled.tolist(),
                      "logprobs": numbers(turn.logprobs)})  # fmt: skip
    return found


def numbers(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
