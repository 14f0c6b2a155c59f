"""Other people's rollouts: what the record holds, that it can be audited and trained on, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_t1.audit.guard import require_no_drift
from megatron_t1.audit.run import audit_target
from megatron_t1.audit.targets import find_targets
from megatron_t1.cli import main
from megatron_t1.config.compose import load_run_config, save
from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.importing.harbor import TrialReader
from megatron_t1.importing.jsonlines import read_lines
from megatron_t1.loop.lock import LOCK_FILE, RunLock
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import require_recorded
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.selection import trainable
from megatron_t1.trajectory.store import RolloutStore
from tests.importing.spoiling import spoilt
from tests.rollout.conftest import tiny_model  # noqa: F401
from tests.trajectory.conftest import CONTRACT

LINE = {
    "id": "a/b 1",
    "task": "t",
    "ids": [1, 2, 10, 11, 3, 4, 12, 13, 14],
    "mask": [0, 0, 1, 1, 0, 0, 1, 0, 1],
    "logprobs": [None, None, -0.5, -1, None, None, -2, -0.25, -3],
    "passed": 2,
    "total": 3,
    "reward": 0.5,
}


def lines(tmp_path, *changes):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({**LINE, "id": f"line-{n}", **change}) for n, change in enumerate(changes)))
    return path


@pytest.fixture
def contract_file(tmp_path):
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(CONTRACT.to_json()))
    return path


def test_json_lines_become_records_with_their_own_mask(tmp_path, contract_file):
    path = lines(tmp_path, {"id": "a/b 1", "routes": ROUTES}, {"id": "second", "turn": [0] * 4 + [0, 0, 3, 3, 3]})
    assert main(["import", "jsonl", str(path), "--out", str(tmp_path / "out"), "--contract", str(contract_file)]) == 0
    first, second = RolloutStore(tmp_path / "out")
    assert first.header.trajectory_id == "a_b_1" and first.header.extra["imported"] == "data.jsonl, line 1"
    assert first.ids.tolist() == LINE["ids"]
    assert first.loss_mask.astype(int).tolist() == LINE["mask"]  # position 7 was sampled, and is excluded
    assert np.flatnonzero(first.excluded).tolist() == [7]
    assert first.origin.tolist() == [0, 0, 1, 1, 3, 3, 1, 1, 1] and first.turn.tolist() == [0] * 6 + [1] * 3
    assert np.array_equal(first.logprobs, np.array(LINE["logprobs"], np.float32), equal_nan=True)
    assert first.routed.tolist() == [True] * 8 + [False] and first.routes.dtype == np.uint8
    assert first.routes[6].tolist() == ROUTES[6]
    assert first.header.reward == {"total": 0.5} and first.header.verdict.passed == 2
    assert second.turn[-1] == 3 and second.header.policy_versions == (0,) * 4
    assert trainable(first) is None and first.header.contract == CONTRACT
    assert main(["audit", str(tmp_path / "out")]) == 0
    (target,) = find_targets(tmp_path / "out")
    assert audit_target(target).totals()["unproven"] == 2


def test_supervised_lines_have_no_logprobs(tmp_path):
    (foreign,) = read_lines(lines(tmp_path, {"logprobs": None, "passed": None, "total": None, "reward": None}))
    record = foreign.record()
    assert record.origin.tolist() == [0, 0, 2, 2, 3, 3, 2, 3, 2] and record.excluded is None
    assert record.header.verdict is None and record.header.policy_versions == ()


def test_exchanges_of_a_line_are_evidence(tmp_path):
    exchanges = [
        {"prompt_ids": [1, 2], "completion_ids": [10, 11], "logprobs": [-0.5, -1]},
        {"prompt_ids": [1, 2, 10, 11, 3, 4], "completion_ids": [12, 13, 14], "logprobs": [-2, -0.25, -3]},
    ]
    path = lines(tmp_path, {"exchanges": exchanges})
    main(["import", "jsonl", str(path), "--out", str(tmp_path / "out")])
    (target,) = find_targets(tmp_path / "out")
    result = audit_target(target)
    assert [one.status for one in result.trajectories] == ["clean"] and not result.files
    assert result.trajectories[0].excluded == 1  # the import's own mask is no mistake


def exchange(prompt, completion, logprobs):
    return {"prompt_ids": prompt, "completion_ids": completion, "logprobs": logprobs}


FIRST = exchange([1, 2], [10, 11], [-0.5, -1])
SECOND = exchange([1, 2, 10, 11, 3, 4], [12, 13, 14], [-2, -0.25, -3])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": [1, 2, 10, 99, 3, 4, 12, 13, 14]}, "token 3 is 99 in ids, and 11 in the exchanges"),
        ({"exchanges": [FIRST]}, "token 6 counts as sampled, but no exchange has sampled it"),
        ({"exchanges": [FIRST, {**SECOND, "prompt_ids": [1, 2, 10, 11, 3, 5]}]}, "token 5 is 4 in ids, and 5 in"),
        ({"exchanges": [FIRST, exchange(SECOND["prompt_ids"], [12, 13, 14, 15], [-2, -0.25, -3, -1])]}, "isn't there"),
        ({"exchanges": [FIRST, {**SECOND, "logprobs": [-2, -0.25, -3.5]}]}, "log-prob of token 8 is -3.0 in logprobs"),
        ({"logprobs": None, "mask": [0, 0, 1, 1, 0, 0, 1, 1, 1]}, "log-prob of token 2 is nan"),
        ({"mask": [0, 0, 1, 0, 0, 0, 1, 0, 1], "logprobs": [None, None, -0.5, None, None, None, -2, -0.25, -3]},
         "token 3 was sampled by exchange 0, but has no log-prob"),
        ({"turn": [0] * 9}, "token 6 is in turn 0, and the exchanges' turn 1"),
    ],
)  # fmt: skip
def test_exchanges_that_contradict_the_trajectory_are_refused(tmp_path, change, message):
    path = lines(tmp_path, {}, {"exchanges": [FIRST, SECOND], **change})
    with pytest.raises(T1Error, match=message) as caught:
        [foreign.record() for foreign in read_lines(path)]
    assert "line 2" in caught.value.where
    assert main(["import", "jsonl", str(path), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": [1, 2]}, "mask has 9 entries for 2 ids"),
        ({"ids": "12"}, "ids is not a list of token ids"),
        ({"ids": [1.5] * 9}, "ids is not a list of token ids"),
        ({"mask": [0] * 9}, "the mask keeps no token"),
        ({"mask": [2] * 9}, "something else than 0 and 1"),
        ({"logprobs": [None] * 9}, "token 2 is to be trained on, but has no log-prob"),
        ({"logprobs": ["x"] * 9}, "logprobs is not a list of numbers"),
        ({"logprobs": [-1] * 8}, "logprobs has 8 entries"),
        ({"logprobs": [None, None, 0.5, -1, None, None, -2, -1, -3]}, "can't be positive"),
        ({"routes": [[[0, 0]]] * 9}, "routes of token 0 name an expert twice"),
        ({"routes": [[[0, 1]]] * 8}, "routes has 8 entries"),
        ({"routes": [[[0, 1]], [[0]]] * 4}, "rows of different shapes"),
        ({"routes": [[[0, -1]]] * 9}, "non-negative"),
        ({"typo": 1}, "unknown field"),
        ({"logprobs": [None, None, float("-inf"), -1, None, None, -2, -1, -3]}, "logprobs: number 2 is -inf"),
        ({"logprobs": [float("nan")] * 9}, "logprobs: number 0 is nan"),
        ({"logprobs": [-(10**400)] * 9}, "logprobs: number 0 is a number of about 400 digits"),
        ({"mask": [10**400] * 9}, "mask: number 0 is a number of about 400 digits"),
        ({"routes": [[[0, 65536]]] * 9}, "routes of token 0 name expert 65536, a record holds up to 65535"),
        ({"routes": [[[0, 2**63]]] * 9}, "must be non-negative integers"),
        ({"turn": [0] * 8 + [65536]}, "turn of token 8 is 65536, a record holds up to 65535"),
        ({"turn": [-1] * 9}, "turn of token 0 is -1"),
        ({"turn": [1, 0] + [2] * 7}, "goes back from turn 1 to 0"),
        ({"policy": -1}, "policy is -1"),
        ({"policy": 2**31}, "policy is 2147483648, expected a whole number"),
        ({"passed": -1}, "passed is -1"),
        ({"passed": 4}, "passed is 4, of a total of 3"),
        ({"passed": None}, "passed is None and total is 3"),
        ({"total": float("inf")}, "total is inf"),
        ({"total": float("nan")}, "total is nan"),
        ({"total": 10**400}, "total is a number of about 400 digits"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": 1e300}, "reward is 1e.300"),
        ({"reward": 10**400}, "reward is a number of about 400 digits"),
        ({"reward": "high"}, "reward is 'high'"),
        ({"contract": {**CONTRACT.to_json(), "num_experts": "x"}}, "no sampling contract: num_experts is 'x'"),
        ({"contract": {**CONTRACT.to_json(), "temperature": float("nan")}}, "no sampling contract: temperature is nan"),
        ({"exchanges": 5}, "exchanges is 5, expected a list"),
        ({"exchanges": [{"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.5]}]}, "can't be positive"),
        ({"contract": {"temperature": 1}}, "no sampling contract"),
        ({"mask": [1, 0, 1, 1, 0, 0, 1, 0, 1], "logprobs": None}, "token 0 counts as sampled"),
        ({"logprobs": [-0.5, None, *LINE["logprobs"][2:]]}, "token 0 counts as sampled"),
        ({"logprobs": [None, None, -1e-60, *LINE["logprobs"][3:]]}, "number 2 is -1e-60, which is 0 as a float32"),
        ({"reward": 1e-60}, "reward is 1e-60, which is 0 as a float32"),
        ({"id": {"a": 1}}, "id is {'a': 1}, expected text"),
        ({"id": ""}, "id is '', expected text"),
        ({"id": True}, "id is True, expected text"),
        ({"task": ["t"]}, "task is .'t'., expected text"),
        ({"task": "half \ud800"}, "task is 'half .*, expected text"),
        ({"exchanges": [{**FIRST, "typo": 1}, SECOND]}, "unknown field.s. 'typo'"),
        ({"exchanges": [{"prompt_ids": [1], "completion_ids": [2], "logprobs": []}]}, "0 log-probabilities of 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(tmp_path, change, message):
    path = lines(tmp_path, {}, change)
    with pytest.raises(T1Error, match=message) as caught:
        [foreign.record() for foreign in read_lines(path)]
    assert "line 2" in caught.value.where


ROUTES = [[[n % 5, 7], [1, 2], [3, 4]] for n in range(8)] + [None]


@settings(max_examples=150, deadline=None)
@given(spoilt({**LINE, "routes": ROUTES, "turn": [0] * 6 + [1] * 3, "exchanges": [FIRST, SECOND],
               "contract": CONTRACT.to_json(), "policy": 3}))  # fmt: skip
def test_whatever_stands_in_a_line_is_imported_or_refused_by_name(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("lines") / "data.jsonl"
    path.write_text(json.dumps(line))
    try:
        for foreign in read_lines(path):
            foreign.record()
    except T1Error as error:
        assert "line 1" in error.where


def trial(directory, details, *, reward=None, ctrf=None, steps=None):
    directory.mkdir(parents=True)
    result = {
        "task_name": "build-it", "trial_name": directory.name,
        "agent_result": {"rollout_details": details},
        "verifier_result": {"rewards": {"reward": reward}} if reward is not None else None,
    }  # fmt: skip
    (directory / "result.json").write_text(json.dumps(result))
    if ctrf is not None:
        (directory / "verifier").mkdir()
        tests = [{"name": str(n), "status": "passed" if n < ctrf else "failed"} for n in range(5)]
        (directory / "verifier/ctrf.json").write_text(json.dumps({"results": {"tests": tests}}))
    if steps is not None:
        (directory / "agent").mkdir()
        (directory / "agent/trajectory.json").write_text(json.dumps({"schema_version": "ATIF-v1.5", "steps": steps}))


DETAILS = {
    "prompt_token_ids": [[1, 2], [1, 2, 5, 6, 3], [1, 9]],  # the third doesn't go on: the history was summarised
    "completion_token_ids": [[5, 6], [7], [8, 8]],
    "logprobs": [[-0.5, -0.25], [-1.0], [-2.0, -3.0]],
}


def test_harbor_trials_are_stitched_by_token_ids(tmp_path, contract_file, capsys):
    trial(tmp_path / "job/one__x", [DETAILS], reward=1.0)
    trial(tmp_path / "job/two__y", [DETAILS], ctrf=3)
    trial(tmp_path / "job/text__z", None, reward=0.0)
    (tmp_path / "job/result.json").write_text(json.dumps({"n_trials": 3}))
    out = tmp_path / "out"
    assert main(["import", "harbor", str(tmp_path / "job"), "--out", str(out), "--contract", str(contract_file)]) == 0
    assert "1 trials without token ids" in capsys.readouterr().out
    records = {record.header.trajectory_id: record for record in RolloutStore(out)}
    assert sorted(records) == ["one__x+0", "one__x+1", "two__y+0", "two__y+1"]
    first = records["one__x+0"]
    assert first.ids.tolist() == [1, 2, 5, 6, 3, 7]
    assert np.flatnonzero(first.loss_mask).tolist() == [2, 3, 5]
    assert first.logprobs[first.loss_mask].tolist() == [-0.5, -0.25, -1.0]
    assert first.header.reward == {"total": 1.0} and first.header.task == "build-it"
    assert records["one__x+1"].ids.tolist() == [1, 9, 8, 8]
    assert records["two__y+0"].header.reward == {"total": 0.75} and records["two__y+0"].header.verdict.total == 5
    assert sum(int(record.loss_mask.sum()) for record in records.values()) == 10  # every sampled token once
    assert require_no_drift(out) == 4
    (target,) = find_targets(out)
    # Nobody says under what sampling options the trials were made, so nothing contradicts the contract given.
    assert audit_target(target).totals()["clean"] == 4


def test_atif_steps_with_token_ids(tmp_path):
    step = {"source": "agent", "metrics": {
        "prompt_token_ids": [1, 2], "completion_token_ids": [5, 6], "logprobs": [-1, -2]}}  # fmt: skip
    again = {"source": "agent", "metrics": {"prompt_token_ids": [1, 2, 5, 6, 4], "completion_token_ids": [7],
                                            "logprobs": [-3]}}  # fmt: skip
    steps = [{"source": "user", "message": "x"}, step, {**step, "is_copied_context": True}, again]
    trial(tmp_path / "a", [], reward=0.5, steps=steps)
    (foreign,) = TrialReader().read(tmp_path / "a")
    assert foreign.ids.tolist() == [1, 2, 5, 6, 4, 7] and foreign.reward == 0.5
    (alone,) = TrialReader().read(tmp_path / "a/agent/trajectory.json")
    assert alone.ids.tolist() == foreign.ids.tolist() and alone.reward is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logprobs": [[-1.0]]}, "3 prompts, 3 answers and 1 log-probs"),
        ({"logprobs": [[-1.0], [-1.0], [-1.0]]}, "1 log-probabilities of 2 tokens"),
        ({"completion_token_ids": [["a"], [7], [8]]}, "not a list of token ids"),
        ({"completion_token_ids": 5}, "completion_token_ids is 5, expected a list"),
        ({"logprobs": [[-0.5, -0.25], [0.75], [-2.0, -3.0]]}, "number 0 is 0.75, a log-probability can't be positive"),
        ({"logprobs": [[-0.5, -0.25], [float("nan")], [-2.0, -3.0]]}, "logprobs: number 0 is nan"),
        ({"logprobs": [[-0.5, -0.25], [-1e39], [-2.0, -3.0]]}, "logprobs: number 0 is -1e.39"),
    ],
)
def test_trials_that_contradict_themselves_are_refused(tmp_path, change, message):
    trial(tmp_path / "a", [{**DETAILS, **change}])
    with pytest.raises(T1Error, match=message):
        list(TrialReader().read(tmp_path / "a"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"verifier_result": {"rewards": {"reward": "high"}}}, "rewards is 'high'"),
        ({"verifier_result": {"rewards": float("nan")}}, "rewards is nan"),
        ({"verifier_result": {"rewards": {"reward": 10**400}}}, "rewards is a number of about 400 digits"),
        ({"verifier_result": [1]}, "verifier_result is .1., expected an object"),
        ({"agent_result": "x"}, "agent_result is 'x', expected an object"),
        ({"agent_result": {"rollout_details": {"a": 1}}}, "rollout_details is .*, expected a list"),
        ({"reward_valid": "false"}, "reward_valid is 'false', expected true or false"),
        ({"trial_name": {"a": 1}}, "trial_name is .*, expected text"),
        ({"task_name": [1]}, "task_name is .*, expected text"),
        (
            {"agent_result": {"rollout_details": [{**DETAILS, "extra": {"routed_experts": ["UEsDBA==", None, None]}}]}},
            "routed_experts: not a .npy file",
        ),
    ],
)
def test_results_of_another_form_are_refused(tmp_path, change, message):
    trial(tmp_path / "a", [DETAILS])
    path = tmp_path / "a/result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(T1Error, match=message) as caught:
        list(TrialReader().read(tmp_path / "a"))
    assert "result.json" in caught.value.where


def test_a_report_of_another_form_is_refused(tmp_path):
    trial(tmp_path / "a", [DETAILS], ctrf=2)
    for content in ([1], {"results": 3}, {"results": {"tests": [1]}}):
        (tmp_path / "a/verifier/ctrf.json").write_text(json.dumps(content))
        with pytest.raises(T1Error, match="expected"):
            list(TrialReader().read(tmp_path / "a"))


def test_real_trials_without_token_ids_say_so(tmp_path):
    trial(tmp_path / "a", None, reward=1.0, steps=[{"source": "agent", "message": "hi"}])
    assert main(["import", "harbor", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 1


@pytest.fixture
def run(tmp_path):
    """A run whose rollout of iteration 0 is finished."""
    paths = RunPaths.of(tmp_path / "run")
    save(Config(), paths.config)
    step = FinishedStep(0, "rollout", "0" * 64, "x", {}, 1.0, 1, 0, 0, 0.0)
    Manifest({}, "", 0, 0.0, finished=[step]).write(paths.manifest)
    return paths


def test_two_lines_of_one_name_are_refused_and_leave_nothing(tmp_path, capsys):
    path = lines(tmp_path, {"id": "same", "exchanges": [FIRST, SECOND]}, {"id": "same"})
    assert main(["import", "jsonl", str(path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "another trajectory is called 'same'" in said and "line 2; the other one: data.jsonl, line 1" in said
    assert not (tmp_path / "out").exists()
    path = lines(tmp_path, {"exchanges": [FIRST, SECOND]})
    assert main(["import", "jsonl", str(path), "--out", str(tmp_path / "out")]) == 0
    before = sorted((tmp_path / "out").iterdir())
    assert main(["import", "jsonl", str(path), "--out", str(tmp_path / "out")]) == 1
    assert sorted((tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize("iteration, status, said", [
    ("-1", 2, "iterations count from 0"),
    ("0", 1, "the rollout of iteration 0 is finished"),
    ("1", 1, "records of iteration 1 are there already"),
    ("1000", 1, "none with the number 1000"),
])  # fmt: skip
def test_an_import_never_overwrites_a_step(tmp_path, run, capsys, iteration, status, said):
    (run.rollouts(1)).mkdir(parents=True)
    (run.rollouts(1) / "x.safetensors").write_bytes(b"somebody's")
    command = ["import", "jsonl", str(lines(tmp_path, {})), "--run", str(run.root), "--iteration", iteration]
    assert main(command) == status
    error = capsys.readouterr().err
    assert said in error and (status == 2 or "remedy" in error)
    assert not (run.root / "phases").exists() and not (run.root / LOCK_FILE).exists()


def test_an_import_needs_a_run_that_nobody_works_on(tmp_path, run, capsys):
    command = ["import", "jsonl", str(lines(tmp_path, {})), "--iteration", "2", "--run"]
    assert main([*command, str(tmp_path)]) == 1 and "there is no run" in capsys.readouterr().err
    with RunLock(run.root):
        assert main([*command, str(run.root)]) == 1
    assert "another loop works on this run" in capsys.readouterr().err and not run.rollouts(2).exists()
    assert main([*command, str(run.root)]) == 0


def test_an_import_can_begin_a_run(tmp_path, tiny_model, capsys):  # noqa: F811
    begin = ["--run", str(tmp_path / "new"), "--iteration", "0", "--options"]
    command = ["import", "jsonl", str(lines(tmp_path, {}))]
    tiny = [f"model.path={tiny_model}", "model.architecture.vocab_size=0"]
    assert main([*command, *begin, *tiny, "train.gae.gamma=2"]) == 2
    assert "train.gae.gamma=2" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main([*command, *begin, *tiny, "train.actor.minibatches=1"]) == 0
    paths = RunPaths.of(tmp_path / "new")
    assert Manifest.read(paths.manifest).keys == {(0, "rollout")}
    assert load_run_config(paths.root).train.actor.minibatches == 1
    capsys.readouterr()
    assert main([*command, *begin, *tiny]) == 2
    assert "has its options already" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "out"), "--options", *tiny]) == 2


def test_an_import_can_be_the_rollout_of_an_iteration(tmp_path, contract_file, run):
    command = ["import", "jsonl", str(lines(tmp_path, {"routes": ROUTES})), "--contract", str(contract_file)]
    assert main([*command, "--run", str(tmp_path / "run"), "--iteration", "2"]) == 0
    paths = RunPaths.of(tmp_path / "run")
    require_recorded(paths, 2, "rollout", paths.rollouts(2))  # what a training phase asks first
    require_no_drift(paths.rollouts(2))
    assert (2, "rollout") in Manifest.read(paths.manifest).keys  # so that the loop's training phases go on from it
    (record,) = RolloutStore(paths.rollouts(2))
    facts = {"tokenizer_sha256": "0" * 64, "num_experts": 16, "temperature": 0.7}
    record.header.contract.require_equal(facts, where="x")
    assert trainable(replace(record)) is None
    assert record.logprobs[record.loss_mask].tolist() == [-0.5, -1, -2, -3]
    assert (record.origin == Origin.SAMPLED).sum() == 5
    assert main([*command, "--out", "x", "--run", "y", "--iteration", "0"]) == 2
