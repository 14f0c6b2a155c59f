"""Harbor trials: the rollout details of their results, or else the ATIF document of their agent.

The form is that of Harbor's models (harbor.models.trial.result.TrialResult and .agent.rollout_detail.RolloutDetail).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_t1.errors import T1Error
from megatron_t1.importing.atif import is_document, read_document
from megatron_t1.importing.exchanges import ForeignTurn
from megatron_t1.importing.foreign import END_REASON, Foreign, plain_name
from megatron_t1.importing.stitching import read_turn, stitched
from megatron_t1.importing.values import entries, entry, label, number, read_json, truth
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.record import EndReason

RESULT = "result.json"
ROUTES = "routed_experts"  # vLLM's name of them, under which Harbor keeps what an answer has besides token ids
_READ = ("prompt_token_ids", "completion_token_ids", "logprobs")


@dataclass
class TrialReader:
    """Reads trials to trajectories.

    Attributes:
        contract: that they were sampled under.
        scale: reward of one passed check, where a verifier's ctrf.json counts them; a trial's own reward otherwise.
        routes: whether routes are imported where answers have them.
        ignored: what was there and no record holds, by name, and how often.
    """

    contract: SamplingContract | None = None
    scale: float = 1.0
    routes: bool = True
    ignored: Counter[str] = field(default_factory=Counter)

    def read(self, path: str | Path) -> Iterator[Foreign | str]:
        """Trajectories of a trial directory, a directory of trials, a result.json or an ATIF file.

        Yields:
            a trajectory, or the name of a trial that has no token ids.

        Raises:
            T1Error: a file can't be read or contradicts itself.
        """
        path = Path(path)
        if path.is_file() and path.name != RESULT:
            name = f"{path.parent.name}-{path.stem}".strip("-")
            yield from self._atif(path, name, {"task": name})
            return
        found = False
        for file in [path] if path.is_file() else sorted(path.rglob(RESULT)):
            raw = read_json(file)
            if isinstance(raw, dict) and "agent_result" in raw:  # otherwise of a job, not of a trial
                found = True
                yield from self._trial(file.parent, raw)
        if not found:
            raise T1Error(
                "no trial was found",
                where=str(path),
                remedy="name a directory with a trial's result.json, or an ATIF file",
            )

    def _trial(self, directory: Path, raw: dict[str, Any]) -> Iterator[Foreign | str]:
        """A trial has one result, or one for each of its steps."""
        where = str(directory / RESULT)
        name = label(raw.get("trial_name") or None, "trial_name", where) or plain_name(directory.name)
        valid = truth(raw.get("reward_valid", True), "reward_valid", where)
        untrusted = "" if valid else _exceptions(raw, where) or "reward_valid isn't true"
        parts = [(name, directory, raw)]
        if raw["agent_result"] is None:
            parts = [
                (
                    f"{name}.{label(step.get('step_name'), 'step_name', where)}",
                    _step_directory(directory, step.get("step_name")),
                    step,
                )
                for step in _steps(raw, where)
            ] or parts
        for own, place, result in parts:
            reward, passed, total = self._reward(place, result, where)
            facts = {
                "task": label(raw.get("task_name") or None, "task_name", where) or name,
                "end_reason": _end_reason(result),
                "untrusted": untrusted,
                "reward": reward,
                "passed": passed,
                "total": total,
            }
            yield from self._rollouts(place, result, own, where, facts)

    def _rollouts(
        self, directory: Path, raw: dict[str, Any], name: str, where: str, facts: dict[str, Any]
    ) -> Iterator[Foreign | str]:
        agent = entry(raw.get("agent_result"), "agent_result", where)
        details = entries(agent.get("rollout_details"), "rollout_details", where)
        turns_of = [self._turns(detail, f"{where}, rollout_details {index}") for index, detail in enumerate(details)]
        if any(turns_of):
            for index, turns in enumerate(turns_of):
                own = f"{name}-{index}" if len(turns_of) > 1 else name
                yield from stitched(turns, own, source=where, contract=self.contract, **facts)
            return
        document = directory / "agent" / "trajectory.json"
        if document.is_file() and is_document(read_json(document)):
            yield from self._atif(document, name, facts)
        else:
            yield name

    def _turns(self, detail: Any, where: str) -> list[ForeignTurn]:
        if not isinstance(detail, dict):
            raise T1Error("not an object", where=where)
        prompts, answers, scores = (entries(detail.get(name), name, where) for name in _READ)
        scores = scores or [None] * len(answers)
        if not len(prompts) == len(answers) == len(scores):
            raise T1Error(f"{len(prompts)} prompts, {len(answers)} answers and {len(scores)} log-probs", where=where)
        extra = entry(detail.get("extra"), "extra", where)
        rows = entries(extra.get(ROUTES), f"extra.{ROUTES}", where) if self.routes else []
        if rows and len(rows) != len(answers):
            raise T1Error(
                f"extra.{ROUTES} has {len(rows)} entries for {len(answers)} answers",
                where=where,
                remedy="nothing says whose they are: leave them out with --no-routes",
            )
        for name in detail.keys() - set(_READ) - {"extra"}:
            self.ignored[f"rollout_details.{name}"] += 1
        for name, values in extra.items():
            if not (self.routes and name == ROUTES):
                known = values if isinstance(values, list) else [values]
                self.ignored[f"rollout_details.extra.{name}"] += sum(value is not None for value in known)
        return [
            read_turn(prompt, answer, own, f"{where}, turn {index}", routes=routes, contract=self.contract)
            for index, (prompt, answer, own, routes) in enumerate(
                zip(prompts, answers, scores, rows or [None] * len(answers), strict=True)
            )
        ]

    def _atif(self, path: Path, name: str, facts: dict[str, Any]) -> Iterator[Foreign | str]:
        agents = {agent: turns for agent, turns in read_document(path, self.ignored).items() if turns}
        for agent, turns in agents.items():
            own = f"{name}.{agent}" if agent else name
            yield from stitched(turns, own, source=str(path), contract=self.contract, **facts)
        if not agents:
            yield name

    def _reward(self, directory: Path, raw: dict[str, Any], where: str) -> tuple[float | None, int | None, int | None]:
        """(reward, checks passed, checks) of a trial or step, each None where nothing says."""
        places = (directory / "verifier/ctrf.json", directory / "ctrf.json")
        ctrf = next((file for file in places if file.is_file()), None)
        if ctrf is not None:
            report, where = entry(read_json(ctrf), "the report", str(ctrf)), str(ctrf)
            tests = entries(entry(report.get("results"), "results", where).get("tests"), "results.tests", where)
            passed = sum(entry(test, "a test", where).get("status") == "passed" for test in tests)
            return (
                number(self.scale * passed, "the reward (--scale times the checks passed)", where),
                passed,
                len(tests),
            )
        rewards = entry(raw.get("verifier_result"), "verifier_result", where).get("rewards")
        if isinstance(rewards, dict):
            name = "reward" if "reward" in rewards or not rewards else next(iter(rewards))
            if name != "reward" and len(rewards) > 1:
                raise T1Error(
                    f"several rewards, none of them called reward: {', '.join(map(str, rewards))}",
                    where=where,
                    remedy="give one of them this name; the reward is what training uses",
                )
            for other in rewards.keys() - {name}:
                self.ignored[f"verifier_result.rewards.{other}"] += 1
            rewards = rewards.get(name)
        return number(rewards, "verifier_result.rewards", where), None, None


def _steps(raw: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The results of a trial's steps; a trial of one step has none."""
    return [entry(step, "a step's result", where) for step in entries(raw.get("step_results"), "step_results", where)]


def _step_directory(directory: Path, name: Any) -> Path:
    """Where a step of a trial left its files; a name that is no plain one has none."""
    plain = isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")
    return directory / "steps" / name if plain else directory / "steps"


def _exceptions(raw: dict[str, Any], where: str) -> str:
    """Types of what went wrong in a trial and its steps."""
    infos = [entry(part.get("exception_info"), "exception_info", where) for part in (raw, *_steps(raw, where))]
    types = [label(info.get("exception_type") or None, "exception_type", where) for info in infos]
    return ", ".join(filter(None, types))


def _end_reason(raw: dict[str, Any]) -> str:
    info = raw.get("exception_info")
    timed_out = isinstance(info, dict) and info.get("exception_type") == "AgentTimeoutError"
    return EndReason.AGENT_TIMEOUT if timed_out else END_REASON
