import dataclasses
import os
import subprocess
import sys

import pytest

from megatron_t1.config.compose import absolute, as_override, compose, flatten, group_names, load_run_config, save
from megatron_t1.config.schema import Config
from megatron_t1.errors import ConfigError, IncompleteError
from megatron_t1.resources import resource_dir


def every_setting():
    groups = group_names([resource_dir("conf")])
    return [[f"{group}={option}"] for group, options in groups.items() for option in options]


@pytest.mark.parametrize("overrides", every_setting(), ids=lambda overrides: overrides[0])
def test_every_shipped_group_option_composes(overrides):
    assert isinstance(compose(overrides), Config)


def test_defaults_are_the_tiny_model_on_this_machine():
    config = compose()
    assert (config.model.name, config.cluster.launcher, config.layout.expert) == ("tiny", "local", 2)


@pytest.mark.parametrize(
    "path",
    ["runs/a", "runs/00_lr=1e-6,seed=(2)", "é/ü", "a'b", "a\\'b", "a\\", "a\\\\", "a\\b", "a b", " a ", "[x]", "{y}",
     "$HOME", "~x", "a:b", 'a"b', "5", "1e3", "null", "true", "a/${b}", "a${run.seed}"],
)  # fmt: skip
def test_a_path_is_an_override_whatever_is_in_it(path):
    assert compose([as_override("run.dir", path)]).run.dir == path


def test_experiment_with_and_without_plus_is_the_same():
    assert compose(["experiment=quickstart"]) == compose(["+experiment=quickstart"])


def test_overrides_win_over_the_experiment():
    config = compose(["experiment=ppo_122b", "model=tiny", "layout=ep2", "train.actor.lr=2e-6"])
    assert (config.model.name, config.layout.processes, config.train.actor.lr) == ("tiny", 2, 2e-6)


def test_published_numbers_of_the_122b():
    architecture = compose(["model=qwen3_5_122b_a10b"]).model.architecture
    layers, hidden = architecture.num_hidden_layers, architecture.hidden_size
    experts = layers * architecture.num_experts * 3 * hidden * architecture.moe_intermediate_size
    assert (layers, architecture.num_experts, architecture.num_experts_per_tok) == (48, 256, 8)
    assert experts == 115_964_116_992
    assert 2 * architecture.vocab_size * hidden == 1_525_678_080  # embedding and head


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.actor.lrr=1", ["train.actor.lrr", "train.actor.lr"]),
        ("modle=tiny", ["modle", "model"]),
        ("model=tinny", ["tinny", "tiny"]),
        ("train.actor.lr=fast", ["train.actor.lr", "fast"]),
        ("rollout.seeded=perhaps", ["rollout.seeded", "perhaps"]),
        ("train.actor=3", ["section"]),
        ("+new.option=1", ["new.option"]),
        ("nonsense", ["nonsense"]),
        ("hydra.job.name=x", ["hydra.job.name"]),
        ("lr=1", ["train.actor.lr"]),
    ],
)
def test_what_is_unknown_is_refused_and_named(override, words):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert all(word in str(caught.value) for word in words)


def test_all_unknown_names_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        compose(["train.actor.lrr=1", "rollouts.seeded=true"])
    assert "train.actor.lrr" in str(caught.value) and "rollouts.seeded" in str(caught.value)


def test_open_sections_take_any_key():
    config = compose(["extra.threshold=3", "cluster.train.env.NCCL_DEBUG=INFO"])
    assert config.extra == {"threshold": 3}
    assert config.cluster.train.env == {"NCCL_DEBUG": "INFO"}


def test_own_config_directory(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\npath: /models/mine\n")
    assert compose(["model=mine"], config_dirs=[tmp_path]).model.name == "mine"
    with pytest.raises(ConfigError, match="does not exist"):
        compose([], config_dirs=[tmp_path / "absent"])


def test_run_config_round_trip_and_key_overrides(tmp_path):
    original = compose(["experiment=learn", "extra.note=hello", f"run.dir={tmp_path}"])
    save(original, tmp_path / "config.yaml")
    assert load_run_config(tmp_path) == original
    changed = load_run_config(tmp_path, ["train.actor.lr=1e-5", "iteration=4", "extra.more=2"])
    assert (changed.train.actor.lr, changed.iteration, changed.extra) == (1e-5, 4, {"note": "hello", "more": 2})


def test_run_config_refuses_groups_and_unknown_keys(tmp_path):
    save(compose(), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="groups"):
        load_run_config(tmp_path, ["model=tiny_64e"])
    with pytest.raises(ConfigError, match="train.actor.lrr"):
        load_run_config(tmp_path, ["train.actor.lrr=1"])


def test_moved_run_directory_is_followed(tmp_path):
    save(compose(["run.dir=/elsewhere"]), tmp_path / "config.yaml")
    assert load_run_config(tmp_path).run.dir == str(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"run: [",
        b"unknown_section: {a: 1}",
        b"",
        b"\xff\xfe\x00\x01",
        b"\x00",
        b"5",
        b"- run",
        b"train: 5",
        b"run: []",
    ],
)
def test_absent_or_damaged_run_config(tmp_path, content):
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises((IncompleteError, ConfigError), match="config"):
        load_run_config(tmp_path)


def test_absolute_paths_leave_the_original_alone(tmp_path):
    config = compose(["model.path=models/x", "env.tasks=/tasks"])
    resolved = absolute(config, tmp_path)
    assert resolved.model.path == str(tmp_path / "models/x")
    assert resolved.env.tasks == "/tasks"
    assert config.model.path == "models/x"


def test_flatten_names_every_leaf_once():
    flat = flatten(Config())
    assert flat["train.actor.clip_high"] == 0.28
    assert not any(dataclasses.is_dataclass(value) for value in flat.values())


def test_composition_needs_no_torch(tmp_path):
    code = (
        "import sys; from megatron_t1.config.compose import compose; compose(['experiment=quickstart']);"
        "import megatron_t1.cli, megatron_t1.loop.runner, megatron_t1.report.show;"
        "print([name for name in ('torch', 'vllm', 'megatron', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(resource_dir("conf").parent)},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
