"""Running a checkout's script without a GPU: for tests, and for looking at a run on a laptop. Slow, gloo, fp32.

`python -m megatron_t1.checkout pretrain_gpt.py ...` prepares the process and runs the script as if it had been started
itself. On a machine with a GPU scripts are started as always and nothing here does anything.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_t1.errors import T1Error

_active = False


def run(script: str, arguments: list[str]) -> None:
    """Run a checkout's script in this process on the CPU.

    Raises:
        T1Error: there is no such script, or a CUDA device.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise T1Error("there is no such script", where=str(path), remedy="name a script of the checkout")
    sys.path.insert(0, str(path.parent))  # before Megatron is imported: the checkout's own core, not an installed one
    prepare()
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def prepare() -> None:
    """Make `megatron.training` run in this process without CUDA. Idempotent.

    Raises:
        T1Error: a CUDA device is present.
    """
    global _active
    if _active:
        return
    from megatron_t1.model.backend import select_backend

    select_backend("cpu").prepare()
    cuda = torch.cuda
    cuda.is_available = _available_to_megatron
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *_: (0, 0)
    cuda.get_device_properties = lambda *_: _Properties()
    cuda.get_device_name = lambda *_: "CPU"
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.memory_stats = lambda *_, **__: {}
    cuda.reset_peak_memory_stats = lambda *_, **__: None
    if not hasattr(numpy, "product"):  # cores up to 0.15 were written for numpy 1 and save checkpoints with it
        numpy.product = numpy.prod
    _leave_out_builds()
    _active = True


def _leave_out_builds() -> None:
    """What Megatron compiles at every start: CUDA kernels, and an index builder for its own data sets."""
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    if importlib.util.find_spec("megatron.legacy") is not None:
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda _: None


def adapt(chunk: torch.nn.Module) -> None:
    """Give a chunk of the local layer spec what the CPU needs: attention over packed rows, a dispatcher for gloo."""
    if not _active:
        return
    from megatron_t1.model import cpu_modules

    for module in chunk.modules():
        if hasattr(module, "core_attention"):
            old = module.core_attention
            module.core_attention = cpu_modules.TorchCoreAttention(
                module.config, old.layer_number, old.attn_mask_type, module.attention_type
            )
    cpu_modules.use_cpu_dispatcher(chunk)


class _Properties:
    """What Megatron asks of a device."""

    name, major, minor, multi_processor_count, total_memory = "CPU", 0, 0, 1, 0


def _available_to_megatron(*_: Any) -> bool:
    """Megatron's own loop insists on a device; everybody else in the process hears the truth."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith(("megatron.training", "megatron.legacy"))
