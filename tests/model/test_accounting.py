"""`t1 convert check`: every tensor has a use, by name, shape and type, and a layout loads each exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_t1.cli import main
from megatron_t1.config.compose import compose
from megatron_t1.config.schema import LayoutConfig
from megatron_t1.errors import IncompleteError
from megatron_t1.model.accounting import TRAINED, account_for
from megatron_t1.model.mapping import WeightMapping
from megatron_t1.model.names import CheckpointNames
from tests.hybrid_model import CARRIED, HYBRID, hybrid_hf_config, write_hybrid
from tests.tiny_model import ARCHITECTURE, write_hf


def test_a_complete_checkpoint_is_accounted_for_by_part_type_and_rank(tmp_path):
    write_hybrid(tmp_path / "hf", dtype="bfloat16", vision=True)
    layout = LayoutConfig(processes=8, tensor=2, pipeline=2, expert=2, expert_tensor=2)
    account = account_for(tmp_path / "hf", layout)
    assert account.problems == []
    expected = dict(WeightMapping(HYBRID, account.names).tensors())
    trained = account.parts[TRAINED]
    assert trained.tensors == len(expected)
    assert trained.numbers == sum(torch.Size(shape).numel() for shape in expected.values())
    assert trained.types == {"F32": 6, "BF16": len(expected) - 6}  # A_log and norm of three layers
    assert sum(part.tensors for part in account.parts.values()) == len(expected) + len(CARRIED)
    assert account.layout[0][1] == account.layout[1][1] == 2 * 4 * 3 * 16 * 32 // 2  # layers, experts, matrices


@pytest.mark.parametrize("layout", ["gpus48", "gpus256"])
def test_a_layout_of_the_large_model_loads_every_tensor_once_by_index_and_config_alone(tmp_path, layout):
    config = compose(["model=qwen3_5_122b_a10b", f"layout={layout}"])
    architecture = config.model.architecture
    names = CheckpointNames("model.language_model.", fused_experts=True)
    tensors = [*(name for name, _ in WeightMapping(architecture, names).tensors()), "mtp.fc.weight"]
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = hybrid_hf_config(architecture, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    account = account_for(tmp_path, config.layout)
    assert (account.problems, account.files) == ([], 0)
    assert len(account.layout) == config.layout.pipeline
    on_all = sum(
        dense * config.layout.tensor + expert * config.layout.expert * config.layout.expert_tensor
        for dense, expert in account.layout.values()
    )
    assert on_all > 122_111_526_912  # norms and routers are on every tensor-parallel rank


def change_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = {"weight_map": dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")}
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def change_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(EXPERT), f"the model lacks in the checkpoint 1 tensors: {EXPERT}"),
        (lambda t: t.update({"mtp.fc.weight": torch.zeros(1)}), "nobody uses 1 tensors: mtp.fc.weight"),
        (lambda t: t.update({EXPERT: torch.zeros(16, 31)}), f"{EXPERT} has shape [16, 31]"),
        (lambda t: t.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}), f"{EXPERT} is stored as I8"),
    ],
)
def test_what_is_not_accounted_for_is_named(tmp_path, change, said):
    write_hf(tmp_path / "hf")
    change_weights(tmp_path / "hf", change)
    (problem,) = account_for(tmp_path / "hf").problems
    assert problem.startswith(said)


def test_files_that_are_missing_or_differ_from_the_index_are_named(tmp_path):
    directory = write_hf(tmp_path / "hf")
    change_index(directory, lambda files: files.update({EXPERT: "other.safetensors"}))
    assert any("other.safetensors" in problem for problem in account_for(directory).problems)
    change_index(directory, lambda files: files.pop(EXPERT))
    assert f"index and files disagree about 1 tensors: {EXPERT}" in account_for(directory).problems


def test_a_layout_that_does_not_divide_the_model_is_a_problem(tmp_path):
    write_hf(tmp_path / "hf", replace(ARCHITECTURE, num_experts=6))
    problems = account_for(tmp_path / "hf", LayoutConfig(processes=4, expert=4)).problems
    assert len(problems) == 1 and "num_experts=6" in problems[0] and "expert=4" in problems[0]


def test_phases_with_a_layout_of_their_own_are_visited_too(tmp_path, capsys):
    directory = str(write_hf(tmp_path / "hf"))
    own = tmp_path / "my/layout/ours.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: [ep2]\ncritic: {expert: 1}\n")
    assert main(["convert", "check", directory, "--config-dir", str(tmp_path / "my"), "layout=ours"]) == 0
    assert main(["convert", "check", directory, "layout=ep2", "layout.critic.pipeline=3"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM: layout.critic.processes=2 must be a multiple of" in said
    assert main(["convert", "check", directory, "layout=ep2", "layout.critic.expret=2"]) == 2
    assert "layout.critic.expret: the layout has no such option" in capsys.readouterr().err


def test_a_check_needs_no_torch(tmp_path):
    """Before a download and on a login node: the loop's own environment has none."""
    directory = write_hybrid(tmp_path / "hf", vision=True)
    command = ["convert", "check", str(directory), "layout=ep2"]
    code = f"import sys; sys.modules['torch'] = None; from megatron_t1.cli import main; sys.exit(main({command}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "every tensor is accounted for, exactly once" in done.stdout


def test_a_directory_without_weights_and_index_is_refused(tmp_path):
    (write_hf(tmp_path / "hf") / "model.safetensors").unlink()
    with pytest.raises(IncompleteError, match="neither"):
        account_for(tmp_path / "hf")


def test_the_command_prints_the_account_and_fails_on_a_problem(tmp_path, capsys):
    from megatron_t1.cli import main

    write_hybrid(tmp_path / "hf", vision=True)
    assert main(["convert", "check", str(tmp_path / "hf"), "layout=ep2"]) == 0
    said = capsys.readouterr().out
    assert "every tensor is accounted for, exactly once" in said and "EP2" in said and "vision tower" in said
    change_weights(tmp_path / "hf", lambda tensors: tensors.pop("lm_head.weight"))
    assert main(["convert", "check", str(tmp_path / "hf")]) == 1
    assert "PROBLEM: the model lacks in the checkpoint 1 tensors: lm_head.weight" in capsys.readouterr().out


def test_the_command_takes_layouts_only_and_prints_no_escapes(tmp_path, capsys):
    from megatron_t1.cli import main

    write_hf(tmp_path / "hf")
    change_weights(tmp_path / "hf", lambda tensors: tensors.update({"x\x1b[2Jy": torch.zeros(1)}))
    assert main(["convert", "check", str(tmp_path / "hf")]) == 1
    assert "\\x1b[2J" in (said := capsys.readouterr().out) and "\x1b" not in said
    assert main(["convert", "check", str(tmp_path / "hf"), "model=tiny"]) == 2
    assert "'model=tiny' has no part in this" in capsys.readouterr().err


def test_a_tensor_that_is_stored_twice_is_refused_when_it_is_loaded_too(tmp_path):
    from megatron_t1.model.safetensors_io import SafetensorsDirectory

    directory = write_hf(tmp_path / "hf")
    change_index(directory, lambda files: files.update({EXPERT: "other.safetensors"}))
    save_file({EXPERT: torch.zeros(16, 32)}, directory / "other.safetensors")
    said = f"1 tensors of other.safetensors are in another file too: {EXPERT}"
    assert said in account_for(directory).problems
    with pytest.raises(IncompleteError, match=said):
        SafetensorsDirectory(directory)


@pytest.mark.parametrize("entry", [{"dtype": "F32", "shape": "12"}, {"shape": [1]}, {"dtype": 3, "shape": [1]}])
def test_a_header_that_says_no_type_or_shape_is_a_problem(tmp_path, entry):
    directory = write_hf(tmp_path / "hf")
    header = json.dumps({EXPERT: {**entry, "data_offsets": [0, 0]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert any(f"no type, shape or place of {EXPERT}" in problem for problem in account_for(directory).problems)
