"""Which rows a modulation parameter has, and in which order rows are summed.

The numerical contract of ``modulate_backward``, shared by the NumPy arithmetic and the launches;
the kernels repeat the constants, and a test compares them.
"""

from __future__ import annotations

from enum import Enum

CHUNK_ROWS = 64
"""Numerical contract: rows whose partial sum is formed in the compute type."""
LANES = 8
"""Numerical contract: accumulators of a chunk; row l goes to accumulator l mod LANES."""


class Rows(Enum):
    """How a parameter is laid out along B and L, which says what its gradient sums over."""

    PER_TOKEN = "(B, L, D): nothing is summed"
    PER_SAMPLE = "(B, D): summed over L"
    PER_POSITION = "(1, L, D): summed over B"
    SHARED = "(D,): summed over B and L"
