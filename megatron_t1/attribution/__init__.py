"""What the gap between sampler and trainer consists of (`t1 gap`): settings, differences, shares, examples.

Importable without torch. The passes themselves are in `training.rescoring`.
"""
