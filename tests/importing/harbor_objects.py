"""Trials made with Harbor's own models, as files: run by a Python that has the package `harbor`, never imported.

    python tests/importing/harbor_objects.py > tests/importing/harbor_trials.json

Prints {"version": ..., "files": {path: content}}. What cannot be told apart by time is fixed.
"""

import base64
import importlib.metadata
import json
import sys
from datetime import UTC, datetime
from uuid import UUID

from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.task.id import LocalTaskId
from harbor.models.trajectories import (
    Agent,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    Trajectory,
)  # fmt: skip
from harbor.models.trial.config import TaskConfig, TrialConfig
from harbor.models.trial.result import AgentInfo, ExceptionInfo, StepResult, TrialResult
from harbor.models.verifier.result import VerifierResult

PROMPTS = [[1, 2], [1, 2, 5, 6, 3], [1, 9]]  # the third doesn't go on: the history was summarised
ANSWERS = [[5, 6], [7], [8, 8]]
LOGPROBS = [[-0.5, -0.25], [-1.0], [-2.0, -3.0]]


def encoded_routes(tokens: int) -> str:
    """Rows of all tokens but the last, as vLLM writes them into an answer: 2 layers, 2 of 8 experts, by position."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({tokens - 1}, 2, 2), }}".ljust(117).encode() + b"\n"
    rows = bytes((at + first) % 8 for at in range(tokens - 1) for first in range(4))
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + rows).decode()


def detail(**changes) -> RolloutDetail:
    routes = [encoded_routes(len(prompt) + len(answer)) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    extra = {"routed_experts": routes, "stop_reason": [None, 7, None]}
    known = {"prompt_token_ids": PROMPTS, "completion_token_ids": ANSWERS, "logprobs": LOGPROBS, "extra": extra}
    return RolloutDetail(**{**known, **changes})


def result(name: str, **fields) -> str:
    made = TrialResult(
        id=UUID(int=1), task_name="build-it", trial_name=name, trial_uri=f"file:///jobs/{name}",
        task_id=LocalTaskId(path="tasks/build-it"), task_checksum="0" * 64,
        config=TrialConfig(task=TaskConfig(path="tasks/build-it"), trial_name=name),
        agent_info=AgentInfo(name="terminus-2", version="2.0.0"), **fields,
    )  # fmt: skip
    return made.model_dump_json()


def exception(kind: str) -> ExceptionInfo:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return ExceptionInfo(exception_type=kind, exception_message="x", exception_traceback="y", occurred_at=at)


def step(number: int, at: int | None = None, **fields) -> Step:
    """An agent's step with the tokens of turn `at`."""
    metrics = fields.pop("metrics", None)
    if at is not None:
        metrics = Metrics(
            prompt_tokens=len(PROMPTS[at]), completion_tokens=len(ANSWERS[at]), prompt_token_ids=PROMPTS[at],
            completion_token_ids=ANSWERS[at], logprobs=LOGPROBS[at], extra={"reasoning_tokens": 1},
        )  # fmt: skip
    return Step(step_id=number, source="agent", message="m", metrics=metrics, **fields)


def document(*steps: Step, **fields) -> str:
    made = Trajectory(session_id="s", agent=Agent(name="a", version="1"), steps=list(steps), **fields)
    return json.dumps(made.to_json_dict())


def files() -> dict[str, str]:
    reward = VerifierResult(rewards={"reward": 1.0})
    embedded = Trajectory(trajectory_id="helper", agent=Agent(name="h", version="1"), steps=[step(1, 2)])
    refers = Observation(
        results=[
            ObservationResult(
                subagent_trajectory_ref=[
                    SubagentTrajectoryRef(trajectory_path="trajectory.summary.json"),
                    SubagentTrajectoryRef(trajectory_path="/etc/passwd"),
                ]
            )
        ]
    )
    copied = step(1, extra={"note": "Metrics omitted to avoid duplication"}, is_copied_context=True)
    return {
        "job/one__a/result.json": result(
            "one__a", agent_result=AgentContext(rollout_details=[detail()], n_input_tokens=9), verifier_result=reward
        ),
        "job/lost__b/result.json": result(
            "lost__b", agent_result=AgentContext(rollout_details=[detail()]), verifier_result=reward,
            exception_info=exception("VerifierTimeoutError"),
        ),
        "job/late__c/result.json": result(
            "late__c", agent_result=AgentContext(rollout_details=[detail(extra={})]), exception_info=exception(
                "AgentTimeoutError"), verifier_result=VerifierResult(rewards={"reward": 0.5, "style": 2}),
        ),
        "job/steps__d/result.json": result(
            "steps__d", verifier_result=reward,
            step_results=[
                StepResult(step_name="first", agent_result=AgentContext(rollout_details=[detail()]),
                           verifier_result=VerifierResult(rewards={"reward": 0.25})),
                StepResult(step_name="second", agent_result=AgentContext(), verifier_result=reward),
            ],
        ),
        "job/steps__d/steps/second/agent/trajectory.json": document(step(1, 0)),
        "job/atif__e/result.json": result("atif__e", agent_result=AgentContext(), verifier_result=reward),
        "job/atif__e/agent/trajectory.json": document(
            step(1, 0, observation=refers), continued_trajectory_ref="trajectory.cont-1.json",
            subagent_trajectories=[embedded],
        ),
        "job/atif__e/agent/trajectory.cont-1.json": document(copied, step(2, 1), step(3, 2, llm_call_count=2)),
        "job/atif__e/agent/trajectory.summary.json": document(step(1, 2)),
        "job/text__f/result.json": result("text__f", agent_result=AgentContext(), verifier_result=reward),
    }  # fmt: skip


if __name__ == "__main__":
    json.dump({"version": importlib.metadata.version("harbor"), "files": files()}, sys.stdout, indent=1)
