"""`python -m megatron_t1.checkout SCRIPT ARGUMENTS...`: a checkout's script on the CPU (see `cpu`)."""

from __future__ import annotations

import sys

from megatron_t1.checkout import cpu

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    cpu.run(sys.argv[1], sys.argv[2:])
