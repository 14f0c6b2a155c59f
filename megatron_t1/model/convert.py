"""Hugging Face <-> Megatron, strict in both directions: every tensor of both sides is used exactly once.

Megatron-LM#5844 and Megatron-Bridge#1871 are converters that dropped experts in silence.
"""

from megatron_t1.model.hf_export import export_hf, require_other_directory
from megatron_t1.model.hf_load import LoadReport, load_hf

__all__ = ["LoadReport", "export_hf", "load_hf", "require_other_directory"]
