"""Records of any size for the tests of this folder."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.record import EndReason, Header, Origin, Trajectory, Verdict

CONTRACT = SamplingContract(
    temperature=0.7,
    top_p=1.0,
    logprobs_mode="processed",
    stop_ids=(2, 5),
    tokenizer_sha256="0" * 64,
    chat_format="chatml_bash",
    engine="vllm 0",
    engine_dtype="float32",
    model_dtype="float32",
    num_experts=16,
    top_k=2,
    num_moe_layers=3,
)


def build(name="task-0", *, turns=3, seed=0, layers=3, routes=True, experts=16, **header) -> Trajectory:
    """A record with a prompt, then for each turn sampled tokens, one repair token, and environment output."""
    random = np.random.default_rng([seed, len(name)])
    origin, turn = [Origin.PROMPT] * int(random.integers(2, 9)), []
    turn += [0] * len(origin)
    for number in range(turns):
        spans = [
            (Origin.SAMPLED, random.integers(1, 7)),
            (Origin.REPAIR, 1),
            (Origin.ENVIRONMENT, random.integers(0, 9)),
        ]
        for kind, count in spans:
            origin += [kind] * int(count)
            turn += [number] * int(count)
    origin = np.array(origin, np.uint8)
    length = len(origin)
    sampled = origin == Origin.SAMPLED
    routed = np.arange(length) < length - 1
    fields = {
        "trajectory_id": name,
        "task": name.rsplit("-", 1)[0],
        "attempt": 0,
        "iteration": 3,
        "policy_versions": tuple(range(turns)),
        "end_reason": EndReason.SUBMITTED,
        "verdict": Verdict(passed=2, total=4, baseline=1, trusted=True, checks={"a": True}),
        "reward": {"checks": 0.5, "total": 0.5},
        "contract": CONTRACT,
        "counts": {"commands": turns},
        "timings_s": {"agent": 1.25},
        "extra": {"note": "größer als 漢字"},
        **header,
    }
    return Trajectory(
        header=Header(**fields),
        ids=random.integers(0, 1000, length).astype(np.int32),
        origin=origin,
        turn=np.array(turn, np.uint16),
        logprobs=np.where(sampled, -random.random(length), np.nan).astype(np.float32),
        routes=random.integers(0, experts, (length, layers, 2)).astype(np.uint8) if routes else None,
        routed=routed if routes else np.zeros(length, bool),
    )


@pytest.fixture
def make():
    return build
