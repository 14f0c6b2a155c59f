"""Numbers of a finished rollout or evaluation, from the headers of its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import EndReason, Header

COUNTS = ("turns", "tokens", "sampled_tokens", "commands", "commands_failed", "command_timeouts", "format_errors")


def rollout_metrics(headers: Iterable[Header], group: str) -> dict[str, float]:
    """Flat metrics "group/name"; means are over trusted episodes, counts over all.

    Among them are the monitors that say whether a rollout is like those before it: turns and tokens of a trajectory
    (with their 90th percentile), checks of a task, reward per passed check, and the shares of episodes that verifier
    or infrastructure failed; of tasks of several steps, the share of steps that was reached.
    """
    headers = list(headers)
    trusted = [header for header in headers if header.verdict is not None and header.verdict.trusted]
    metrics = {
        "episodes": float(len(headers)),
        "untrusted": float(len(headers) - len(trusted)),
        "retries": float(sum(header.counts.get("retries", 0) for header in headers)),
        "route_differences": float(sum(header.counts.get("route_differences", 0) for header in headers)),
    }
    if headers:
        metrics |= {name: _mean(header.counts.get(name, 0) for header in headers) for name in COUNTS}
        metrics |= {f"{name}_p90": _quantile90(h.counts.get(name, 0) for h in headers) for name in ("turns", "tokens")}
        ends = Counter(header.end_reason for header in headers)
        metrics |= {f"end_{reason}": ends[reason] / len(headers) for reason in sorted({*EndReason.ALL, *ends})}
        lost = sum(header.end_reason in EndReason.LOST for header in headers)
        metrics["infrastructure_errors"] = lost / len(headers)
        metrics["verifier_errors"] = (len(headers) - len(trusted) - lost) / len(headers)
        if stepped := [header.steps for header in headers if header.steps]:
            metrics["steps_reached"] = _mean(sum(step.reached for step in steps) / len(steps) for steps in stepped)
    if trusted:
        metrics |= {
            "mean_reward": _mean(header.reward.get("total", 0.0) for header in trusted),
            "checks_passed": _mean(header.verdict.passed for header in trusted),
            "checks_fraction": _mean(header.verdict.share for header in trusted),
            "success_rate": _mean(header.verdict.solved for header in trusted),
            "checks_per_task": _mean(header.verdict.total for header in trusted),
        }
        passed = sum(header.verdict.passed for header in trusted)
        if passed:
            metrics["reward_per_check"] = sum(header.reward.get("total", 0.0) for header in trusted) / passed
        components = sorted({name for header in trusted for name in header.reward} - {"total", "passed"})
        metrics |= {f"reward_{name}": _mean(h.reward.get(name, 0.0) for h in trusted) for name in components}
        gains = [h.verdict.passed - h.verdict.baseline for h in trusted if h.verdict.baseline >= 0]
        if gains:
            metrics["checks_above_baseline"] = _mean(gains)
    return {f"{group}/{name}": value for name, value in metrics.items()}


def untrusted_reasons(headers: Iterable[Header]) -> list[tuple[str, int]]:
    """(first line of the reason, episodes) of all without a trusted verdict, the most frequent first."""
    reasons = Counter(
        (header.verdict.reason if header.verdict is not None else "not verified").partition("\n")[0]
        for header in headers
        if header.verdict is None or not header.verdict.trusted
    )
    return reasons.most_common()


def require_trusted(headers: Iterable[Header], allowed_share: float, *, where: str) -> None:
    """An alarm, so that a broken sandbox or verifier isn't noticed only by what is missing (strands-env#183).

    Raises:
        T1Error: a larger share of the episodes than allowed has no trusted verdict.
    """
    headers = list(headers)
    reasons = untrusted_reasons(headers)
    untrusted = sum(count for _, count in reasons)
    if untrusted > allowed_share * len(headers):
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons[:3])
        raise T1Error(
            f"{untrusted} of {len(headers)} episodes have no trusted verdict: {listed}",
            where=where,
            remedy="mend the cause and start again: episodes the infrastructure lost are played again, the others are "
            "kept; rollout.max_untrusted_share allows more",
        )


def evaluation_summary(headers: Iterable[Header], policy: int, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Per task and attempt what the statistics of an evaluation, and a paired comparison of two policies, need.

    An attempt without a trusted verdict is None in each list, not zero; `errors` says why, and whose failure it was.
    """
    found: dict[str, dict[str, Any]] = {}
    for header in sorted(headers, key=lambda item: (item.task, item.attempt)):
        entry = found.setdefault(header.task, _empty_entry(tasks.get(header.task)))
        verdict = header.verdict
        trusted = verdict is not None and verdict.trusted
        entry["passed"].append(verdict.passed if trusted else None)
        entry["total"].append(verdict.total if trusted else None)
        entry["solved"].append(verdict.solved if trusted else None)
        entry["score"].append(verdict.score if trusted else None)
        entry["ends"].append(header.end_reason)
        entry["errors"].append(None if trusted else _error(header))
        if trusted:
            entry["baseline"] = verdict.baseline
    return {"version": 2, "policy": policy, "tasks": found}


def _empty_entry(task: Task | None) -> dict[str, Any]:
    metadata = task.metadata if task is not None else {}
    lists = {name: [] for name in ("passed", "total", "solved", "score", "ends", "errors")}
    return {"baseline": -1, **{name: str(metadata.get(name, "")) for name in ("category", "difficulty")}, **lists}


def _error(header: Header) -> dict[str, str]:
    kind = header.end_reason if header.end_reason in EndReason.LOST else "verifier"
    reason = header.verdict.reason if header.verdict is not None else "not verified"
    return {"kind": kind, "reason": reason.partition("\n")[0][:300]}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _quantile90(values: Iterable[float]) -> float:
    return float(np.quantile(list(values), 0.9))
