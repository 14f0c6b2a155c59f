"""What the command asks the scoring processes for: a directory that both can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_t1 import atomic
from megatron_t1.attribution.retokenised import Retokenised
from megatron_t1.attribution.settings import Alternative, Kept
from megatron_t1.trajectory import tensorfile

JOB_FILE, STREAMS_FILE, OUTCOME_FILE = "job.json", "retokenised.safetensors", "outcome.json"


@dataclass(frozen=True)
class Job:
    """Which trajectories of an iteration's rollout are scored under which settings."""

    trajectories: list[str]
    baseline: Alternative
    alternatives: list[Alternative]
    kept: Kept

    def write(self, directory: Path, streams: Mapping[str, Retokenised]) -> None:
        """Args:
        streams: re-rendered streams by the digest of the record; none for records that come out as they were.
        """
        tensors: dict[str, np.ndarray] = {}
        for digest, stream in streams.items():
            tensors |= {f"{digest}/ids": stream.ids, f"{digest}/source": stream.source}
        if tensors:
            tensorfile.write(directory / STREAMS_FILE, tensors, {"format": "megatron-t1 re-rendered streams"})
        raw = {
            "trajectories": self.trajectories,
            "baseline": self.baseline.to_json(),
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "kept": {"exports": sorted(self.kept.exports), "checkpoints": sorted(self.kept.checkpoints)},
        }
        atomic.write_json(directory / JOB_FILE, raw)

    @classmethod
    def read(cls, directory: Path) -> Job:
        raw = json.loads((directory / JOB_FILE).read_text())
        return cls(
            trajectories=raw["trajectories"],
            baseline=Alternative.from_json(raw["baseline"]),
            alternatives=[Alternative.from_json(item) for item in raw["alternatives"]],
            kept=Kept(frozenset(raw["kept"]["exports"]), frozenset(raw["kept"]["checkpoints"])),
        )

    @staticmethod
    def retokenised(directory: Path) -> dict[str, Retokenised]:
        """Re-rendered streams by the digest of their record."""
        path = directory / STREAMS_FILE
        if not path.exists():
            return {}
        file = tensorfile.TensorFile(path)
        digests = {name.partition("/")[0] for name in file.entries}
        return {digest: Retokenised(file[f"{digest}/ids"], file[f"{digest}/source"]) for digest in sorted(digests)}
