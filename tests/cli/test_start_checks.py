"""What a command refuses before anything starts: another model, another run's place, inputs that are none."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_t1.cli import main
from megatron_t1.config.compose import absolute, compose, save
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.model.initial import hf_config
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.report.metrics import MetricsWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Tasks and something that says of itself to be the tiny model, without a tensor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("T1_DEBUG", raising=False)
    for name in ("tasks/train/one", "tasks/held_out/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "task.toml").touch()
    write_model(tmp_path / "models/tiny_start")
    return tmp_path


def write_model(directory, overrides=("model=tiny",), **changes):
    config = compose(overrides).model
    directory.mkdir(parents=True)
    settings = hf_config(config.architecture, config.dtype, 512, 1, 0) | changes
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").touch()
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def finished_run(directory, *overrides):
    """A run whose policy 1 is exported."""
    config = absolute(compose([*overrides, f"run.dir={directory}", "loop.warmup_iterations=0", "loop.iterations=1"]))
    manifest = new_manifest(config)
    for phase in ("evaluation", "rollout", "critic", "actor", "export"):
        manifest.finished.append(FinishedStep(0, phase, "0" * 64, "launch", {}, 1.0, 1, 0, 0, 0.0))
    paths = RunPaths.of(directory)
    manifest.write(paths.manifest)
    save(config, paths.config)
    return paths


def refused(capsys, *words, status=2):
    assert main(list(words)) == status
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return output.err


@pytest.mark.parametrize("command", [["run"], ["rollout"], ["eval"], ["train", "sft"]], ids=" ".join)
def test_a_checkpoint_of_another_shape_is_refused_field_by_field(capsys, place, command):
    (place / "demonstrations").mkdir()
    sft = ["train.sft.demonstrations=demonstrations"]
    said = refused(capsys, *command, "model=tiny_64e", "model.path=models/tiny_start", "run.dir=run", *sft)
    for name, option, value in (("num_experts", 64, 16), ("num_hidden_layers", 8, 4), ("num_experts_per_tok", 8, 4)):
        assert f"model.architecture.{name}={option}, and the checkpoint in model.path has {value}" in said
    assert "model.dtype='bfloat16', and the checkpoint in model.path has 'float32'" in said
    assert not (place / "run").exists()


def test_numbers_of_the_checkpoint_count_in_checks(capsys, place):
    write_model(place / "short", max_position_embeddings=128)
    said = refused(capsys, "run", "model.path=short")
    assert "rollout.max_context=512 exceeds the checkpoint's 128 positions" in said
    write_model(place / "llama", model_type="llama")
    assert "model_type is 'llama'" in refused(capsys, "run", "model.path=llama")


def test_commands_that_make_models_and_tasks_do_not_compare(capsys):
    for words in (["model", "init"], ["tasks", "generate"], ["tasks", "demonstrate"]):
        assert main([*words, "model=tiny_64e", "model.path=models/tiny_start", "--cfg", "job"]) == 0


def test_cfg_job_prints_and_then_names_what_clashes(capsys, place):
    words = ["run", "model.path=absent", "env.tasks=absent", "--cfg", "job"]
    assert main(words) == 0  # inputs that aren't there yet are no clash
    capsys.readouterr()
    assert main([*words, "layout.processes=3", "rollout.seeded=true"]) == 2
    output = capsys.readouterr()
    assert yaml.safe_load(output.out)["layout"]["processes"] == 3
    assert "2 problems" in output.err and "layout.processes=3" in output.err and "chunked_prefill" in output.err
    assert main(["run", "model=tiny_64e", "model.path=models/tiny_start", "--cfg", "job"]) == 2
    assert "num_experts=64" in capsys.readouterr().err


def test_what_the_installed_core_cannot_train_is_refused_at_once(capsys, place, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.16.1")
    words = ["model=tiny_hybrid", "model.path=absent", "run.dir=run", "layout.context=2", "layout.processes=2"]
    assert "gated delta nets; that needs 0.18 or later" in refused(capsys, "run", *words)
    assert not (place / "run").exists()


def test_a_run_directory_inside_a_run(capsys, place):
    finished_run(place / "run")
    assert f"lies inside the run {place / 'run'}" in refused(capsys, "run", "run.dir=run/again")


@pytest.mark.parametrize("command", [["rollout"], ["train", "critic"], ["train", "actor"], ["export"]], ids=" ".join)
def test_a_phase_of_a_run_that_is_not_there(capsys, place, command):
    said = refused(capsys, *command, "run.dir=nothere", "env.tasks=nothing", status=1)
    assert "there is no run" in said and str(place / "nothere") in said
    assert not (place / "nothere").exists()


def test_another_group_for_a_run_that_has_begun(capsys, place):
    finished_run(place / "run")
    said = refused(capsys, "run", "run.dir=run", "model=tiny_64e")
    assert "groups can't be exchanged" in said and "model.dtype: the run has 'float32', now 'bfloat16'" in said
    assert main(["run", "run.dir=run", "model=tiny", "--cfg", "job"]) == 0  # what it was started with


def test_a_cut_off_model_is_refused_before_anything_starts(capsys, place):
    weights = place / "models/tiny_start/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    said = refused(capsys, "run", "run.dir=run")
    assert f"{weights}: cut off" in said and not (place / "run").exists()


def test_a_run_without_its_configuration_is_named(capsys, place):
    paths = finished_run(place / "run")
    paths.config.unlink()
    assert str(paths.config) in refused(capsys, "run", "run.dir=run", status=1)


def test_fewer_iterations_than_were_done_are_refused(capsys, place):
    paths = finished_run(place / "run")
    manifest = Manifest.read(paths.manifest)
    manifest.finished.append(FinishedStep(1, "rollout", "0" * 64, "launch", {}, 1.0, 1, 0, 0, 0.0))
    manifest.write(paths.manifest)
    before = paths.config.read_bytes()
    said = refused(capsys, "run", "run.dir=run", "loop.iterations=1", status=1)
    assert "the run has gone through 2 iterations" in said and "loop.iterations=2 or more" in said
    assert paths.config.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "option"),
    [(("model", "init", "model.path="), "model.path"), (("tasks", "generate", "generate.out="), "generate.out")],
)
def test_an_empty_path_is_not_the_working_directory(capsys, place, words, option):
    assert f"{option} is not set" in refused(capsys, *words)


def test_other_evaluation_options_go_to_another_directory(capsys, place):
    finished_run(place / "my run")
    said = refused(capsys, "eval", "run.dir=my run", "eval.attempts=4")
    assert "eval.attempts: the run has 2, now 4" in said
    exported = place / "my run/hf/iter_0001"
    command, *words = shlex.split(said.partition("options): ")[2].partition("\n")[0])[1:]
    config = compose(words)
    assert command == "eval" and config.model.path == str(exported)
    assert config.run.dir == f"{place / 'my run'}-evaluation"
    assert config.eval.tasks == str(place / "tasks/held_out") and config.eval.attempts == 4


def test_commands_in_the_summary_can_be_pasted(capsys, place):
    from megatron_t1.report.show import print_summary

    finished_run(place / "my run")
    print_summary(place / "my run")
    assert f"t1 show '{place / 'my run'}' --trajectories" in capsys.readouterr().out


@pytest.fixture
def small_disk(place):
    """A file system with 64 KiB."""
    disk = place / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "t1", disk]).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_named(capsys, small_disk):
    full = small_disk / "filler"
    full.write_bytes(bytes(40 * 1024))
    sizes = ["generate.pool=small", "generate.train=60", "generate.held_out=4", "generate.workers=2"]
    for words in (
        ["model", "init", "model=tiny", f"model.path={small_disk / 'model'}", "generate.pool=small"],
        ["tasks", "generate", f"generate.out={small_disk / 'tasks'}", *sizes],
        ["run", f"run.dir={small_disk / 'run'}"],
    ):
        said = refused(capsys, *words, status=1)
        assert "no space left" in said.lower() or "disk is too full" in said, said
        assert str(small_disk) in said and "remedy:" in said


def test_plots_on_a_full_disk(capsys, small_disk):
    pytest.importorskip("matplotlib")
    finished_run(small_disk / "run")
    with contextlib.closing(MetricsWriter(RunPaths.of(small_disk / "run"))) as writer:
        writer.append(PhaseResult("rollout", 0, {"rollout/mean_reward": 1.0}), seconds=1.0)
    (small_disk / "filler").write_bytes(bytes(small_free(small_disk)))
    said = refused(capsys, "show", str(small_disk / "run"), "--plots", status=1)
    assert "No space left on device (ENOSPC)" in said and f"where:  {small_disk}" in said


def small_free(directory):
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


READ_ONLY = [
    ["run", "run.dir=shut/run"],
    ["train", "sft", "run.dir=shut/run", "train.sft.demonstrations=tasks"],
    ["model", "init", "model=tiny", "model.path=shut/model", "generate.pool=small"],
    ["tasks", "generate", "generate.out=shut/tasks", "generate.pool=small"],
]


@pytest.mark.parametrize("words", READ_ONLY, ids=lambda words: " ".join(words[:2]))
def test_a_directory_that_may_not_be_written(place, words):
    as_owner = []
    if os.geteuid() == 0:  # root without the right to pass over permissions
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is missing")
        capabilities = "-dac_override,-dac_read_search"
        as_owner = ["setpriv", f"--inh-caps={capabilities}", f"--bounding-set={capabilities}"]
    (place / "shut").mkdir(mode=0o555)
    done = subprocess.run(
        [*as_owner, sys.executable, "-m", "megatron_t1.cli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "ermission denied" in done.stderr and str(place / "shut") in done.stderr and "remedy:" in done.stderr


def test_directories_that_hold_no_run_say_what_they_hold(capsys, place):
    for phase, said in (("sft", "model.path={}/model"), ("warmup", "train.critic.start={}/critic")):
        (place / phase / "phases" / "iter_0000" / phase).mkdir(parents=True)
        text = refused(capsys, "train", "critic", f"run.dir={phase}", status=1)
        assert "there is no run: a " in text and said.format(place / phase) in text
        assert main(["show", phase]) == 0 and "isn't finished" in capsys.readouterr().out


def test_rollouts_for_a_warmup_are_looked_at_before_it_starts(capsys, place):
    options = ["model.path=models/tiny_start", "train.critic.rollouts=[nothing,tasks]"]
    said = refused(capsys, "train", "critic", "run.dir=own", *options)
    assert f"train.critic.rollouts: {place / 'nothing'}: no such file or directory" in said
    said = refused(capsys, "train", "critic", "run.dir=own", options[0], "train.critic.rollouts=[tasks]",
                   "train.critic.warmup_holdout=10")  # fmt: skip
    assert (
        "there are no records" in said and "train.critic.warmup_holdout=10 must be 0 (a tenth) or at least 64" in said
    )
    said = refused(capsys, "run", "run.dir=own", *options)
    assert "train.critic.rollouts is read by `t1 train critic` alone" in said
    assert not (place / "own").exists()


def test_a_critic_to_start_from_must_be_one_until_the_first_critic_is_there(capsys, place):
    start = "train.critic.start=models/tiny_start"
    said = refused(capsys, "run", "run.dir=own", "model.path=models/tiny_start", start)
    assert f"train.critic.start={place / 'models/tiny_start'}: no checkpoint, checkpoint.json missing" in said
    finished_run(place / "run", start)
    said = refused(capsys, "train", "critic", "run.dir=run", status=1)
    assert "every critic phase of this run is finished" in said
