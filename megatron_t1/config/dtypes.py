"""The types that models are trained in, and what one parameter of each takes, in bytes."""

from __future__ import annotations

WIDTHS = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12}  # Adam's float32 moments, and a float32 copy where that is another
