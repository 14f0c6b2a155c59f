"""Phases on this machine: plain processes for rollout, torchrun for training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_t1.loop.launcher import KINDS, BaseLauncher, PhaseCommand

RANK_0 = "[default0]:"  # torchrun's prefix of the lines it passes on


class LocalLauncher(BaseLauncher):
    def wrapped(self, command: PhaseCommand, log_dir: Path) -> list[str]:
        python = self.python(command)
        if not command.distributed:
            return [str(self.script(command, log_dir)), python, "-m", command.module, *command.arguments]
        torchrun = [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(command.processes),
            "--max-restarts", "0", "--log-dir", str(log_dir), "--redirects", "3", "--tee", "0:3",
        ]  # fmt: skip
        # "--" keeps torchrun from reading the phase's options as abbreviations of its own
        return [str(self.script(command, log_dir)), *torchrun, "-m", "--", command.module, *command.arguments]

    def shown(self, command: PhaseCommand, line: str) -> str | None:
        """Of a training phase what rank 0 says; torchrun's own report of a failure stays in the log."""
        if not command.distributed:
            return line
        return line.removeprefix(RANK_0) if line.startswith(RANK_0) else None

    def rank_logs(self, log_dir: Path) -> dict[int, list[Path]]:
        """torchrun writes LOG_DIR/<id>/attempt_0/<rank>/{stderr,stdout}.log."""
        found: dict[int, list[Path]] = {}
        for name in ("stderr.log", "stdout.log"):
            for path in sorted(log_dir.glob(f"*/attempt_*/*/{name}")):
                if path.parent.name.isdigit():
                    found.setdefault(int(path.parent.name), []).append(path)
        return found

    def preflight(self, kinds: Sequence[str] = KINDS) -> list[str]:
        problems = []
        for kind in kinds:
            resources = self.config.cluster.resources(kind)
            if resources.python and shutil.which(resources.python) is None:
                problems.append(f"cluster.{kind}.python={resources.python}: no such interpreter")
        return problems
