"""Stored trials, ours and Harbor's, as one kind of row: what each passed, and how long it took.

Read are runs, directories of records, and Harbor's job or trial folders: `TASK__xxxxxxx/` with ctrf.json, pytest.xml,
reward.json or reward.txt in it or in its verifier/, and result.json or trajectory.json where there is one; of a task of
several steps in steps/NAME/ each. A trial that left no result, or a malformed one, is untrusted with the reason, never
a zero.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_t1.environment.results import CTRF, PYTEST, READERS, RESULT_FILES, ResultError, own_rewards
from megatron_t1.environment.sources import contradiction
from megatron_t1.environment.steps import combine
from megatron_t1.environment.verifier import trusted
from megatron_t1.errors import T1Error
from megatron_t1.regular import open_regular
from megatron_t1.trajectory.record import RECORD_FORMAT, Header, Verdict
from megatron_t1.trajectory.store import SHARD_FORMAT, SUFFIX, RolloutStore
from megatron_t1.trajectory.tensorfile import TensorFile

RESULT, TRAJECTORY, STEPS = "result.json", "trajectory.json", "steps"
_TRIAL_SUFFIX = re.compile(r"(?::\d+)?__[A-Za-z0-9]{7}$")  # Harbor: TASK[:N]__7 characters
MAX_TRAJECTORY_BYTES = 256 << 20
MAX_FILE_BYTES = 4 << 20  # of a result file or result.json: the sandboxes' limit


@dataclass(frozen=True)
class Trial:
    """One attempt at a task.

    Attributes:
        verdict: checks passed, total and by name; untrusted with a reason where nothing can be counted.
        turns: of the agent; -1 unknown.
        tokens: of the whole trajectory; -1 unknown.
        iteration: -1 for trials of no run.
        reward: components that were paid; {} for trials of no run.
        end_reason: "" unknown.
    """

    task: str
    name: str
    verdict: Verdict
    turns: int = -1
    tokens: int = -1
    iteration: int = -1
    reward: dict[str, float] = field(default_factory=dict)
    end_reason: str = ""


def read_trials(path: str | Path) -> list[Trial]:
    """Every trial below `path`, in a fixed order.

    Raises:
        T1Error: nothing is there, or a record can't be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise T1Error("there is no such directory", where=str(path), remedy="name a run, records, or trial folders")
    trials = [*_recorded(path), *_harbor(path)]
    if not trials:
        raise T1Error(
            "no trial was found",
            where=str(path),
            remedy="name a run, a directory of records, or one with trial folders (ctrf.json, reward.txt, ...)",
        )
    return trials


def trial_of(header: Header) -> Trial:
    """The trial that a record's header describes."""
    verdict = header.verdict or Verdict(0, 0, -1, trusted=False, reason="not verified")
    return Trial(
        header.task,
        header.trajectory_id,
        verdict,
        turns=header.counts.get("turns", -1),
        tokens=header.counts.get("tokens", -1),
        iteration=header.iteration,
        reward=header.reward,
        end_reason=header.end_reason,
    )


def _recorded(path: Path) -> Iterator[Trial]:
    """Of a run its rollouts (evaluations are other policies' and tasks'), else of every directory with records."""
    base = path / "rollouts" if (path / "rollouts").is_dir() else path
    for directory in sorted({file.parent for file in base.rglob(f"*{SUFFIX}") if _holds_records(file)}):
        yield from (trial_of(header) for _, header in sorted(RolloutStore(directory).headers().items()))


def _holds_records(file: Path) -> bool:
    """Records and shards, not the weights or values that lie in files of the same kind; an unreadable file is none."""
    try:
        return TensorFile(file).metadata.get("format") in (RECORD_FORMAT, SHARD_FORMAT)
    except T1Error:
        return False


def _harbor(path: Path) -> Iterator[Trial]:
    folders = {file.parent for name in (*RESULT_FILES, TRAJECTORY, RESULT) for file in path.rglob(name)}
    owners = {folder.parent if folder.name in ("verifier", "agent") else folder for folder in folders}
    for folder in sorted({_trial_of_step(folder) or folder for folder in owners}):
        if not _is_phase(folder):
            yield harbor_trial(folder)


def _trial_of_step(folder: Path) -> Path | None:
    """TRIAL of TRIAL/steps/NAME."""
    trial = folder.parent.parent
    owns = folder.parent.name == STEPS and isinstance(_json_object(trial / RESULT).get("step_results"), list)
    return trial if owns else None


def _is_phase(folder: Path) -> bool:
    """A job's result.json, or that of one of our phases, which isn't a trial's."""
    if any((folder / part / name).is_file() for part in ("", "verifier") for name in RESULT_FILES):
        return False
    raw = _json_object(folder / RESULT)
    return bool(raw) and "agent_result" not in raw


def harbor_trial(folder: Path) -> Trial:
    """The trial in one folder."""
    raw = _json_object(folder / RESULT)
    task = _text(raw.get("task_name") or _TRIAL_SUFFIX.sub("", folder.name))
    exception = raw.get("exception_info") or {}
    listed = raw.get("step_results")
    steps = [step for step in listed if isinstance(step, dict)] if isinstance(listed, list) else []
    folders = [folder / STEPS / name for step in steps if _is_name(name := step.get("step_name"))]
    return Trial(
        task,
        _text(raw.get("trial_name") or folder.name),
        _verdict_of_steps(raw, folders) if folders else _verdict(folder),
        turns=sum(max(0, _turns(own)) for own in folders) if folders else _turns(folder),
        end_reason=_text(exception.get("exception_type", "")) if isinstance(exception, dict) else "",
    )


def _is_name(name: object) -> bool:
    """Of one folder, not of a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & {*name}


def _verdict_of_steps(raw: dict[str, Any], folders: Sequence[Path]) -> Verdict:
    """Of the steps that were begun; Harbor doesn't store how many the task has.

    Which steps count shows in the trial's reward alone: where it is the last one's, and not the mean, that one does.
    """
    verdicts = {_text(folder.name): _verdict(folder) for folder in folders}
    for name, verdict in verdicts.items():
        if not verdict.trusted:
            return replace(verdict, reason=f"step {name}: {verdict.reason}")
    whole = combine(verdicts)
    last = combine({name: verdict for name, verdict in list(verdicts.items())[-1:]})
    result = raw.get("verifier_result")
    rewards = result.get("rewards") if isinstance(result, dict) else None
    return last if _equal(rewards, last.rewards) and not _equal(rewards, whole.rewards) else whole


def _equal(one: object, other: Mapping[str, float]) -> bool:
    """Of rewards by name, up to rounding."""
    return (
        isinstance(one, dict)
        and one.keys() == other.keys()
        and all(isinstance(value, int | float) and math.isclose(value, other[name]) for name, value in one.items())
    )


def _verdict(folder: Path) -> Verdict:
    """What a trial's folder, or a step's, holds."""
    files = {}
    for name in RESULT_FILES:
        for place in (folder / "verifier" / name, folder / name):
            try:
                files[name] = _read(place, MAX_FILE_BYTES)
                break
            except FileNotFoundError:
                continue
            except OSError as error:
                return Verdict(0, 0, -1, trusted=False, reason=f"{name} can't be read: {error.strerror}")
    return stored_verdict(files)


def stored_verdict(files: dict[str, bytes]) -> Verdict:
    """What result files say that another system stored; the most detailed one counts."""
    statuses = {}
    name = next((name for name in RESULT_FILES if name in files), "")
    if not name:
        return Verdict(0, 0, -1, trusted=False, reason="the trial left no result file")
    try:
        statuses[name] = READERS[name](files[name])
        if name == CTRF and PYTEST in files:
            statuses[PYTEST] = READERS[PYTEST](files[PYTEST])
    except ResultError as error:
        return Verdict(0, 0, -1, trusted=False, reason=f"{PYTEST if statuses else name}: {error}")
    if doubt := contradiction(statuses):
        return Verdict(0, 0, -1, trusted=False, reason=doubt)
    return trusted(statuses[name], name, own_rewards(files))


def _turns(folder: Path) -> int:
    """Turns of the agent in an ATIF file or a list of chat messages; -1 where there is none to read."""
    for path in (folder / "agent" / TRAJECTORY, folder / TRAJECTORY):
        try:
            raw = json.loads(_read(path, MAX_TRAJECTORY_BYTES))
        except OSError:
            continue
        except (ValueError, RecursionError):
            return -1
        steps = raw.get("steps") if isinstance(raw, dict) else raw
        if isinstance(steps, list):
            return sum(isinstance(step, dict) and _is_agents(step) for step in steps)
    return -1


def _is_agents(step: dict[str, Any]) -> bool:
    return step.get("role") == "assistant" or (step.get("source") == "agent" and not step.get("is_copied_context"))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(_read(path, MAX_FILE_BYTES))
        return raw if isinstance(raw, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _read(path: Path, limit: int) -> bytes:
    """A regular file's bytes. Raises OSError, also where it is something else or larger than `limit`."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def _text(value: object) -> str:
    """A name as text that can be printed and stored: JSON and file names can spell half a character."""
    return str(value).encode("utf-8", "backslashreplace").decode()
