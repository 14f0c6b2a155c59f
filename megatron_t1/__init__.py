"""megatron-t1: reinforcement learning of long-horizon terminal agents on Megatron-Core."""

__version__ = "0.1.0"
