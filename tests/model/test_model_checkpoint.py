from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from dataclasses import replace

import pytest
import torch

from megatron_t1 import sealed
from megatron_t1.atomic import sha256_file
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from tests.distributed import run_distributed
from tests.model.workers import losses_from_hf, model_and_optimizer, resume, train_and_save, train_steps
from tests.tiny_model import ARCHITECTURE, tiny_config, write_hf


@pytest.mark.parametrize(("role", "dtype"), [("policy", "float32"), ("value", "bfloat16")])
def test_training_continues_exactly(tmp_path, role, dtype):
    write_hf(tmp_path / "hf")
    saved = train_and_save(str(tmp_path), {}, role, dtype)
    resumed = resume(str(tmp_path), {}, role, dtype)
    assert resumed == {"losses": saved["losses"], "state": {"step": 2}}
    # The moments and their step count matter: without them the second step differs.
    assert resume(str(tmp_path), {}, role, dtype, model_only=True)["losses"][1] != saved["losses"][1]


@pytest.mark.slow
def test_training_continues_exactly_with_expert_parallelism(tmp_path):
    write_hf(tmp_path / "hf")
    arguments = {"directory": str(tmp_path), "layout": {"expert": 2}, "role": "value"}
    saved = run_distributed("tests.model.workers:train_and_save", 2, **arguments)
    assert saved[0] == saved[1]
    for file in saved[0]["files"]:
        assert file["sha256"] == sha256_file(tmp_path / file["path"])
    assert run_distributed("tests.model.workers:resume", 2, **arguments)[0]["losses"] == saved[0]["losses"]
    # Model and optimizer go into another layout: experts have an optimizer of their own in one of the two only.
    losses = resume(**{**arguments, "layout": {}})["losses"]
    assert losses == pytest.approx(saved[0]["losses"], abs=3e-6)


@pytest.mark.slow
# Megatron-LM#1517 slime#1818
@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2, "expert": 2}], ids=str)
def test_model_and_optimizer_move_to_another_layout(tmp_path, layout):
    """Two steps after the move give the losses of one that stayed; without the moments the second differs."""
    write_hf(tmp_path / "hf")
    saved = train_and_save(str(tmp_path), {}, "policy")
    arguments = {"directory": str(tmp_path), "layout": layout, "role": "policy"}
    for resumed in run_distributed("tests.model.workers:resume", 2, **arguments):
        assert resumed["losses"] == pytest.approx(saved["losses"], abs=3e-6)
    model_only = resume(str(tmp_path), {}, "policy", model_only=True)["losses"]
    assert model_only[1] != pytest.approx(saved["losses"][1], abs=1e-4)


@pytest.fixture
def make_engine(backend):
    """A critic with an optimizer, its weights nobody's."""
    from megatron_t1.training.engine import Engine

    def make(**options):
        config = tiny_config()
        config.train.critic = replace(config.train.critic, **options)
        return Engine(config, backend, "value", config.train.critic, replay=False)

    return make


@pytest.fixture
def trained(tmp_path, backend):
    """(directory of a checkpoint, model, optimizer, layout-independent tools)."""
    from megatron_t1.model.checkpoint import save_checkpoint

    wrapped, optimizer = model_and_optimizer(backend, tiny_config().layout, "value")
    train_steps(wrapped, optimizer, range(1))
    save_checkpoint(tmp_path / "checkpoint", wrapped, optimizer, {"step": 1, "optimizer_steps": 1})
    return tmp_path / "checkpoint", wrapped, optimizer


def load(directory, wrapped, optimizer=None):
    from megatron_t1.model.checkpoint import load_checkpoint

    return load_checkpoint(directory, wrapped, optimizer)


def test_parameters_come_back_bit_for_bit(trained, backend):
    directory, wrapped, _ = trained
    other, other_optimizer = model_and_optimizer(backend, tiny_config().layout, "value")
    assert load(directory, other, other_optimizer)["step"] == 1
    expected = dict(wrapped[0].named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in other[0].named_parameters())
    assert expected["module.output_layer.weight"].abs().sum() > 0


def test_optimizer_that_never_stepped_is_saved_and_continues(tmp_path, backend):
    from megatron_t1.model.checkpoint import save_checkpoint

    wrapped, optimizer = model_and_optimizer(backend, tiny_config().layout, "value")
    save_checkpoint(tmp_path / "checkpoint", wrapped, optimizer, {})
    other, other_optimizer = model_and_optimizer(backend, tiny_config().layout, "value")
    load(tmp_path / "checkpoint", other, other_optimizer)
    assert train_steps(other, other_optimizer, range(2)) == train_steps(wrapped, optimizer, range(2))


class Fused(torch.optim.Optimizer):
    """Counts steps in its groups, as the fused Adam of Transformer Engine and Apex does; moves nothing."""

    def __init__(self, params, lr=1e-3, **options):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                moments = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    moments.setdefault(name, torch.zeros_like(parameter)).add_(1)


def pushed(engine):
    """One optimizer step by a gradient of ones."""
    for module in engine.modules:
        for parameter in module.parameters():
            parameter.main_grad.fill_(1.0)
    engine.optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_begins_anew_is_saved_and_continues(tmp_path, backend, monkeypatch, make_engine, fused):
    from megatron_t1.model.checkpoint import read_marker
    from megatron_t1.model.optimizer_state import inner_optimizers

    if fused:
        monkeypatch.setattr("megatron.core.optimizer.Adam", Fused)
        monkeypatch.setattr("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False)
    engine = make_engine()
    pushed(engine)
    engine.optimizer_steps = 1
    engine.begin_anew()
    engine.save(tmp_path / "checkpoint", 1, relative_to=tmp_path)
    assert engine.optimizer_steps == 0 and read_marker(tmp_path / "checkpoint")["optimizer"]["steps"] == 0
    other = make_engine()
    other.load(tmp_path / "checkpoint")
    for inner in inner_optimizers(other.optimizer):
        moments = [state[name] for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert moments and not any(moment.any() for moment in moments)
    pushed(other), pushed(engine)
    expected = dict(engine.chunks[0].named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in other.chunks[0].named_parameters())


def test_saving_leaves_one_directory_and_no_process(trained):
    import psutil

    directory, wrapped, optimizer = trained
    from megatron_t1.model.checkpoint import save_checkpoint

    (directory.parent / "checkpoint.partial").mkdir()  # an interrupted save
    save_checkpoint(directory, wrapped, optimizer, {"step": 2})
    assert [path.name for path in directory.parent.iterdir()] == ["checkpoint"]
    assert json.loads((directory / "state.json").read_text()) == {"step": 2}
    assert not psutil.Process().children()


def rewrite_marker(directory, **changes):
    """As if another program had written the checkpoint."""
    path = directory / "checkpoint.json"
    sealed.write(path, {**sealed.read(path), **changes})


def test_an_optimizer_that_no_layout_but_its_own_takes_is_refused_or_replaced(trained, backend, make_engine):
    """A DistributedOptimizer's state names its entries by the layout."""
    from megatron_t1.model.optimizer_state import inner_optimizers

    directory, wrapped, _ = trained
    other = {"kind": "DistributedOptimizer", "steps": 7, "chained": 2, "expert_parallel": True}
    rewrite_marker(directory, optimizer=other)
    with pytest.raises(
        MismatchError, match="kind: the checkpoint has 'DistributedOptimizer', here it is 'FP32"
    ) as caught:
        make_engine(reset_optimizer=False).load(directory)
    assert "reset_optimizer=true" in caught.value.remedy
    engine = make_engine(reset_optimizer=True)
    with pytest.warns(UserWarning, match="a new optimizer begins; optimizer chained: the checkpoint has 2"):
        engine.load(directory)
    assert engine.optimizer_steps == 1  # the schedule goes on
    loaded = dict(engine.chunks[0].named_parameters())
    assert all(torch.equal(value, loaded[name]) for name, value in wrapped[0].module.named_parameters())
    assert not any(inner.state for inner in inner_optimizers(engine.optimizer))


def damage_marker(directory):
    (directory / "checkpoint.json").unlink()


def damage_shard(directory):
    (directory / "__0_0.distcp").unlink()


def truncate_shard(directory):
    path = directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(directory):
    path = directory / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate_marker(directory):
    path = directory / "checkpoint.json"
    path.write_text(path.read_text()[:-20])


def flip_marker(directory):
    """A digit of the architecture: the marker stays readable."""
    path = directory / "checkpoint.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))


@pytest.mark.parametrize(
    "damage", [damage_marker, truncate_marker, flip_marker, damage_shard, truncate_shard, flip_bit]
)
def test_damaged_checkpoint_is_refused(trained, damage):  # Automodel#3261 verl#7952 KempnerForge#102
    directory, wrapped, optimizer = trained
    damage(directory)
    with pytest.raises(IncompleteError):
        load(directory, wrapped, optimizer)


@pytest.mark.parametrize("odd", ["pipe", "directory", "nested", "text"])
def test_what_no_save_leaves_is_no_marker(tmp_path, odd):
    """And reading it ends."""
    from megatron_t1.model.checkpoint import read_marker

    path = tmp_path / "checkpoint.json"
    match odd:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "nested":
            path.write_text("[" * 100_000)
        case "text":
            path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(IncompleteError, match="no complete checkpoint"):
        read_marker(tmp_path)


def test_save_that_died_is_no_checkpoint(trained, tmp_path):  # Automodel#3261
    directory, wrapped, _ = trained
    shutil.move(directory, tmp_path / "other.partial")
    with pytest.raises(IncompleteError, match="no complete checkpoint"):
        load(directory, wrapped)


def test_other_shape_and_role_are_refused_with_both_values(trained, backend):
    from megatron_t1.model.build import build_model

    directory, _, _ = trained
    other = build_model(tiny_config(architecture=replace(ARCHITECTURE, num_hidden_layers=2)), backend, "value")
    with pytest.raises(MismatchError, match="num_hidden_layers: the checkpoint has 4, the model 2"):
        load(directory, other)
    with pytest.raises(MismatchError, match="role: the checkpoint has 'value', here it is 'policy'"):
        load(directory, build_model(tiny_config(), backend, "policy"))
    with pytest.raises(MismatchError, match="dtype: the checkpoint has 'float32', here it is 'bfloat16'"):
        load(directory, build_model(tiny_config(dtype="bfloat16"), backend, "value"))


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_metadata_that_would_run_code_is_refused(tmp_path, protocol):
    from megatron_t1.model.pickle_check import require_harmless_pickle

    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"a": Hostile()}, protocol=protocol))
    with pytest.raises(T1Error, match="print"):
        require_harmless_pickle(path)


@pytest.fixture
def stored(tmp_path, backend):
    """A complete checkpoint as a hostile maker has it: every digest is right."""
    from megatron_t1.model.checkpoint import save_checkpoint

    wrapped, optimizer = model_and_optimizer(backend, tiny_config().layout, "value")
    save_checkpoint(tmp_path / "checkpoint", wrapped, optimizer, {"step": 1})

    def change(name, data):
        path = tmp_path / "checkpoint" / name
        path.write_bytes(data)
        files = [
            {**file, "size": path.stat().st_size, "sha256": sha256_file(path)} if file["path"] == name else file
            for file in json.loads((tmp_path / "checkpoint" / "checkpoint.json").read_text())["files"]
        ]
        rewrite_marker(tmp_path / "checkpoint", files=files)

    return tmp_path / "checkpoint", wrapped, change


def test_every_pickle_of_a_checkpoint_is_checked_before_it_is_loaded(stored, tmp_path, capsys):
    """`.metadata`, common.pt, an object where a tensor is asked for, and a reference to a file elsewhere."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    directory, wrapped, change = stored
    metadata, common = (directory / ".metadata").read_bytes(), (directory / "common.pt").read_bytes()
    change(".metadata", pickle.dumps(Hostile()))
    with pytest.raises(T1Error, match="the checkpoint's metadata would import builtins.print"):
        load(directory, wrapped)
    change(".metadata", metadata)

    torch.save({"state": Hostile()}, tmp_path / "hostile.pt")
    change("common.pt", (tmp_path / "hostile.pt").read_bytes())
    with pytest.raises(T1Error, match="the checkpoint's objects are refused") as caught:
        load(directory, wrapped)
    assert caught.value.where.endswith("common.pt")
    change("common.pt", common)

    changed = pickle.loads(metadata)
    index, info = next(iter(changed.storage_data.items()))
    shard = directory / info.relative_path
    info.offset, info.length = shard.stat().st_size, (tmp_path / "hostile.pt").stat().st_size
    changed.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    change(shard.name, shard.read_bytes() + (tmp_path / "hostile.pt").read_bytes())
    change(".metadata", pickle.dumps(changed))
    with pytest.raises(T1Error, match="the checkpoint's objects are refused") as caught:
        load(directory, wrapped)
    assert caught.value.where.endswith(".distcp")

    info.relative_path = "../elsewhere.distcp"
    change(".metadata", pickle.dumps(changed))
    with pytest.raises(T1Error, match=r"refers to \.\./elsewhere.distcp, which is none of its files"):
        load(directory, wrapped)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x05torch\x8c\x04Size00\x93.",  # names hidden below popped ones
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02cbuiltins\ngetattr\n.",
        b"not a pickle",
    ],
)
def test_disguised_metadata_is_refused(tmp_path, data):
    from megatron_t1.model.pickle_check import require_harmless_pickle

    path = tmp_path / ".metadata"
    path.write_bytes(data)
    with pytest.raises(T1Error):
        require_harmless_pickle(path)


def test_metadata_of_harmless_names_that_means_nothing_is_an_error_of_the_checkpoint(stored):
    """Bytes are changed at random by somebody who can make every digest fit: what is said is never a defect's."""
    directory, wrapped, change = stored
    whole, generator, refused = (directory / ".metadata").read_bytes(), random.Random(0), 0
    made_up = [pickle.dumps(value) for value in (5, {}, "x", torch.Size([1]))]
    for number in range(150):
        data = bytearray(whole)
        for _ in range(generator.choice([1, 1, 4])):
            data[generator.randrange(len(data))] = generator.randrange(256)
        change(".metadata", made_up[number] if number < len(made_up) else bytes(data))
        try:
            load(directory, wrapped)  # a name or a number that nobody looks at may have changed
        except T1Error:
            refused += 1
    assert refused > 75
    change(".metadata", whole)
    load(directory, wrapped)


def test_losses_fall(tmp_path):
    write_hf(tmp_path / "hf")
    losses = losses_from_hf(str(tmp_path), {}, "policy", steps=4)
    assert losses[-1] < losses[0] - 0.1
