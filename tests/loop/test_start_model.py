import os
import shutil

import pytest

from megatron_t1.errors import MismatchError, T1Error
from megatron_t1.loop import runner, start_model
from megatron_t1.loop.local import LocalLauncher
from megatron_t1.loop.manifest import open_manifest
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text(f"{name} " * 20)
    return directory


def begun(config, model, *finished):
    config.model.path = str(model)
    manifest = open_manifest(config)
    manifest.finished = [FinishedStep(*key, "0" * 64, "l", {}, 1.0, 1, 1, 1, 0.0) for key in finished]
    manifest.write(RunPaths.of(config.run.dir).manifest)
    return manifest


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_changed_start_model_is_refused_and_the_file_named(config, model, name):
    begun(config, model, (0, "rollout"))
    open_manifest(config)
    before = (model / name).stat()
    content = bytearray((model / name).read_bytes())
    content[3] ^= 1
    (model / name).write_bytes(content)
    os.utime(model / name, ns=(before.st_atime_ns, before.st_mtime_ns))  # as damage on the disk would leave it
    with pytest.raises(MismatchError, match=f"not the one this run was started with: {name} has the SHA-256"):
        open_manifest(config)


def test_missing_and_added_files_are_named(config, model):
    begun(config, model, (0, "rollout"))
    (model / "model.safetensors").rename(model / "other.safetensors")
    with pytest.raises(MismatchError, match="model.safetensors is missing; other.safetensors was added"):
        open_manifest(config)


def test_a_copy_of_the_model_in_its_place_is_the_same_model(config, model):
    begun(config, model, (0, "rollout"))
    shutil.copytree(model, model.with_name("copy"), copy_function=shutil.copyfile)
    shutil.rmtree(model)
    model.with_name("copy").rename(model)
    open_manifest(config)


def test_another_start_model_replaces_one_with_which_nothing_was_finished(config, model):
    first = begun(config, model)
    (model / "model.safetensors").write_text("the right weights")
    manifest = open_manifest(config)
    assert manifest.start_model != first.start_model and manifest.start_model == start_model.describe(model)


def test_a_run_begun_before_models_were_recorded_is_bound_now(config, model):
    manifest = begun(config, model, (0, "rollout"))
    manifest.start_model = {}
    path = RunPaths.of(config.run.dir).manifest
    manifest.write(path)
    open_manifest(config).write(path)
    assert Manifest.read(path).start_model == start_model.describe(model)


def test_large_untouched_files_are_not_read_again(model, monkeypatch):
    monkeypatch.setattr(start_model, "TRUSTED_FROM_BYTES", (model / "model.safetensors").stat().st_size)
    known = start_model.describe(model)
    hashed = []
    monkeypatch.setattr(start_model.atomic, "sha256_file", lambda path: hashed.append(path.name) or "0" * 64)
    assert start_model.describe(model, known)["model.safetensors"] == known["model.safetensors"]
    assert sorted(hashed) == ["config.json", "tokenizer.json"]  # hashed side by side, in any order


def test_reading_a_large_model_is_said_and_ends_when_the_loop_is_told_to_stop(model, monkeypatch):
    monkeypatch.setattr(start_model, "LARGE_BYTES", 100)
    said, read = [], []

    def stop():
        read.append(len(read))
        raise InterruptedError("told to stop")

    with pytest.raises(InterruptedError):
        start_model.describe(model, say=said.append, before_file=stop)
    assert said == [f"reading the start model, which the run is bound to: 0 GiB in {model}"]
    assert read and start_model.describe(model)["config.json"]["size"] == 240


def test_nothing_of_a_model_is_read_where_phases_cant_be_started(config, model, monkeypatch):
    config.model.path = str(model)
    monkeypatch.setattr(LocalLauncher, "preflight", lambda *_: ["no allocation"])
    monkeypatch.setattr(start_model, "describe", lambda *_, **__: pytest.fail("the model was read"))
    with pytest.raises(T1Error, match="no allocation"), runner.opened(config):
        pass
