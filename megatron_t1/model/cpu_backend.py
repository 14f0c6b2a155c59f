"""Stand-ins that let Megatron-Core run without CUDA: names in `torch.cuda` and one `TorchFunctionMode`.

Nothing in megatron.* is replaced, except that one name its router reads and never binds is bound. Everything here is
inert on a machine with a GPU: `install()` refuses to run there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_t1.errors import T1Error

CPU, META = torch.device("cpu"), torch.device("meta")


class _Event:
    """A CUDA event on a device whose work is finished when the call returns."""

    def __init__(self, *_: Any, **__: Any): ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on a device that executes in program order."""

    def __init__(self, *_: Any, **__: Any): ...

    def wait_stream(self, _: _Stream) -> None: ...

    def wait_event(self, _: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Generators:
    """`torch.cuda.default_generators`: every device's generator is the CPU's."""

    def __getitem__(self, _: int) -> torch.Generator:
        return torch.default_generator


def _stood_in(device: Any) -> Any:
    """The device that stands in for a CUDA device; any other device as it is."""
    if isinstance(device, str) and device.startswith("cuda"):
        return _stand_in
    if isinstance(device, torch.device) and device.type == "cuda":
        return _stand_in
    return device


class CudaOnCpu(TorchFunctionMode):
    """Sends `device="cuda"` literals to the stand-in; tells Megatron (and nobody else) that tensors are CUDA tensors.

    Megatron's optimizers sort parameters by `tensor.type()` in {"torch.cuda.FloatTensor", ...}; only a call made from a
    megatron module gets that answer, so other libraries in the process see the truth.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _stood_in(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "to" and len(args) > 1:
            args = (args[0], *(_stood_in(value) for value in args[1:]))
        if name == "record_stream":
            return None
        if name == "type" and len(args) == 1 and not kwargs and _called_by_megatron():
            return "torch.cuda." + func(*args).rsplit(".", 1)[-1]  # "torch.FloatTensor", "torch.meta.FloatTensor"
        return func(*args, **kwargs)


def _called_by_megatron() -> bool:
    frame = sys._getframe(2)  # 0: this function, 1: __torch_function__, 2: who called tensor.type()
    while frame.f_back is not None and frame.f_globals.get("__name__") == "torch.utils._device":
        frame = frame.f_back  # a `with torch.device(...)` block is a mode of its own, above this one
    return frame.f_globals.get("__name__", "").startswith("megatron.")


_installed: CudaOnCpu | None = None
_stand_in = CPU


def install(device: torch.device = CPU) -> None:
    """Make `import megatron.core` and everything it does later work on this machine's CPU. Idempotent.

    The mode belongs to the calling thread.

    Args:
        device: what stands in for a CUDA device: the CPU, or META for models that have shapes only (`planner.dryrun`).

    Raises:
        T1Error: a CUDA device is present, or another stand-in was installed in this process.
    """
    global _installed, _stand_in
    if _installed is not None:
        if device != _stand_in:
            raise T1Error(f"{_stand_in} already stands in for CUDA in this process", where="cpu_backend.install")
        return
    _stand_in = device
    if torch.cuda.is_available():
        raise T1Error(
            "the CPU backend replaces parts of torch.cuda, and this machine has a CUDA device",
            where="cluster.backend",
            remedy="use cluster.backend=cuda, or hide the device with CUDA_VISIBLE_DEVICES=''",
        )
    # With current_device() on the CPU, inductor refuses Megatron's @jit_fuser functions.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    cuda = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: device
    cuda.set_device = lambda *_, **__: None
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda *_, **__: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _=None: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.default_generators = _Generators()
    cuda._lazy_call = lambda function, **_: function()
    cuda._lazy_init = lambda: None
    # The one Megatron module that takes names from torch.cuda by value.
    if (random := sys.modules.get("megatron.core.tensor_parallel.random")) is not None:
        random._lazy_call = cuda._lazy_call
    _installed = CudaOnCpu()
    _installed.__enter__()


def bind_missing_names() -> None:
    """Bind `moe_utils.te_general_gemm`: without Transformer Engine, 0.13 to 0.16 read it in the router unbound."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
