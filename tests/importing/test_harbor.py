"""Trials as Harbor's own models write them (harbor_objects.py): what becomes of every form of them.

harbor_trials.json was made by Harbor 0.26.0; with T1_HARBOR_PYTHON, a Python that has the package, they are made anew.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.audit.run import audit_target
from megatron_t1.audit.targets import find_targets
from megatron_t1.cli import main
from megatron_t1.errors import T1Error
from megatron_t1.importing.harbor import TrialReader
from megatron_t1.trajectory.record import EndReason
from megatron_t1.trajectory.selection import select
from megatron_t1.trajectory.store import RolloutStore
from tests.importing.spoiling import spoilt

HERE = Path(__file__).parent
HARBOR_PYTHON = os.environ.get("T1_HARBOR_PYTHON", "")
MADE = [
    "stored",
    pytest.param("now", marks=pytest.mark.skipif(not HARBOR_PYTHON, reason="T1_HARBOR_PYTHON names no Python")),
]


@pytest.fixture(params=MADE)
def job(request, tmp_path):
    """The directory of a job with a trial of each form."""
    if request.param == "stored":
        made = (HERE / "harbor_trials.json").read_text()
    else:
        command = [HARBOR_PYTHON, str(HERE / "harbor_objects.py")]
        made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    for name, content in json.loads(made)["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path / "job"


def position_routes(length):
    """What harbor_objects.py gave every token but the last: [length - 1, 2, 2]."""
    return (np.arange(length - 1)[:, None, None] + np.array([[0, 1], [2, 3]])) % 8


def test_every_form_of_a_trial_is_imported(job, tmp_path, capsys):
    assert main(["import", "harbor", str(job), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    records = {record.header.trajectory_id: record for record in RolloutStore(tmp_path / "out")}
    assert sorted(records) == [
        "atif__e", "atif__e.helper", "atif__e.trajectory.summary",
        "late__c+0", "late__c+1", "lost__b+0", "lost__b+1", "one__a+0", "one__a+1",
        "steps__d.first+0", "steps__d.first+1", "steps__d.second",
    ]  # fmt: skip
    first = records["one__a+0"]
    assert first.ids.tolist() == [1, 2, 5, 6, 3, 7] and np.flatnonzero(first.loss_mask).tolist() == [2, 3, 5]
    assert first.logprobs[first.loss_mask].tolist() == [-0.5, -0.25, -1.0]
    assert (first.routes[:-1] == position_routes(6)).all() and first.routed.tolist() == [True] * 5 + [False]
    assert first.header.task == "build-it" and first.header.reward == {"total": 1.0}
    assert {name: record.header.reward.get("total") for name, record in records.items()} == {
        "atif__e": 1.0, "atif__e.helper": 1.0, "atif__e.trajectory.summary": 1.0, "late__c+0": 0.5, "late__c+1": 0.5,
        "lost__b+0": None, "lost__b+1": None, "one__a+0": 1.0, "one__a+1": 1.0,
        "steps__d.first+0": 0.25, "steps__d.first+1": 0.25, "steps__d.second": 1.0,
    }  # fmt: skip
    assert records["lost__b+0"].header.verdict.reason == "VerifierTimeoutError"
    assert select(records.values()).counts == {"untrusted_verdict": 2}
    assert records["late__c+0"].header.end_reason == EndReason.AGENT_TIMEOUT and records["late__c+0"].routes is None
    assert records["atif__e"].ids.tolist() == [1, 2, 5, 6, 3, 7]  # goes on in the continuation's file
    assert records["atif__e.helper"].ids.tolist() == records["atif__e.trajectory.summary"].ids.tolist() == [1, 9, 8, 8]
    assert "1 trials without token ids were left out, for example text__f" in said
    assert [line.removeprefix("not imported: ") for line in said.splitlines() if line.startswith("not imported")] == [
        "metrics.extra.reasoning_tokens (6)",
        "rollout_details.extra.stop_reason (3)",
        "steps of several requests (1)",
        "subagent_trajectory_ref to a file that is not beside it (1)",
        "verifier_result.rewards.style (1)",
    ]
    (target,) = find_targets(tmp_path / "out")
    assert audit_target(target).totals()["clean"] == 12  # their routes are proven with them


def test_routes_can_be_left_out(job, tmp_path, capsys):
    command = ["import", "harbor", str(job / "one__a"), "--out", str(tmp_path / "out"), "--no-routes"]
    assert main(command) == 0
    assert all(record.routes is None for record in RolloutStore(tmp_path / "out"))
    assert "not imported: rollout_details.extra.routed_experts (3)" in capsys.readouterr().out


def changed(job, change):
    path = job / "one__a/result.json"
    raw = json.loads(path.read_text())
    change(raw["agent_result"]["rollout_details"][0]["extra"])
    path.write_text(json.dumps(raw))
    return list(TrialReader().read(path))


@pytest.mark.parametrize(
    "value, message",
    [
        ([None, None, [[[0, 1]]] * 3], None),  # lists are taken as well; another trajectory has no routes
        ([[[[0, 1]]] * 3, [[[0, 1]]] * 4, None], "4 rows, expected 5"),
        ([[[[0, 0]]] * 3, None, None], "routes of token 0 name an expert twice"),
        ([[[[0, 1]]] * 3, [[[0, 1], [2, 3]]] * 5, None], "of different models"),
        (["gASVAAAA", None, None], "routed_experts: "),
        ([[[[0, 1]]] * 3], "1 entries for 3 answers"),
        ([[[0, 1]] * 3, None, None], r"got int64 \(3, 2\)"),
    ],
)
def test_routes_that_do_not_fit_are_refused(job, value, message):
    change = lambda extra: extra.update(routed_experts=value)  # noqa: E731
    if message is None:
        first, second = changed(job, change)
        assert first.routes is None and second.routes.shape == (4, 1, 2)
        return
    with pytest.raises(T1Error, match=message):
        changed(job, change)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_trial_is_imported_or_refused_by_name(tmp_path_factory, data):
    files = json.loads((HERE / "harbor_trials.json").read_text())["files"]
    trial = data.draw(st.sampled_from(["job/one__a", "job/steps__d", "job/atif__e", "job/late__c"]))
    files = {name: json.loads(content) for name, content in files.items() if name.startswith(f"{trial}/")}
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = data.draw(spoilt(files[name]))
    directory = tmp_path_factory.mktemp("trial")
    for file, content in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    try:
        for item in TrialReader().read(directory / trial):
            if not isinstance(item, str):
                item.record()
    except T1Error as error:
        assert error.where


def test_several_rewards_without_a_name_are_refused(job):
    path = job / "one__a/result.json"
    raw = json.loads(path.read_text())
    raw["verifier_result"]["rewards"] = {"style": 1.0, "speed": 2.0}
    path.write_text(json.dumps(raw))
    with pytest.raises(T1Error, match="several rewards, none of them called reward: style, speed"):
        list(TrialReader().read(path))
