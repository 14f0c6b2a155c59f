"""Qwen3.5 checkpoints there and back: text and vision-language names, experts in one tensor or in many, all layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_t1.errors import ConfigError, IncompleteError, MismatchError
from megatron_t1.model.stored import architecture_from_hf
from tests.distributed import run_distributed
from tests.hybrid_model import CARRIED, HYBRID, hybrid_hf_config, write_hybrid
from tests.model.workers import hybrid_round_trips


def exported(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors.update(load_file(directory / file))
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def round_trip(directory, dtype="float32"):
    """In this process, to out0; the report of loading."""
    (result,) = hybrid_round_trips(str(directory), [{}], dtype)
    return result["report"]


def assert_same(root, out="out0"):
    """The export has the same tensors, types, bits and settings as the checkpoint."""
    original, copy = load_file(root / "hf/model.safetensors"), exported(root / out)
    assert original.keys() == copy.keys()
    for name, tensor in original.items():
        assert tensor.dtype == copy[name].dtype and torch.equal(tensor, copy[name]), name
    for path in (root / "hf").glob("*.json"):
        assert json.loads(path.read_text()) == json.loads((root / out / path.name).read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vision", "fused"), product((False, True), repeat=2))
def test_a_checkpoint_of_any_convention_comes_back_as_it_was(tmp_path, backend, vision, fused, dtype):
    write_hybrid(tmp_path / "hf", dtype=dtype, vision=vision, fused=fused)
    report = round_trip(tmp_path, dtype)
    assert_same(tmp_path)
    assert report["carried"] == (len(CARRIED) if vision else 0)
    assert (report["converted"], report["inexact"], report["newly_initialised"]) == ({}, 0, [])


PAIRS = [
    {"pipeline": 2},
    {"expert": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert_tensor": 2},
]
FOUR = [{"tensor": 2, "expert": 2, "expert_tensor": 2, "dispatcher": "allgather"}, {"pipeline": 2, "expert": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layouts", "fused"), [(2, PAIRS, False), (4, FOUR, True)])
def test_round_trip_over_several_ranks_is_bit_exact(tmp_path, ranks, layouts, fused):
    """Megatron-LM#5844, Megatron-Bridge#1871. A tensor of all experts is gathered from ranks that hold parts of it."""
    write_hybrid(tmp_path / "hf", dtype="bfloat16", vision=True, fused=fused)
    arguments = {"directory": str(tmp_path), "layouts": layouts, "dtype": "bfloat16"}
    results = run_distributed("tests.model.workers:hybrid_round_trips", ranks, **arguments)
    assert all(result == results[0] for result in results)
    for number, result in enumerate(results[0]):
        assert_same(tmp_path, f"out{number}")
        assert (result["report"]["inexact"], result["report"]["converted"]) == (0, {})
        assert len(result["files"]) == len(list((tmp_path / f"out{number}").iterdir()))


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NORM = "model.layers.0.linear_attn.norm.weight"
FUSED = "model.layers.1.mlp.experts.down_proj"


def test_a_norm_that_does_not_come_back_to_the_bit_is_counted(tmp_path, backend):
    write_hybrid(tmp_path / "hf")
    edit(tmp_path / "hf", lambda tensors: tensors.update({NORM: torch.linspace(0.1, 0.4, 16)}))
    assert round_trip(tmp_path)["inexact"] == 1


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda t: t.pop(NORM), IncompleteError, NORM),
        (lambda t: t.update({FUSED: t[FUSED][:7].clone()}), MismatchError, r"\[7, 32, 16\].*\[8, 32, 16\]"),
        (lambda t: t.update({NORM: torch.full((16,), torch.nan)}), IncompleteError, "NaN"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.0.down_proj.weight": t[FUSED][0].clone()}),
            IncompleteError,
            "have no use: model.layers.0.mlp.experts.0",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, backend, change, error, named):
    write_hybrid(tmp_path / "hf")
    edit(tmp_path / "hf", change)
    with pytest.raises(error, match=named):
        round_trip(tmp_path)
    assert not (tmp_path / "out0").exists()


def test_a_template_whose_tensors_would_be_lost_is_refused(tmp_path, backend):
    from megatron_t1.model.convert import export_hf, load_hf
    from tests.model.skeleton import skeleton

    write_hybrid(tmp_path / "hf")
    chunks = [skeleton(HYBRID)]
    load_hf(chunks, tmp_path / "hf", "policy")
    edit(tmp_path / "hf", lambda tensors: tensors.update({"model.audio.weight": torch.zeros(1)}))
    with pytest.raises(MismatchError, match=r"would be lost: model\.audio\.weight"):
        export_hf(chunks, tmp_path / "out", tmp_path / "hf", "float32")


@pytest.mark.parametrize("name", ["hf", "."])
def test_an_export_never_replaces_its_own_template(tmp_path, backend, name):
    from megatron_t1.model.convert import export_hf
    from tests.model.skeleton import skeleton

    write_hybrid(tmp_path / "hf")
    with pytest.raises(ConfigError, match="would replace the checkpoint"):
        export_hf([skeleton(HYBRID)], tmp_path / name, tmp_path / "hf", "float32")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_what_is_no_file_among_the_templates_settings_ends_the_export(tmp_path, backend):
    """A link to a device would be copied for ever."""
    from megatron_t1.model.convert import export_hf, load_hf
    from tests.model.skeleton import skeleton

    write_hybrid(tmp_path / "hf")
    load_hf(chunks := [skeleton(HYBRID)], tmp_path / "hf", "policy")
    (tmp_path / "hf" / "extra.json").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        export_hf(chunks, tmp_path / "out", tmp_path / "hf", "float32")
    assert not (tmp_path / "out").exists()


def test_the_architecture_is_read_from_text_and_vision_language_configurations(tmp_path):
    for vision in (False, True):
        directory = write_hybrid(tmp_path / str(vision), vision=vision)
        assert architecture_from_hf(directory) == replace(HYBRID, mtp_num_hidden_layers=int(vision))


LINEAR, FULL = "linear_attention", "full_attention"


def test_layer_types_give_the_interval_or_are_refused(tmp_path):
    config = hybrid_hf_config(HYBRID)
    del config["full_attention_interval"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": [LINEAR, FULL] * 2}))
    assert architecture_from_hf(tmp_path).full_attention_interval == 2
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": [LINEAR, FULL, FULL, LINEAR]}))
    with pytest.raises(ConfigError, match="layer_types"):
        architecture_from_hf(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_models_parameters_are_those_of_the_table_and_come_back_to_the_bit(tmp_path, backend, dtype):
    """The model that is trained, in shapes and types, so that what holds for the skeletons above holds for it."""
    from megatron_t1.model.build import build_model
    from megatron_t1.model.convert import export_hf, load_hf
    from tests.model.skeleton import skeleton
    from tests.tiny_model import tiny_config

    write_hybrid(tmp_path / "hf", dtype=dtype)
    chunks = build_model(tiny_config(architecture=HYBRID, dtype=dtype), backend, "policy", initialize=False)
    assert parameters_of(chunks[0]) == parameters_of(skeleton(HYBRID, getattr(torch, dtype)))
    report = load_hf(chunks, tmp_path / "hf", "policy")
    export_hf(chunks, tmp_path / "out0", tmp_path / "hf", dtype)
    assert_same(tmp_path)
    assert (report.converted, report.inexact) == ({}, 0)


def parameters_of(chunk):
    return {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in chunk.named_parameters()}


def test_state_that_no_tensor_stands_for_is_refused(tmp_path, backend):
    from megatron_t1.model.convert import load_hf
    from tests.model.skeleton import skeleton

    chunk = skeleton(HYBRID)
    chunk.decoder.layers[0].mlp.router.register_buffer("expert_bias", torch.zeros(8))
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0\.mlp\.router\.expert_bias"):
        load_hf([chunk], write_hybrid(tmp_path / "hf"), "policy")


def test_a_rank_that_cannot_write_still_hands_its_parts_to_the_others(tmp_path):
    """Its jobs are collectives: the ranks that can write would wait for it for ever."""
    from megatron_t1.model.hf_export import _write
    from megatron_t1.model.safetensors_io import TensorHeader

    class Job:
        is_owner, handed = True, 0

        def __init__(self, name):
            self.tensors = [TensorHeader(name, (2,), torch.float32)]

        def blocks(self):
            for _ in range(2):
                yield self.tensors[0].name, torch.zeros(1)
                Job.handed += 1

    jobs = [Job("a"), Job("b")]
    with pytest.raises(FileNotFoundError):
        _write(tmp_path / "absent", jobs, [("x.safetensors", [job.tensors[0] for job in jobs])])
    assert Job.handed == 4
