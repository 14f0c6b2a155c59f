"""A phase that dies in its middle goes on from its last checkpoint, and ends as one that nobody disturbed."""

from __future__ import annotations

import errno
import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_t1.errors import MismatchError
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, missing_outputs
from megatron_t1.training.progress import forget_progress
from megatron_t1.trajectory.store import RolloutStore
from tests.training.synthetic import episode, write_rollout
from tests.training.weights import checkpoint_parameters

pytestmark = pytest.mark.slow


class Died(Exception):
    pass


@pytest.fixture
def die(monkeypatch):
    """die(after): the phase ends after that mini-batch; returns where the draws of a generator are collected."""
    from megatron_t1.training.progress import Progress

    took, drawn = Progress.took, []

    def arm(after: int | None) -> list[float]:
        drawn.clear()

        def faulty(self, sums):
            took(self, sums)
            drawn.append(float(torch.rand(())))
            if self.taken == after:
                raise Died

        monkeypatch.setattr(Progress, "took", faulty)
        return drawn

    return arm


def sft(config):
    directory = Path(config.run.dir) / "demonstrations"
    RolloutStore(directory).add_many(episode(f"d{number}-0", demonstration=True, turns=2) for number in range(12))
    config.train.sft = replace(
        config.train.sft, demonstrations=str(directory), tokens=1500, tokens_per_step=300, holdout=3, checkpoint_every=2
    )


def warmup(config):
    """Targets that follow the critic: each epoch has its own."""
    config.train.gae.lambda_critic = 0.9
    config.train.critic = replace(config.train.critic, warmup_epochs=3, checkpoint_every=1)


def warmup_with_best(config):
    config.train.critic = replace(
        config.train.critic, lr=3e-3, warmup_holdout=3, warmup_epochs=12, warmup_patience=1, checkpoint_every=0
    )


def actor(config):
    config.train.actor = replace(
        config.train.actor, epochs=2, old_logprobs="recomputed", correction="truncated", kl_coef=0.1, checkpoint_every=1
    )


CASES = {  # name: (role, what is set, mini-batch it dies after, what it leaves)
    "sft": ("sft", sft, 3, "checkpoints/sft/iter_0001"),
    "warmup in an epoch": ("critic", warmup, 3, "checkpoints/critic/iter_0001"),
    "warmup between epochs": ("critic", warmup, 5, "checkpoints/critic/iter_0001"),
    "warmup with a best critic": ("critic", warmup_with_best, 5, "checkpoints/critic/iter_0001"),
    "actor": ("actor", actor, 3, "checkpoints/actor/iter_0001"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_died_ends_as_what_nobody_disturbed(make_run, run, backend, die, case, capsys):  # open-instruct#1523
    role, prepare, after, leaves = CASES[case]
    outcome = {}
    for name in ("undisturbed", "disturbed"):
        config = make_run(name, warmup=0 if role == "actor" else 1)
        if role == "actor":
            die(None)
            run("critic", config)
        prepare(config)
        drawn = die(after if name == "disturbed" else None)
        torch.manual_seed(0)  # as the start of a phase's processes does
        if name == "disturbed":
            with pytest.raises(Died):
                run(role, config)
            assert not (Path(config.run.dir) / leaves).exists()
            torch.manual_seed(1)  # which must not matter
            die(None)
            capsys.readouterr()
        result = run(role, config)
        saved = RunPaths.of(config.run.dir).progress(0, role)
        assert ("going on in the middle" in capsys.readouterr().out) == (name == "disturbed")
        weights = checkpoint_parameters(
            Path(config.run.dir) / leaves, backend, "critic" if "critic" in leaves else "actor"
        )
        assert len(list(saved.glob("step_*"))) <= 1 and not list(saved.glob("*.partial"))
        metrics = {key: value for key, value in result.metrics.items() if "per_s" not in key}
        details = {key: value for key, value in result.details.items() if key not in ("model", "demonstrations")}
        outcome[name] = (weights, metrics, details, list(drawn))
    (weights, metrics, details, drawn), (other, other_metrics, other_details, later) = outcome.values()
    assert torch.equal(weights, other)
    assert metrics == pytest.approx(other_metrics, rel=0, abs=0, nan_ok=True) and details == other_details
    assert 0 < len(later) < len(drawn) and later == drawn[-len(later) :]  # the generators go on too


def died_in_its_middle(make_run, run, die, after=3):
    config = make_run(warmup=1)
    warmup(config)
    die(after)
    with pytest.raises(Died):
        run("critic", config)
    die(None)
    return config


def test_another_configuration_or_other_records_are_refused_by_name(make_run, run, die, model):
    config = died_in_its_middle(make_run, run, die)
    rate = config.train.critic.lr
    config.train.critic.lr = 1e-4
    with pytest.raises(MismatchError, match=rf"train.critic.lr: the checkpoint has {rate}, now 0.0001") as caught:
        run("critic", config)
    assert "delete" in caught.value.remedy and "progress" in caught.value.remedy
    config.train.critic.lr = rate
    directory = RunPaths.of(config.run.dir).rollouts(0)
    shutil.rmtree(directory)
    write_rollout(directory, model, seed=7)
    with pytest.raises(MismatchError, match="records: the checkpoint has '9 records, .*now '9 records, "):
        run("critic", config)


def test_another_start_is_refused_by_name(make_run, run, die, tmp_path):
    """The model that the phase began from is in its checkpoint, and the other one's settings would be exported."""
    config = make_run()
    sft(config)
    die(3)
    with pytest.raises(Died):
        run("sft", config)
    die(None)
    config.model.path = str(shutil.copytree(config.model.path, tmp_path / "moved"))
    with open(tmp_path / "moved" / "config.json", "a") as file:
        file.write(" ")
    with pytest.raises(MismatchError, match="start: the checkpoint has 'model .*now 'model "):
        run("sft", config)


def test_a_smaller_micro_batch_goes_on_in_the_middle(make_run, run, die, capsys):
    """As the error of a GPU that has too little memory advises."""
    config = died_in_its_middle(make_run, run, die)
    config.train.capacity //= 2
    capsys.readouterr()
    run("critic", config)
    assert "going on in the middle" in capsys.readouterr().out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def standing(config, backend):
    """(progress of this phase as it is on disk, its samples), as the phase makes them."""
    from megatron_t1.training.context import Context
    from megatron_t1.training.critic import origin
    from megatron_t1.training.progress import Progress
    from megatron_t1.training.samples import load_rollouts

    context = Context(config, backend, 0)
    samples = load_rollouts(context.paths.rollouts(0), config, context.contract_facts()).samples
    return Progress(context, "critic", "critic", origin(context), samples), samples


def test_a_damaged_file_of_any_kind_is_passed_over_by_name(make_run, run, backend, die, capsys):
    from megatron_t1.training.context import Context
    from megatron_t1.training.critic import new_critic

    config = died_in_its_middle(make_run, run, die, after=4)  # before it could save the fourth, in the second epoch
    paths, engine = RunPaths.of(config.run.dir), new_critic(Context(config, backend, 0))
    step = paths.progress(0, "critic") / "step_0000003"
    fields = next(paths.progress(0, "critic").glob("fields_*/*.safetensors"))
    files = [*step.iterdir(), fields, *paths.values(0).iterdir()]
    assert {path.name for path in files} >= {"checkpoint.json", "state.json", "common.pt", ".metadata", "metadata.json"}
    assert {path.name for path in files} >= {"__0_0.distcp", "rank_0_random.safetensors"}
    for path in files:
        whole = path.read_bytes()
        for damage in (flip, cut, Path.unlink):
            damage(path)
            progress, samples = standing(config, backend)
            assert progress.resumed(lambda: engine, samples) is None, (path, damage)
            assert f"the checkpoint {step} is passed over: " in capsys.readouterr().out
            assert progress.taken == 0 and not progress.steps
            path.write_bytes(whole)
    progress, samples = standing(config, backend)
    assert progress.resumed(lambda: engine, samples) is engine and progress.taken == 3

    flip(step / "__0_0.distcp")  # the phase then begins anew, and ends as one that nobody disturbed
    result = run("critic", config)
    shutil.rmtree(paths.progress(0, "critic"))
    assert run("critic", config).metrics == result.metrics


def test_the_last_good_one_is_taken(make_run, run, backend, die, capsys):
    config = make_run(warmup=1)
    warmup_with_best(config)
    config.train.critic.checkpoint_every = 1
    die(6)
    with pytest.raises(Died):
        run("critic", config)
    die(None)
    steps = sorted(RunPaths.of(config.run.dir).progress(0, "critic").glob("step_*"))
    assert len(steps) == 2  # the best critic so far, and the newest
    flip(steps[1] / "checkpoint.json")
    capsys.readouterr()
    disturbed = run("critic", config)
    said = capsys.readouterr().out
    assert f"{steps[1]} is passed over" in said and f"after {int(steps[0].name[5:])} mini-batches" in said
    shutil.rmtree(steps[0].parent)
    undisturbed = run("critic", config)
    assert disturbed.metrics == pytest.approx(undisturbed.metrics, rel=0, abs=0, nan_ok=True)


def test_killed_before_its_result_is_written_a_warmup_still_has_its_best_critic(make_run, run, capsys):
    config = make_run(warmup=1)
    warmup_with_best(config)
    first = run("critic", config)  # leaves the best critic, and no result
    capsys.readouterr()
    again = run("critic", config)
    assert "going on in the middle of the phase" in capsys.readouterr().out
    assert again.metrics == pytest.approx(first.metrics, rel=0, abs=0, nan_ok=True)
    assert again.details == first.details
    assert missing_outputs(again, Path(config.run.dir), digests=True) == []


def test_a_best_critic_is_left_where_the_file_system_has_no_hard_links(make_run, run, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    config = make_run(warmup=1)
    warmup_with_best(config)
    with monkeypatch.context() as patch:
        patch.setattr("os.link", refuse)
        result = run("critic", config)
    assert missing_outputs(result, Path(config.run.dir), digests=True) == []


def test_checkpoints_may_lie_on_another_disk(make_run, run, die, tmp_path, capsys):
    config = make_run(warmup=1)
    warmup(config)
    paths = RunPaths.of(config.run.dir)
    for place in (paths.root / "checkpoints", paths.progress(0, "critic")):
        disk = tmp_path / "disk" / place.name
        disk.mkdir(parents=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(disk)
    die(3)
    with pytest.raises(Died):
        run("critic", config)
    die(None)
    result = run("critic", config)
    assert "after 2 mini-batches" in capsys.readouterr().out
    assert missing_outputs(result, paths.root, digests=True) == []
    assert all(file.path.startswith(("checkpoints/critic/iter_0001/", "values/")) for file in result.outputs)


def test_a_file_beside_the_model_does_not_make_it_another(make_run, run, die, model, tmp_path, capsys):
    config = make_run(warmup=1)
    config.model.path = str(shutil.copytree(model, tmp_path / "own"))
    warmup(config)
    die(3)
    with pytest.raises(Died):
        run("critic", config)
    die(None)
    (tmp_path / "own" / "README.md").write_text("read me")
    run("critic", config)
    assert "going on in the middle of the phase" in capsys.readouterr().out
    (tmp_path / "own" / "added.json").write_text("{}")
    with pytest.raises(MismatchError, match="start: the checkpoint has"):
        run("critic", config)


def test_an_engine_that_no_checkpoint_could_fill_is_gone(make_run, run, backend, die):
    """The phase begins anew with one of its own, and two may not fit into memory."""
    from megatron_t1.training.context import Context
    from megatron_t1.training.critic import new_critic

    config = died_in_its_middle(make_run, run, die)
    built = []

    def build():
        engine = new_critic(Context(config, backend, 0))
        built.append(weakref.ref(engine))
        return engine

    flip(next(RunPaths.of(config.run.dir).progress(0, "critic").glob("step_*/__0_0.distcp")))
    progress, samples = standing(config, backend)
    gc.disable()
    try:
        assert progress.resumed(build, samples) is None
        assert [engine() for engine in built] == [None]
    finally:
        gc.enable()


def test_a_finished_phase_keeps_none(make_run, run, die):
    from megatron_t1.training.progress import forget_progress

    config = died_in_its_middle(make_run, run, die)
    paths = RunPaths.of(config.run.dir)
    forget_progress(paths)
    assert paths.progress(0, "critic").is_dir()  # not finished
    run("critic", config).write(paths.phase(0, "critic"))
    forget_progress(paths, but=paths.progress(0, "critic"))
    assert paths.progress(0, "critic").is_dir()  # it may be another attempt's
    forget_progress(paths)
    assert [path.name for path in paths.phase(0, "critic").iterdir()] == ["result.json"]


def test_what_another_node_still_has_open_ends_no_phase(tmp_path, monkeypatch):
    """An NFS client gives a deleted file that somebody reads another name, and the directory isn't empty."""
    paths = RunPaths.of(tmp_path)
    directory = paths.progress(0, "critic")
    for place in (directory / "step_0000001", directory.with_name("progress.deleting")):
        place.mkdir(parents=True)
        (place / ".nfs0001").touch()
    (directory.parent / RESULT_FILE).touch()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        forget_progress(paths)
    forget_progress(paths)
    assert [entry.name for entry in directory.parent.iterdir()] == [RESULT_FILE]
