"""A batch job's program: the real loop and Slurm launcher over phases of tests.

python drive.py RUN_DIR ROLLOUT_MODULE TRAINING_MODULE [BEHAVIOUR]
"""

import sys
from dataclasses import replace

from loop_commands import dummy_command

from megatron_t1.config.compose import load_run_config
from megatron_t1.loop.launcher import Stopped
from megatron_t1.loop.runner import opened

RUN_DIR, ROLLOUT_MODULE, TRAINING_MODULE = sys.argv[1:4]
BEHAVIOUR = sys.argv[4] if len(sys.argv) > 4 else ""


def command(config, step):
    base = dummy_command(config, step, BEHAVIOUR)
    if step.kind == "rollout":
        return replace(base, module=ROLLOUT_MODULE)
    return replace(base, module=TRAINING_MODULE, processes=config.layout.processes, distributed=True)


try:
    with opened(load_run_config(RUN_DIR), command=command) as runner:
        runner.run()
except Stopped as stopped:
    print(stopped)
    sys.exit(128 + stopped.signal_number)
