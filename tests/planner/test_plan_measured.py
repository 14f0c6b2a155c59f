"""The plan's memory beside that of real training processes: within ten percent."""

from __future__ import annotations

import pytest

from megatron_t1.planner.activations import Workload, stage_activations
from megatron_t1.planner.parameters import chunk_parameters, chunks_of, rank_bytes
from tests.distributed import run_distributed
from tests.planner.measured import config_of

TOLERANCE = 0.10
CASES = [
    {"role": "policy", "dtype": "float32", "tokens": 2048, "layout": {"recompute": "none"}},
    {"role": "policy", "dtype": "bfloat16", "tokens": 2048, "layout": {"recompute": "full"}},
    {"role": "value", "dtype": "bfloat16", "tokens": 2048, "layout": {"recompute": "moe"}},
    {"role": "value", "dtype": "float32", "tokens": 2048, "layout": {"recompute": "full"},
     "architecture": {"hidden_size": 192, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 6}},
    # Logits are what takes the memory here.
    {"role": "policy", "dtype": "float32", "tokens": 1024, "layout": {"recompute": "full"},
     "architecture": {"vocab_size": 16384, "num_hidden_layers": 2}},
    {"role": "policy", "dtype": "float32", "tokens": 1024, "layout": {"recompute": "none"},
     "architecture": {"family": "qwen3_5_moe", "shared_expert_intermediate_size": 64, "full_attention_interval": 4,
                      "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
                      "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25}},
]  # fmt: skip


# Two processes: experts shared out, stages with several micro-batches in flight, virtual stages; tensor ranks of which
# each has the only head of keys and values, a context in two parts.
PAIRS = [
    {"role": "policy", "dtype": "float32", "tokens": 1024, "layout": {"expert": 2, "recompute": "none"}},
    {"role": "policy", "dtype": "bfloat16", "tokens": 1024, "layout": {"expert": 2, "recompute": "full"}},
    {"role": "value", "dtype": "bfloat16", "tokens": 1024, "layout": {"expert": 2, "recompute": "moe"}},
    {"role": "policy", "dtype": "float32", "tokens": 1024, "layout": {"pipeline": 2, "recompute": "none"},
     "micro_batches": 4},
    {"role": "value", "dtype": "bfloat16", "tokens": 1024,
     "layout": {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}, "micro_batches": 4},
    {"role": "value", "dtype": "float32", "tokens": 1024, "layout": {"tensor": 2, "expert": 2, "recompute": "none"},
     "architecture": {"num_key_value_heads": 1}},
    {"role": "value", "dtype": "float32", "tokens": 1024, "layout": {"context": 2, "expert": 2, "recompute": "none"}},
    {"role": "value", "dtype": "bfloat16", "tokens": 1024,
     "layout": {"expert": 2, "recompute": "full", "dispatcher": "allgather"}},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "cases"), [(1, CASES), (2, PAIRS)], ids=["one process", "two"])
def test_planned_memory_is_that_of_training_processes(processes, cases):
    cases = [{**case, "layout": {"processes": processes, **case["layout"]}} for case in cases]
    ranks = run_distributed("tests.planner.measured:measure", processes, cases=cases)
    wrong = [
        (case, ratio)
        for number, case in enumerate(cases)
        for rank in range(processes)
        if abs((ratio := planned_over_measured(case, rank, ranks[rank][number])) - 1) > TOLERANCE
    ]
    assert not wrong


def planned_over_measured(case, rank, found):
    """Also asserts that the rank has the parameters that it was planned with."""
    config = config_of(case)
    a, layout, dtype, role = config.model.architecture, config.layout, case["dtype"], case["role"]
    stage = rank // (layout.processes // layout.pipeline)
    chunks = chunks_of(a, layout, stage)
    planned = [[each.name, list(each.shape)] for chunk in chunks for each in chunk_parameters(a, layout, role, chunk)]
    if layout.pipeline > 1:  # a stage's modules count its layers from 0
        planned, found["parameters"] = [[shape for _, shape in named] for named in (planned, found["parameters"])]
    assert planned == found["parameters"], case
    work = Workload(case["tokens"], micro_batches=case.get("micro_batches", 1), loss_share=0.5, fused=False)
    activations = stage_activations(a, layout, dtype, role, stage, work, chunk=config.train.logprob_chunk)
    total = rank_bytes(a, layout, dtype, role, rank).static_bytes + activations.peak
    ratio = total / found["peak"]
    print(f"{role} {dtype} {case['layout']} rank {rank}: planned {total}, measured {found['peak']}: {ratio:.3f}")
    return ratio
