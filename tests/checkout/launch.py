"""A checkout's own pretrain_gpt.py on the CPU, in one or several processes that meet over gloo."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributed import ROOT

# Options of tests.tiny_model.ARCHITECTURE in Megatron's words, and what a CPU without fused kernels needs.
MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --kv-channels 16 --ffn-hidden-size 48 --moe-ffn-hidden-size 16 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm
    --disable-bias-linear --position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 66 --make-vocab-size-divisible-by 1
    --seq-length 256 --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --use-cpu-initialization --distributed-backend gloo
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm
""".split()
LOOP = """
    --micro-batch-size 1 --calculate-per-token-loss --eval-iters 0 --eval-interval 1000 --num-workers 0
    --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 1
    --save-interval 1000
""".split()
NUMBER = r"([-+.\deE]+|nan|inf)"


class Output:
    """What all ranks printed, one after another; the last one logs the iterations."""

    def __init__(self, code: int, text: str):
        self.code, self.text = code, text

    def logged(self, name: str) -> list[float]:
        """A metric of every iteration, as the checkout's own log shows it."""
        lines = [line for line in self.text.splitlines() if re.search(r"iteration +\d+/", line)]
        return [float(match[1]) for line in lines if (match := re.search(rf"\| {name}: {NUMBER}", line))]


def pretrain(checkout: Path, *options: str, processes: int = 1, timeout_s: float = 400.0) -> Output:
    """Run it with MODEL, LOOP and `options`; all ranks must end alike."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "megatron_t1.checkout", "pretrain_gpt.py", *MODEL, *LOOP, *options]
    extra = [path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path]
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(processes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "PYTHONPATH": os.pathsep.join(extra),
            }
            with open(Path(scratch) / f"{rank}.log", "wb") as log:
                children.append(
                    subprocess.Popen(
                        command,
                        cwd=checkout,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            for child in children:
                child.wait(timeout=timeout_s)
        finally:
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        texts = [(Path(scratch) / f"{rank}.log").read_text() for rank in range(processes)]
    code = max(child.returncode for child in children)
    return Output(code, "\n".join(texts if code == 0 else (text[-6000:] for text in texts)))
