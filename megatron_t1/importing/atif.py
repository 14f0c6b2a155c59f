"""ATIF documents: the requests of their steps, in the document itself, its continuations and its sub-agents' documents.

The format is Harbor's (harbor.models.trajectories); token ids stand in it from version 1.4 on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_t1.errors import T1Error
from megatron_t1.importing.exchanges import ForeignTurn
from megatron_t1.importing.stitching import read_turn
from megatron_t1.importing.values import count, entries, entry, label, read_json

_READ = frozenset({"prompt_token_ids", "completion_token_ids", "logprobs"})
_COUNTERS = frozenset({"prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"})


def read_document(path: Path, ignored: Counter[str]) -> dict[str, list[ForeignTurn]]:
    """Name of each agent ("" of the document's own) -> its requests, in order; continuations belong to their agent.

    References are followed to files beside the document, never elsewhere.

    Args:
        ignored: what is in the document and not read is counted here.

    Raises:
        T1Error: a document can't be read, or contradicts itself.
    """
    found: dict[str, list[ForeignTurn]] = {}
    waiting, seen = [("", path)], {path.name}
    while waiting:
        agent, file = waiting.pop(0)
        for name, raw in _embedded(agent, read_json(file), str(file)):
            found.setdefault(name, []).extend(_turns(raw, str(file), ignored))
            for kind, target in _references(raw):
                beside = file.with_name(target) if target and Path(target).name == target else None
                if beside is None or not beside.is_file():
                    ignored[f"{kind} to a file that is not beside it"] += 1
                elif target not in seen:
                    seen.add(target)
                    waiting.append((name if kind == "continued_trajectory_ref" else beside.stem, beside))
    return found


def is_document(raw: Any) -> bool:
    return isinstance(raw, dict) and isinstance(raw.get("steps"), list)


def _embedded(agent: str, raw: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A document and those inside it, with the name of the agent of each."""
    if not is_document(raw):
        raise T1Error("this is no ATIF document: it has no list of steps", where=where)
    yield agent, raw
    for index, inner in enumerate(entries(raw.get("subagent_trajectories"), "subagent_trajectories", where)):
        known = label(entry(inner, "a sub-agent's trajectory", where).get("trajectory_id"), "trajectory_id", where)
        yield from _embedded(f"{agent}.{known or index}".strip("."), inner, where)


def _turns(raw: dict[str, Any], where: str, ignored: Counter[str]) -> Iterator[ForeignTurn]:
    for step in raw["steps"]:
        step = entry(step, "a step", where)
        metrics = step.get("metrics")
        if not isinstance(metrics, dict) or step.get("source") != "agent" or step.get("is_copied_context"):
            continue
        for name in metrics.keys() - _READ - _COUNTERS - {"extra"}:
            ignored[f"metrics.{name}"] += metrics[name] is not None
        for name, value in entry(metrics.get("extra"), "metrics.extra", where).items():
            ignored[f"metrics.extra.{name}"] += value is not None
        answer, prompt = metrics.get("completion_token_ids"), metrics.get("prompt_token_ids")
        if not answer:
            continue
        if not prompt:
            ignored["completion_token_ids without prompt_token_ids"] += 1
        elif (count(step.get("llm_call_count"), "llm_call_count", where) or 1) > 1:  # nothing tells their ids apart
            ignored["steps of several requests"] += 1
        else:
            yield read_turn(prompt, answer, metrics.get("logprobs"), f"{where}, step {step.get('step_id')}")


def _references(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, file name) of every other document that this one refers to."""
    if isinstance(raw.get("continued_trajectory_ref"), str):
        yield "continued_trajectory_ref", raw["continued_trajectory_ref"]
    for step in _objects(raw, "steps"):
        for result in _objects(step.get("observation"), "results"):
            for reference in _objects(result, "subagent_trajectory_ref"):
                if isinstance(path := reference.get("trajectory_path"), str):
                    yield "subagent_trajectory_ref", path


def _objects(raw: Any, name: str) -> list[dict[str, Any]]:
    values = raw.get(name) if isinstance(raw, dict) else None
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
