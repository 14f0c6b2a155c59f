"""`t1 plan`, and the question that `t1 run` and `t1 slurm submit` ask before they start anything."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from megatron_t1.cli import main
from megatron_t1.commands.plan import fit_problems
from megatron_t1.config.compose import compose
from megatron_t1.config.schema import LayoutConfig
from megatron_t1.config.validate import layout_problems
from megatron_t1.planner import hardware
from megatron_t1.planner.activations import Workload, layer_bytes
from megatron_t1.planner.hardware import GIB, GPUS, find_gpu, parse_query
from megatron_t1.planner.memory import engine_room, rollout_memory, training_memory
from megatron_t1.planner.preflight import device_of
from megatron_t1.planner.search import fastest, nearest, with_layout
from megatron_t1.planner.times import busy_seconds, iteration_times, pipeline_bubble, weights_touched

LARGE = ("experiment=ppo_122b", "plan.gpu=h100")
# Megatron-Bridge's layout for 4,096 tokens, with micro-batches 32 times as long.
TOO_LARGE = (*LARGE, "layout=gpus48", "layout.context=1")


@pytest.fixture(scope="module")
def large():
    return compose(LARGE)


def test_a_plan_of_the_122b(capsys):
    assert main(["plan", *LARGE]) == 0
    said = capsys.readouterr().out
    assert "122.11B parameters" in said and "TP2 PP4 CP8 EP16, full recompute" in said
    assert re.search(r"actor +\d+\.\d +fits +weights 5\.17, gradients 10\.34, optimizer 21\.60", said)
    assert "routes" in said and "both resident" in said and "GiB too much" in said


def test_a_plan_as_numbers_adds_up(capsys):
    assert main(["plan", *LARGE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for phase in found["memory"]:
        assert phase["total"] == sum(phase["terms"].values()) == max(phase["by_stage"]) and phase["fits"]
    assert found["written"]["routes"] == 256 * 65536 * 48 * 8
    assert found["written"]["export"] == 2 * 122_111_526_912
    assert found["written"]["actor's checkpoint"] == 14 * 122_111_526_912


def test_what_does_not_fit_is_named_with_layouts_that_do(capsys):
    assert main(["plan", *TOO_LARGE]) == 1
    said = capsys.readouterr().out
    assert "actor needs" in said and "of each GPU, which has 79.6 GiB (h100" in said
    overrides = re.search(r"nearest layouts that fit: (.*?) \(", said)[1].split()
    assert main(["plan", *TOO_LARGE, *overrides]) == 0


def test_layouts_side_by_side(capsys):
    assert main(["plan", "experiment=ppo_122b", "plan.gpu=h200", "--layouts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("gpus64 " in line and "fits" in line for line in lines)
    assert any("gpus256 " in line for line in lines)


def test_layouts_as_numbers_and_none_at_all(capsys):
    assert main(["plan", *LARGE, "--layouts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus64"]["layout"]["pipeline"] == 4 and len(found) > 10
    five = ["model.architecture.num_experts=5", "model.architecture.num_experts_per_tok=5", "layout=single"]
    assert main(["plan", *LARGE, *five, "--layouts"]) == 2
    assert "no shipped layout" in capsys.readouterr().err


def test_a_tiny_model_is_planned_for_the_cpu(capsys):
    assert main(["plan", "experiment=quickstart", "model.architecture.vocab_size=600", "cluster.backend=cpu"]) == 0
    said = capsys.readouterr().out
    assert "2 x CPU" in said and "time of an iteration" not in said
    assert main(["plan", "experiment=quickstart", "model.path=", "cluster.backend=cpu"]) == 2
    assert "vocabulary" in capsys.readouterr().err


def test_a_gpu_must_be_known(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "local_gpu", lambda: None)
    assert main(["plan", "experiment=ppo_122b"]) == 2
    assert "plan.gpu=h100" in capsys.readouterr().err
    assert fit_problems(compose(["experiment=ppo_122b", "layout=gpus48"])) == []  # nothing is known, nothing is said


@pytest.mark.parametrize("command", [("run",), ("slurm", "submit", "--dry-run")], ids=["run", "submit"])
def test_nothing_starts_that_does_not_fit(command, tmp_path, capsys):
    words = [*command, *TOO_LARGE, f"run.dir={tmp_path / 'run'}"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "critic needs" in said and "nearest layouts that fit: layout." in said and "plan.ignore_memory=true" in said
    assert main([*words, "plan.ignore_memory=true"]) == 2  # the model and the tasks aren't there
    said = capsys.readouterr().err
    assert "needs" not in said.replace("phase needs", "") or "of each GPU" not in said
    assert not (tmp_path / "run").exists()


def test_candidates_break_no_rule_and_fit(large):
    gpu = GPUS["h100"]
    config = compose(TOO_LARGE)
    for found in (nearest(config, gpu, 20), fastest(config, gpu, 20)):
        assert found
        for each in found:
            trial = with_layout(config, each.layout)
            assert layout_problems(trial) == []
            assert training_memory(trial, "actor").total <= gpu.memory
    assert nearest(large, gpu)[0].changes == {}  # one that fits is its own nearest


def test_what_a_phase_has_for_itself_is_left_out_where_it_is_too_large(capsys):
    """An empty override would change nothing."""
    assert main(["plan", *LARGE, "layout.critic.recompute=none"]) == 1
    assert "nearest layouts that fit: without layout.critic.* (" in capsys.readouterr().out


def test_more_gpus_are_asked_for_where_no_layout_fits():
    config = compose([*LARGE, "layout.processes=8", "layout.pipeline=1", "layout.context=1", "layout.tensor=1",
                      "layout.expert=8"])  # fmt: skip
    assert all(each.layout.processes > 8 and "processes" in each.changes for each in nearest(config, GPUS["h100"]))


def test_gpus_of_this_machine():
    assert parse_query("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H200, 143771\n").memory_gib == pytest.approx(
        79.65, abs=0.01
    )
    assert parse_query("NVIDIA H200, 143771").bandwidth_gb_s == GPUS["h200"].bandwidth_gb_s
    unknown = parse_query("NVIDIA Z999, 98304\n")
    assert unknown.memory == 96 * GIB and unknown.tflops == GPUS["h20"].tflops
    assert parse_query("") is None and parse_query("No devices were found\n") is None
    assert find_gpu("h100", 40.0).memory == 40 * GIB


def test_the_device_is_what_backend_and_plan_say(large):
    assert device_of(large).gpu.name == "h100"
    cpu = replace(large, cluster=replace(large.cluster, backend="cpu"))
    assert device_of(cpu).gpu is None


def test_the_engine_holds_what_is_left(large):
    """24 KiB of keys and values a token, twice 144 MiB of state a sequence; eight GPUs have each head four times."""
    whole = replace(large, rollout=replace(large.rollout, engine=replace(large.rollout.engine, tensor_parallel=1)))
    room = engine_room(whole, 800 * GIB)
    assert room.per_token == 24 * 1024
    assert room.per_sequence == pytest.approx(2 * (144 + 2.5) * 2**20, rel=0.01)
    eight = engine_room(large, GPUS["h100"].memory)
    assert eight.per_token == room.per_token / 2 and eight.per_sequence == room.per_sequence // 8
    assert eight.weights == pytest.approx(room.weights / 8, rel=1e-6)
    assert rollout_memory(whole, GPUS["h100"].memory).problem(GPUS["h100"].memory)


def test_times_move_the_right_way(large):
    gpu = GPUS["h100"]
    times = {phase.phase: phase for phase in iteration_times(large, gpu)}
    assert set(times) == {"rollout", "critic", "actor", "export"}
    twice = replace(large, layout=replace(large.layout, processes=128, expert=32))
    faster = {phase.phase: phase for phase in iteration_times(twice, gpu)}
    for role in ("critic", "actor"):
        assert busy_seconds(faster[role].parts) < busy_seconds(times[role].parts)
        assert times[role].total == pytest.approx(sum(times[role].parts.values()))
    deep = replace(large, layout=replace(large.layout, pipeline=8, context=4))
    assert pipeline_bubble(deep, "actor", 65536) > pipeline_bubble(large, "actor", 65536)
    assert weights_touched(large, 1) < weights_touched(large, 64) < 122_111_526_912
    assert weights_touched(large, 1) == pytest.approx(9.77e9, rel=1e-3)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("plan.gpu_memory_gib=-5", "must not be negative"),
        ("plan.reserve_gib=-3", "must not be negative"),
        ("plan.imbalance=0.1", "plan.imbalance=0.1: the fullest rank"),
        ("rollout.engine.tensor_parallel=3", "num_attention_heads=32 is not a multiple of rollout.engine.tensor_paral"),
        ("layout.processes=1000000007", "it must be at most"),
    ],
)
def test_nonsense_is_refused_before_it_is_planned_with(option, said, capsys):
    assert main(["plan", *LARGE, option]) == 2
    assert said in capsys.readouterr().err


def test_a_rollout_that_does_not_fit_is_told_the_smallest_engine_that_does(large, capsys):
    small = ["rollout.engine.tensor_parallel=2"]
    assert main(["plan", *LARGE, *small]) == 1
    said = capsys.readouterr().out
    tensor = int(re.search(r"a rollout fits with rollout\.engine\.tensor_parallel=(\d+)", said)[1])
    assert tensor > 2 and "nearest layouts" not in said
    assert main(["plan", *LARGE, f"rollout.engine.tensor_parallel={tensor}"]) == 0


def test_no_more_episodes_are_in_flight_than_an_engine_gets(large):
    """256 trajectories over 8 engines: 32 each, whatever concurrency allows."""
    memory = GPUS["h100"].memory
    room = engine_room(large, memory)
    assert room.in_flight(large) == 256 // 8 < large.rollout.concurrency
    found = rollout_memory(large, memory)
    mean = large.plan.mean_length * large.rollout.max_context
    assert found.terms["cache and states"] == int(32 * (mean * room.per_token + room.per_sequence))
    assert not any("preempt" in note for note in found.notes)
    crowded = replace(large, rollout=replace(large.rollout, tasks_per_iteration=1024))
    assert any("preempts some" in note for note in rollout_memory(crowded, memory).notes)


def test_engines_are_not_given_gpus_that_a_node_does_not_have(capsys):
    assert main(["plan", *LARGE, "cluster.rollout.processes_per_node=2"]) == 1
    said = capsys.readouterr().out
    assert "rollout: 16 GPUs for the engines of a node" in said and "which has 8" in said
    assert "a rollout fits with rollout.engine.tensor_parallel=4" in said
    assert main(["plan", *LARGE, "cluster.rollout.processes_per_node=2", "cluster.rollout.gpus_per_node=16"]) == 0
    assert main(["plan", *LARGE, "layout.engine_tensor=4"]) == 0
    assert "engines use 4 of a node's 8 GPUs" in capsys.readouterr().out


def test_more_tensor_ranks_than_key_value_heads_gather_the_projection(large):
    """Core's attention: with 2 such heads, 4 ranks each hold queries, gates, keys and values of all heads."""
    a = large.model.architecture
    two, four = (
        layer_bytes(a, "bfloat16", Workload(1), LayoutConfig(tensor=tensor), attends=True).mixer for tensor in (2, 4)
    )
    whole, other = (2 * 32 + 2 * 2) * 256 * 2, 2 * 256 * 2  # bytes of a token, bfloat16
    assert four - two == 3 * whole + 3 * other  # of a fourth of the tokens: the whole, less the own fourth


def test_the_dispatcher_decides_what_is_exchanged(large):
    """Of 16 ranks each sends its tokens to 15, or to the 8 experts of each token."""
    busy = {}
    for dispatcher in ("alltoall", "allgather"):
        config = with_layout(large, replace(large.layout, dispatcher=dispatcher, context=1, tensor=1))
        busy[dispatcher] = iteration_times(config, GPUS["h100"])[1].parts["exchange"]
    assert busy["allgather"] == pytest.approx(2 * busy["alltoall"])
