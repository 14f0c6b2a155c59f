from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_t1.config.layout_rules import layout_problems
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.model.backend import select_backend
from megatron_t1.model.parallel import (
    Rendezvous,
    first_host,
    initialize_parallel,
    rendezvous_from_environment,
)
from tests.distributed import run_distributed
from tests.tiny_model import ARCHITECTURE, cpu_backend


def problems(world_size: int, *, backend: str = "cpu", architecture=None, **sizes) -> str:
    layout = LayoutConfig(**{"expert": 1, **sizes})
    return "\n".join(layout_problems(layout, architecture, processes=world_size, backend=backend))


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, {}),
        (2, {"expert": 2}),
        (4, {"tensor": 2, "expert": 4}),
        (4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}),
        (4, {"tensor": 2, "expert_tensor": 2, "expert": 2, "dispatcher": "allgather"}),
        (48, {"tensor": 2, "pipeline": 6, "expert": 8}),
    ],
)
def test_layouts_that_work(world_size, sizes):
    assert problems(world_size, **sizes) == ""


@pytest.mark.parametrize(
    ("world_size", "sizes", "said"),
    [
        (6, {"expert": 4}, "nearest: 4, 8"),  # Megatron-LM#1517 slime#1818
        (3, {"tensor": 2, "expert_tensor": 2}, "nearest: 2, 4"),
        (2, {"tensor": 2}, "layout.expert_tensor=2"),
        (2, {"context": 2, "expert_tensor": 2}, "layout.expert_tensor=1"),
        (2, {"virtual_pipeline": 2}, "layout.pipeline > 1"),
        (4, {"tensor": 2, "expert_tensor": 2, "expert": 2}, "layout.dispatcher=allgather"),
        (2, {"expert": 2, "distributed_optimizer": True}, "distributed_optimizer"),
        (2, {"tensor": 0}, "layout.tensor is 0"),
        (2, {"recompute": "some"}, "known: none, full, moe"),
    ],
)
def test_layouts_that_do_not_work_are_explained(world_size, sizes, said):
    assert said in problems(world_size, **sizes)


def test_architecture_must_divide():
    said = problems(
        24,
        tensor=4,
        expert=3,
        pipeline=2,
        backend="cuda",
        architecture=ArchitectureConfig(num_key_value_heads=3, num_experts=16, num_hidden_layers=3),
    )
    assert len(said.splitlines()) == 3
    assert all(name in said for name in ("num_key_value_heads=3", "num_experts=16", "num_hidden_layers=3"))


def test_freed_pipeline_outputs_with_virtual_stages_are_refused_on_gloo():  # row R39, measured
    from megatron_t1.model.build import transformer_config

    layout = LayoutConfig(expert=1, pipeline=2, virtual_pipeline=2)
    build = partial(transformer_config, ARCHITECTURE, layout, "float32", backend=cpu_backend())
    assert not build().deallocate_pipeline_outputs
    with pytest.raises(ConfigError, match="deallocate_pipeline_outputs"):
        build(deallocate_pipeline_outputs=True)


def test_an_option_that_this_core_lacks_is_refused_unless_it_is_off():
    from megatron_t1.model.build import transformer_config

    build = partial(transformer_config, ARCHITECTURE, LayoutConfig(expert=1), "float32", backend=cpu_backend())
    assert not hasattr(build(moe_option_of_another_core=False), "moe_option_of_another_core")
    with pytest.raises(ConfigError, match="moe_option_of_another_core"):
        build(moe_option_of_another_core=True)


def test_every_problem_is_in_the_one_error():
    layout = LayoutConfig(tensor=2, expert=1, virtual_pipeline=2)
    with pytest.raises(ConfigError) as caught:
        initialize_parallel(layout, cpu_backend(), 0)
    assert caught.value.problem.count("\n") == 3


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "gpu[03-05]"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Rendezvous(0, 1, "", 0)),
        (TORCHRUN, Rendezvous(1, 2, "host", 1234)),
        (SLURM, Rendezvous(3, 4, "gpu03", 21234)),
        ({**SLURM, **TORCHRUN}, Rendezvous(1, 2, "host", 1234)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Rendezvous(0, 1, "", 0)),
    ],
)
def test_rendezvous_from_the_launchers_environment(environ, expected):  # verl#491 SkyRL#709
    assert rendezvous_from_environment(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "0"}, {**TORCHRUN, "RANK": "2"}, {**TORCHRUN, "RANK": "x"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}],
)
def test_incomplete_environment_is_refused(environ):
    with pytest.raises(ConfigError):
        rendezvous_from_environment(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],cpu1", "gpu03"), ("a[1-2]b", "a1b"), ("rack-1-[07]", "rack-1-07")],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_a_missing_peer_is_an_error_not_a_hang(monkeypatch):  # Megatron-LM#1763
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(T1Error, match="rank 0 of 2 didn't join"):
        initialize_parallel(LayoutConfig(expert=1), cpu_backend(), 0, timeout_s=1)


def test_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="tpu"):
        select_backend("tpu")


def test_only_megatron_is_told_that_tensors_are_cuda_tensors():
    cpu_backend()
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.ones(1, device="cuda").device.type == "cpu"
    probe: dict = {"__name__": "megatron.core.probe", "torch": torch}
    exec("answer = torch.ones(1).type()", probe)
    assert probe["answer"] == "torch.cuda.FloatTensor"


def fail_on_rank(rank: int) -> str:
    from megatron_t1.model.collective import together
    from megatron_t1.model.parallel import destroy_parallel

    def action():
        if rank == parallel.rank:
            raise T1Error("the disk is full", where="here")
        return parallel.rank

    parallel = initialize_parallel(LayoutConfig(expert=2), cpu_backend(), 0, timeout_s=60)
    try:
        together(action)
    except T1Error as error:
        return str(error)
    finally:
        destroy_parallel()
    return ""


@pytest.mark.slow
def test_failure_of_one_rank_is_everybodys():
    said = run_distributed("tests.model.test_parallel_layout:fail_on_rank", 2, rank=1)
    assert "rank 1 failed: the disk is full" in said[0] and "the disk is full" in said[1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), "gone"),
        (RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete"), "late"),
        (RuntimeError("rank 3 failed: shapes differ"), ""),
        (T1Error("RuntimeError: Connection reset by peer"), "gone"),
        (T1Error("rank 1 failed: RuntimeError: Timed out waiting 5000ms for send operation to complete"), "late"),
        (T1Error("rank 1 of 2 didn't join the others within 5 s: timed out after 5000ms"), ""),
        (ValueError("Connection closed by peer"), ""),
    ],
)
def test_what_only_says_that_the_others_are_gone(error, expected):
    from megatron_t1.model.collective import lost_others

    assert lost_others(error) == expected
    chained = KeyError("name")
    chained.__context__ = error
    assert lost_others(chained) == expected


def test_a_joining_that_timed_out_speaks_for_itself():
    from megatron_t1.model.collective import lost_others

    try:
        try:
            raise RuntimeError("The client socket has timed out after 5000ms while trying to connect")
        except RuntimeError as error:
            raise T1Error("rank 1 of 2 didn't join the others") from error
    except T1Error as error:
        assert lost_others(error) == ""
