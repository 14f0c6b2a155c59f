from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_t1.atomic import sha256_file
from megatron_t1.errors import ConfigError, IncompleteError, MismatchError
from tests.distributed import run_distributed
from tests.model.workers import round_trips
from tests.tiny_model import ARCHITECTURE, hf_config, tiny_config, tokens, write_hf


def exported_tensors(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(index.values())):
        for name, tensor in load_file(directory / file).items():
            assert index[name] == file and name not in tensors
            tensors[name] = tensor
    assert tensors.keys() == index.keys()
    return tensors


def assert_round_trip(root, result, dtype="float32", out="out0"):
    original, exported = load_file(root / "hf/model.safetensors"), exported_tensors(root / out)
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    assert result["report"]["loaded"] == len(original)
    assert result["report"]["newly_initialised"] == [] and result["report"]["converted"] == {}
    listed = {file["path"]: file for file in result["files"]}
    on_disk = {f"{out}/{path.name}": path for path in (root / out).iterdir()}
    assert listed.keys() == on_disk.keys()
    for path, file in listed.items():
        assert (file["size"], file["sha256"]) == (on_disk[path].stat().st_size, sha256_file(on_disk[path]))
    assert not list(root.glob(f"{out}.*"))
    assert json.loads((root / out / "config.json").read_text()) == hf_config(
        replace(ARCHITECTURE, tie_word_embeddings="lm_head.weight" not in original), dtype
    )


LAYOUTS = [
    {"expert": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert_tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "tied"),
    [(LAYOUTS, False), ([{"pipeline": 2}], True)],
    ids=["every layout", "tied over two stages"],
)
def test_round_trip_is_bit_exact(tmp_path, layouts, tied):  # Megatron-LM#5844 Megatron-Bridge#1871
    write_hf(tmp_path / "hf", replace(ARCHITECTURE, tie_word_embeddings=tied))
    arguments = {"directory": str(tmp_path), "layouts": layouts, "tied": tied}
    results = run_distributed("tests.model.workers:round_trips", 2, **arguments)
    assert results[0] == results[1] and len(results[0]) == len(layouts)
    for number, result in enumerate(results[0]):
        assert_round_trip(tmp_path, result, out=f"out{number}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_in_one_process(tmp_path, dtype):
    write_hf(tmp_path / "hf", dtype=dtype)
    assert_round_trip(tmp_path, round_trips(str(tmp_path), [{}], dtype=dtype)[0], dtype)


def test_export_replaces_an_earlier_one_and_ignores_an_interrupted_one(tmp_path):
    write_hf(tmp_path / "hf")
    for leftover in ("out0", "out0.partial", "out0.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "old.safetensors").write_text("old")
        (tmp_path / leftover / "model.safetensors.index.json").write_text("{}")
    assert_round_trip(tmp_path, round_trips(str(tmp_path), [{}])[0])


def build(backend, role="policy", architecture=ARCHITECTURE, dtype="float32"):
    from megatron_t1.model.build import build_model

    return build_model(tiny_config(architecture=architecture, dtype=dtype), backend, role)


def load(*arguments):
    from megatron_t1.model.convert import load_hf

    return load_hf(*arguments)


@pytest.mark.parametrize("kind", ["a directory of models", "a file"])
def test_export_does_not_replace_what_is_no_export(tmp_path, backend, kind):
    """`export_hf(chunks, "models", ...)` where models/NAME was meant would have removed all of them."""
    from megatron_t1.model.convert import export_hf

    write_hf(tmp_path / "hf")
    out = tmp_path / "out"
    if kind == "a file":
        out.write_text("notes")
    else:
        write_hf(out / "mine")
    with pytest.raises(ConfigError, match="that is no export"):
        export_hf(build(backend), out, tmp_path / "hf", "float32")
    assert (out / "mine/config.json").is_file() if out.is_dir() else out.read_text() == "notes"


def test_value_head_is_newly_initialised_and_projection_unused(tmp_path, backend):  # slime#2259 slime#1878
    model = build(backend, "value")
    report = load(model, write_hf(tmp_path / "hf"), "value")
    assert report.newly_initialised == ["output_layer.weight", "output_layer.bias"]
    assert report.unused == ["lm_head.weight"]
    assert model[0].output_layer.weight.shape == (1, 32) and model[0].output_layer.weight.abs().sum() == 0
    values = model[0](*tokens(2, 8), None)
    assert values.shape == (2, 8) and values.dtype == torch.float32


def test_value_model_starts_from_a_tied_checkpoint(tmp_path, backend):  # slime#2259
    tied = replace(ARCHITECTURE, tie_word_embeddings=True)
    report = load(build(backend, "value", tied), write_hf(tmp_path / "hf", tied), "value")
    assert report.unused == [] and len(report.newly_initialised) == 2


def test_narrowing_is_reported(tmp_path, backend):
    report = load(build(backend, dtype="bfloat16"), write_hf(tmp_path / "hf"), "policy")
    assert set(report.converted) == {"float32 -> bfloat16"}


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda t: t.pop(EXPERT), IncompleteError, EXPERT),
        (lambda t: t.update({"model.layers.9.extra": torch.zeros(1)}), IncompleteError, "model.layers.9.extra"),
        (lambda t: t.update({EXPERT: torch.zeros(15, 32)}), MismatchError, r"\[15, 32\].*\[16, 32\]"),
        (lambda t: t.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}), MismatchError, "I8"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, backend, change, error, named):  # Megatron-LM#5845
    directory = write_hf(tmp_path / "hf")
    edit(directory, change)
    with pytest.raises(error, match=named):
        load(build(backend), directory, "policy")


def test_other_architecture_is_refused_with_both_values(tmp_path, backend):
    directory = write_hf(tmp_path / "hf", replace(ARCHITECTURE, num_experts=4))
    with pytest.raises(MismatchError, match="num_experts: the checkpoint has 4, the model 8"):
        load(build(backend), directory, "policy")


def test_truncated_weights_are_refused(tmp_path, backend):
    directory = write_hf(tmp_path / "hf")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IncompleteError, match=r"can't be read"):
        load(build(backend), directory, "policy")


@pytest.mark.parametrize("index", ["../outside.safetensors", "missing.safetensors"])
def test_index_that_leaves_its_directory_or_names_no_file_is_refused(tmp_path, index):
    from megatron_t1.model.safetensors_io import SafetensorsDirectory

    directory = write_hf(tmp_path / "hf")
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": index}}))
    with pytest.raises(IncompleteError):
        SafetensorsDirectory(directory)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"model_type": "llama"}, ConfigError, "llama"),
        ({"attention_bias": True}, ConfigError, "attention_bias"),
        ({"norm_topk_prob": False}, ConfigError, "norm_topk_prob"),
        ({"mlp_only_layers": [0]}, ConfigError, "mlp_only_layers"),
        ({"rope_scaling": {"type": "yarn"}}, ConfigError, "yarn"),
        ({"hidden_size": None}, IncompleteError, "hidden_size"),
    ],
)
def test_config_with_unknown_options_is_refused(tmp_path, change, error, named):
    from megatron_t1.model.stored import architecture_from_hf

    raw = {**hf_config(ARCHITECTURE), **change}
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with pytest.raises(error, match=named):
        architecture_from_hf(tmp_path)


def test_architecture_is_read_from_config(tmp_path):
    from megatron_t1.model.stored import architecture_from_hf

    (tmp_path / "config.json").write_text(json.dumps(hf_config(ARCHITECTURE)))
    assert architecture_from_hf(tmp_path) == replace(ARCHITECTURE, initializer_range=0.02)


def test_open_vocabulary_size_comes_from_the_checkpoint(tmp_path):
    from megatron_t1.model.build import resolve_architecture

    config = tiny_config(architecture=replace(ARCHITECTURE, vocab_size=0)).model
    config.path = str(write_hf(tmp_path / "hf"))
    assert resolve_architecture(config).vocab_size == 67
    config.architecture.num_experts = 16
    with pytest.raises(MismatchError, match="num_experts"):
        resolve_architecture(config)


def test_the_configured_architecture_must_be_the_checkpoints(tmp_path):
    """Also where the vocabulary is given: every training process asks this before it builds anything."""
    from megatron_t1.model.build import resolve_architecture

    config = tiny_config().model
    config.path = str(write_hf(tmp_path / "hf"))
    config.architecture.max_position_embeddings = 9  # shapes nothing: the checkpoint's counts
    assert resolve_architecture(config).max_position_embeddings == 256
    config.architecture.num_hidden_layers = 8
    with pytest.raises(MismatchError, match="num_hidden_layers: the checkpoint has 4, the model 8"):
        resolve_architecture(config)
