"""Phases outside the loop, in directories of their own: what they refuse, show and prove."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from megatron_t1 import sealed
from megatron_t1.config.compose import absolute, compose
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.loop import outside
from megatron_t1.loop.launcher import Exit, Stopped
from megatron_t1.loop.lock import LOCK_FILE, OtherLoop, this_process
from megatron_t1.loop.outside import phase_outside_the_loop, run_outside
from megatron_t1.loop.verify import verify_run
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, WrittenFile
from megatron_t1.report.outside import print_outside, write_warmup_plot

EXPLAINED = "held_out_explained_variance"
HISTORY = [
    {"step": 0, "epoch": 0.0, EXPLAINED: 0.01},
    {"step": 4, "epoch": 0.5, EXPLAINED: 0.25, "value_loss": 0.0625},
    {"step": 8, "epoch": 1.0, EXPLAINED: 0.125, "value_loss": 0.03125},
]
WARM = {
    "batch/trajectories": 256.0, "critic/held_out_trajectories": 64.0, f"critic/{EXPLAINED}_before": 0.01,
    f"critic/{EXPLAINED}": 0.25, f"critic/{EXPLAINED}_task_mean": 0.375, "critic/warmup_best_epoch": 0.5,
    "critic/warmup_stopped_rising": 1.0,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text(name)
    return directory


@pytest.fixture
def config(tmp_path, model):
    return absolute(compose([f"run.dir={tmp_path / 'own'}", f"model.path={model}"]))


@pytest.fixture
def during(monkeypatch):
    """Instead of a phase's processes, a function; and the commands that were launched."""
    launched = []

    def use(work):
        class Launcher:
            def preflight(self):
                return []

            def launch(self, command, logs, *, echo=None):
                launched.append(command)
                work()
                return Exit(0, logs / "main.log", None, "", 1.0)

        monkeypatch.setattr(outside, "make_launcher", lambda config, stop: Launcher())
        return launched

    return use


def warmed_up(config, **metrics) -> None:
    paths = RunPaths.of(config.run.dir)
    (paths.root / "critic").mkdir(exist_ok=True)
    (paths.root / "critic" / "checkpoint.json").write_text("{}")
    details = {"warmup": HISTORY, "excluded": {"untrusted verdict": 3}}
    outputs = [WrittenFile("critic/checkpoint.json", 2)]
    PhaseResult("warmup", 0, {**WARM, **metrics}, {"total": 9.0}, outputs, details).write(paths.phase(0, "warmup"))


def shown(directory) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_outside(directory, console)
    return console.file.getvalue()


def test_a_warmup_is_launched_shown_and_its_policy_proven_untouched(config, during, model):
    launched = during(lambda: warmed_up(config))
    assert run_outside(config, "warmup", say=print).metrics[f"critic/{EXPLAINED}"] == 0.25
    (command,) = launched
    assert command.arguments[-2:] == ("--roles", "warmup") and command.processes == config.layout.processes
    root = RunPaths.of(config.run.dir).root
    assert phase_outside_the_loop(root) == "warmup"
    assert set(sealed.read(RunPaths.of(root).phase(0, "warmup") / "policy.json")) == {
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    text = shown(root)
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["0"], ["4"], ["8"])]
    assert rows == [
        ["0", "0.00", "0.010"],
        ["4", "0.50", "0.0625", "0.250", "best,", "kept"],
        ["8", "1.00", "0.0312", "0.125"],
    ]
    assert "task's mean   0.375" in text and "untrusted verdict" in text and "3 files are untouched" in text
    assert "had stopped rising" in text and f"train.critic.start={root / 'critic'}" in text
    assert write_warmup_plot(root).read_bytes().startswith(b"\x89PNG")

    warmed_up(config, **{"critic/warmup_stopped_rising": 0.0})
    assert "before the explained variance had stopped rising" in shown(root)
    (RunPaths.of(root).phase(0, "warmup") / "result.json").unlink()
    assert "isn't finished" in shown(root)


def test_what_it_left_is_verified(config, during, model):
    during(lambda: warmed_up(config))
    run_outside(config, "warmup", say=print)
    paths = RunPaths.of(config.run.dir)
    assert verify_run(paths.root).problems == [] and verify_run(paths.root).files == 7
    for path in (
        paths.warm_critic / "checkpoint.json",
        paths.phase(0, "warmup") / "policy.json",
        paths.config,
        model / "config.json",
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[:-2])
        assert any(path.name in line for line in verify_run(paths.root).problems), path
        path.write_bytes(whole)
    (paths.phase(0, "warmup") / "result.json").unlink()
    with pytest.raises(IncompleteError, match="no readable phase result"):
        verify_run(paths.root)


def test_another_loop_s_directory_is_left_alone(config, during):
    """One that slept, and whose lock was taken meanwhile, ends without a result of its own."""

    def work():
        warmed_up(config)
        (RunPaths.of(config.run.dir).root / LOCK_FILE).write_text(
            json.dumps({**this_process(), "host": "elsewhere", "token": "other"})
        )

    during(work)
    with pytest.raises(OtherLoop, match="another loop has taken over this run"):
        run_outside(config, "warmup", say=print)


def test_a_policy_that_changes_meanwhile_is_named(config, during, model):  # verl#1209
    def work():
        warmed_up(config)
        (model / "model.safetensors").write_text("other")

    during(work)
    with pytest.raises(MismatchError, match="the policy was changed while the warmup phase ran: model.safetensors"):
        run_outside(config, "warmup", say=print)
    assert not (RunPaths.of(config.run.dir).phase(0, "warmup") / "policy.json").exists()


def test_outputs_that_are_not_there_are_named(config, during):
    def work():
        warmed_up(config)
        (RunPaths.of(config.run.dir).root / "critic" / "checkpoint.json").unlink()

    during(work)
    with pytest.raises(IncompleteError, match="did not leave what it says: critic/checkpoint.json: missing"):
        run_outside(config, "warmup", say=print)


def test_an_interrupted_warmup_leaves_no_critic_of_the_one_before(config, during):
    during(lambda: warmed_up(config))
    run_outside(config, "warmup", say=print)
    root = RunPaths.of(config.run.dir).root

    def killed():
        raise Stopped(15)

    during(killed)
    with pytest.raises(Stopped):
        run_outside(config, "warmup", say=print)
    assert not (root / "critic").exists() and not (root / "phases/iter_0000/warmup/result.json").exists()


def test_nothing_starts_from_what_it_replaces(config, during):
    launched = during(lambda: warmed_up(config))
    run_outside(config, "warmup", say=print)
    config.train.critic.start = str(RunPaths.of(config.run.dir).root / "critic")
    with pytest.raises(T1Error, match="train.critic.start is what a critic's warm-up .* replaces"):
        run_outside(config, "warmup", say=print)
    assert len(launched) == 1 and (RunPaths.of(config.run.dir).root / "critic").is_dir()


def test_a_warmup_without_anything_to_explain_says_so(config, during):
    def work():
        warmed_up(config, **{f"critic/{EXPLAINED}": math.nan, "critic/warmup_best_epoch": 1.0})
        directory = RunPaths.of(config.run.dir).phase(0, "warmup")
        result = PhaseResult.read(directory)
        result.details["warmup"] = [{**line, EXPLAINED: math.nan} for line in HISTORY]
        result.write(directory)
        text = (directory / "result.json").read_text()
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))

    during(work)
    assert math.isnan(run_outside(config, "warmup", say=print).metrics[f"critic/{EXPLAINED}"])
    text = shown(RunPaths.of(config.run.dir).root)
    assert "nothing to explain: the last critic was kept" in text and "best, kept" not in text
    assert write_warmup_plot(config.run.dir).is_file()


def test_one_directory_holds_one_thing(config, during):
    launched = during(lambda: warmed_up(config))
    run_outside(config, "warmup", say=print)
    with pytest.raises(T1Error, match="this directory holds a critic's warm-up"):
        run_outside(config, "sft", say=print)
    RunPaths.of(config.run.dir).manifest.write_text("{}")
    with pytest.raises(T1Error, match="this directory holds a training"):
        run_outside(config, "warmup", say=print)
    assert len(launched) == 1


def test_a_fine_tuning_is_shown(tmp_path):
    metrics = {"sft/demonstrations": 6800.0, "sft/held_out_loss_before": 6.3, "sft/held_out_loss": 0.15}
    PhaseResult("sft", 0, metrics).write(RunPaths.of(tmp_path).phase(0, "sft"))
    text = shown(tmp_path)
    assert "a fine-tuning" in text and "6,800" in text and "0.150" in text
    assert f"model.path={tmp_path / 'model'}" in text
