"""Entry point of `t1 gap`'s processes: `python -m megatron_t1.training.rescoring --run RUN --iteration N --job DIR`.

Started as a training phase is, under torchrun or srun. What it does is in `training.scorer`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_t1.training.main import guarded, joined


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megatron_t1.training.rescoring", description=__doc__)
    parser.add_argument("--run", required=True, help="run directory (holds config.yaml)")
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--job", required=True, help="directory with job.json; the scores are written there")
    options = parser.parse_args(arguments)
    return guarded(lambda: _rescore(Path(options.run), options.iteration, Path(options.job)))


def _rescore(run_dir: Path, iteration: int, directory: Path) -> None:
    config, backend = joined(run_dir, [])

    import torch.distributed as dist

    from megatron_t1.model.parallel import destroy_parallel
    from megatron_t1.training.context import Context
    from megatron_t1.training.scorer import rescore

    rescore(Context(config, backend, iteration), directory)
    dist.barrier()
    destroy_parallel()


if __name__ == "__main__":
    sys.exit(main())
