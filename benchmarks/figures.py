# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How the benchmarks write a figure; plots.py reads it."""

import statistics
from typing import Sequence


def spread(values: Sequence[float]) -> str:
    """`median (least to most)`."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
