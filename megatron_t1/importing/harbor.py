"""Harbor trials (`rollout_details` of result.json) and ATIF trajectories whose steps carry token ids.

Both list, for each request, all tokens of its prompt and its answer. A prompt that doesn't go on where the answer
before it ended (a history that was summarised or rendered again) begins a new trajectory, so that every sampled token
is trained on once, after the very tokens it was sampled after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.importing.exchanges import ForeignTurn
from megatron_t1.importing.foreign import Foreign, plain_name, read_json
from megatron_t1.importing.values import entries, entry, logprobs, number, token_ids
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import common_prefix

RESULT = "result.json"


def read_trials(
    path: str | Path, contract: SamplingContract | None = None, *, scale: float = 1.0
) -> Iterator[Foreign | str]:
    """Trajectories of a trial directory, a directory of trials, a result.json or an ATIF file.

    Yields:
        a trajectory, or the name of a trial that has no token ids.

    Args:
        scale: reward of one passed check, where a verifier's ctrf.json counts them; a trial's own reward otherwise.

    Raises:
        T1Error: a file can't be read or contradicts itself.
    """
    path = Path(path)
    if path.is_file() and path.name != RESULT:
        yield from _atif(path, read_json(path), contract, reward=(None, None, None), name=path.parent.name + path.stem)
        return
    results = [path] if path.is_file() else sorted(path.rglob(RESULT))
    found = False
    for result in results:
        raw = read_json(result)
        if not isinstance(raw, dict) or "agent_result" not in raw:
            continue  # of a job, not of a trial
        found = True
        yield from _trial(result.parent, raw, contract, scale)
    if not found:
        raise T1Error(
            "no trial was found", where=str(path), remedy="name a directory with a trial's result.json, or an ATIF file"
        )


def _trial(
    directory: Path, raw: dict[str, Any], contract: SamplingContract | None, scale: float
) -> Iterator[Foreign | str]:
    name = str(raw.get("trial_name") or directory.name)
    task = str(raw.get("task_name") or name)
    reward = _reward(directory, raw, scale)
    where = str(directory / RESULT)
    agent = entry(raw["agent_result"], "agent_result", where)
    details = entries(agent.get("rollout_details"), "rollout_details", where)
    turns_of = [_detail_turns(detail, f"{where}, rollout_details {index}")
                for index, detail in enumerate(details)]  # fmt: skip
    if any(turns_of):
        for index, turns in enumerate(turns_of):
            suffix = f"-{index}" if len(turns_of) > 1 else ""
            yield from _stitched(turns, f"{name}{suffix}", task, where, contract, reward)
        return
    atif = directory / "agent" / "trajectory.json"
    if atif.is_file():
        yield from _atif(atif, read_json(atif), contract, reward=reward, name=name, task=task)
    else:
        yield name


def _reward(directory: Path, raw: dict[str, Any], scale: float) -> tuple[float | None, int | None, int | None]:
    """(reward, checks passed, checks) of a trial, each None where nothing says."""
    ctrf = next((file for file in (directory / "verifier/ctrf.json", directory / "ctrf.json") if file.is_file()), None)
    if ctrf is not None:
        report, where = entry(read_json(ctrf), "the report", str(ctrf)), str(ctrf)
        tests = entries(entry(report.get("results"), "results", where).get("tests"), "results.tests", where)
        passed = sum(entry(test, "a test", where).get("status") == "passed" for test in tests)
        return scale * passed, passed, len(tests)
    where = str(directory / RESULT)
    rewards = entry(raw.get("verifier_result"), "verifier_result", where).get("rewards")
    if isinstance(rewards, dict):
        rewards = rewards.get("reward", next(iter(rewards.values()), None))
    return number(rewards, "verifier_result.rewards", where), None, None


def _detail_turns(detail: Any, where: str) -> list[ForeignTurn]:
    if not isinstance(detail, dict):
        raise T1Error("not an object", where=where)
    prompts, answers, scores = (
        entries(detail.get(name), name, where) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
    )
    scores = scores or [None] * len(answers)
    if not len(prompts) == len(answers) == len(scores):
        raise T1Error(f"{len(prompts)} prompts, {len(answers)} answers and {len(scores)} log-probs", where=where)
    return [
        _turn(prompt, answer, own, f"{where}, turn {index}")
        for index, (prompt, answer, own) in enumerate(zip(prompts, answers, scores, strict=True))
    ]


def _atif(
    path: Path,
    raw: Any,
    contract: SamplingContract | None,
    *,
    reward: tuple[float | None, int | None, int | None],
    name: str,
    task: str = "",
) -> Iterator[Foreign | str]:
    if not isinstance(raw, dict) or not isinstance(raw.get("steps"), list):
        yield name
        return
    turns = []
    for step in raw["steps"]:
        metrics = step.get("metrics") if isinstance(step, dict) else None
        if not isinstance(metrics, dict) or step.get("source") != "agent" or step.get("is_copied_context"):
            continue
        if not metrics.get("completion_token_ids") or not metrics.get("prompt_token_ids"):
            continue
        where = f"{path}, step {step.get('step_id')}"
        turns.append(
            _turn(metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics.get("logprobs"), where)
        )
    if turns:
        yield from _stitched(turns, name, task or name, str(path), contract, reward)
    else:
        yield name


def _turn(prompt: Any, answer: Any, scores: Any, where: str) -> ForeignTurn:
    sampled = token_ids(answer, "completion_token_ids", where)
    own = logprobs(None if scores == [] else scores, where, tokens=len(sampled))
    return ForeignTurn(token_ids(prompt, "prompt_token_ids", where), sampled, own)


def _stitched(
    turns: Sequence[ForeignTurn],
    name: str,
    task: str,
    source: str,
    contract: SamplingContract | None,
    reward: tuple[float | None, int | None, int | None],
) -> Iterator[Foreign]:
    """One trajectory for each run of turns in which every prompt goes on where the answer before it ended."""
    runs: list[list[ForeignTurn]] = []
    for turn in turns:
        if not len(turn.sampled):
            continue
        stream = np.concatenate([runs[-1][-1].prompt, runs[-1][-1].sampled]) if runs else None
        if stream is not None and common_prefix(stream, turn.prompt) == len(stream):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    for index, run in enumerate(runs):
        last = run[-1]
        ids = np.concatenate([last.prompt, last.sampled])
        mask, own = np.zeros(len(ids), bool), np.full(len(ids), np.nan, np.float32)
        for turn in run:
            here = slice(len(turn.prompt), len(turn.prompt) + len(turn.sampled))
            mask[here], own[here] = True, turn.logprobs
        yield Foreign(
            name=plain_name(name if len(runs) == 1 else f"{name}+{index}"),
            task=task,
            ids=ids,
            mask=mask,
            logprobs=own if np.isfinite(own).any() else None,
            source=source,
            contract=contract,
            exchanges=list(run) if np.isfinite(own).any() else [],
            **dict(zip(("reward", "passed", "total"), reward, strict=True)),
        )
