"""What differs between CPU and GPU, in one place: device, communication, layer spec. Imports no Megatron by itself."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_t1.errors import ConfigError


class Backend(Protocol):
    """One seam between this project and the machine a training phase runs on.

    Attributes:
        name: "cpu" or "cuda".
        communication: backend of torch.distributed, "gloo" or "nccl".
        fused: whether Transformer Engine's and CUDA's fused kernels are there to be used.
    """

    name: str
    communication: str
    fused: bool

    @property
    def device(self) -> Any:
        """The torch.device of this process."""

    def prepare(self) -> None:
        """Must run before anything of Megatron is used, best before it is imported. Idempotent."""

    def layer_spec(self, config: Any, vp_stage: int | None) -> Any:
        """Block spec of the decoder layers that virtual stage `vp_stage` of this rank builds."""

    def after_build(self, model: Any) -> None:
        """Last changes to a built model chunk."""


@dataclass
class CpuBackend:
    name: str = "cpu"
    communication: str = "gloo"
    fused: bool = False

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu")

    def prepare(self) -> None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is imported
        # Megatron says in a dozen places that Transformer Engine and Apex are absent; here that is intended.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        from megatron_t1.model import cpu_backend

        cpu_backend.install(self.device)
        cpu_backend.bind_missing_names()

    def layer_spec(self, config: Any, vp_stage: int | None) -> Any:
        from megatron_t1.model import cpu_modules

        return cpu_modules.layer_spec(config, vp_stage)

    def after_build(self, model: Any) -> None:
        from megatron_t1.model import cpu_modules

        cpu_modules.use_cpu_dispatcher(model)


@dataclass
class CudaBackend:
    """A GPU with Transformer Engine's layers or, not `fused`, with plain torch's: slower, and needs nothing else."""

    name: str = "cuda"
    communication: str = "nccl"
    fused: bool = True

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def prepare(self) -> None:
        import torch

        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron orders communication by launch order
        if not torch.cuda.is_available():
            raise ConfigError(
                "the cuda backend was chosen and torch finds no CUDA device",
                where="cluster.backend=cuda",
                remedy="use cluster.backend=cpu, or check the driver and that this torch is a CUDA build",
            )
        if self.fused:
            _require_transformer_engine()
        else:
            from megatron_t1.model import cpu_backend

            cpu_backend.bind_missing_names()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))))

    def layer_spec(self, config: Any, vp_stage: int | None) -> Any:
        if not self.fused:
            from megatron_t1.model import cpu_modules

            return cpu_modules.layer_spec(config, vp_stage)
        if getattr(config, "experimental_attention_variant", None) is not None:
            from megatron_t1.model import delta_net

            return delta_net.fused_layer_spec(config, vp_stage)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        stage = {} if vp_stage is None else {"vp_stage": vp_stage}
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm", **stage)

    def after_build(self, model: Any) -> None:
        model.cuda()


def _require_transformer_engine() -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Transformer Engine can't be imported: {error}",
            where="cluster.backend=cuda",
            remedy="install transformer-engine[pytorch] for this torch, or use the image in docker/; "
            "cluster.backend=cuda_torch trains without it, in plain torch and slower",
        ) from error


def select_backend(name: str = "auto") -> Backend:
    """The backend called `name`: "cpu", "cuda", or "cuda_torch" (a GPU without Transformer Engine).

    "auto" is cuda where torch finds a device, otherwise cpu.

    Raises:
        ConfigError: unknown name.
    """
    if name == "auto":
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return {"cpu": CpuBackend, "cuda": CudaBackend, "cuda_torch": lambda: CudaBackend(fused=False)}[name]()
    except KeyError:
        raise ConfigError(
            f"unknown backend {name!r}", where="cluster.backend", remedy="use auto, cpu, cuda or cuda_torch"
        ) from None
