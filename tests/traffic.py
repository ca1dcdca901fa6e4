"""Device traffic of the kernels, counted by the CPU executor against the least possible.

    python tests/traffic.py            # the shapes that the tests use
    python tests/traffic.py --full     # the benchmark's own shapes; takes several minutes

A sector is 32 bytes, counted once per thread block (repeats hit its first-level cache); requests
count it for every warp instruction. Batch and length are cut in the short list: blocks are alike,
so the ratios stay.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import simulated
from cupyops import _exp_segsum, _modulate, _plan
from ptx import Report, Traffic

SECTOR = 32
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# benchmark shape: the shape that is counted
MODULATION = {
    (2, 256, 1152): (2, 256, 1152),
    (8, 4096, 1152): (2, 512, 1152),
    (1, 32760, 1536): (1, 504, 1536),
    (32, 8, 1024): (8, 8, 1024),
    (48, 10, 20000): (1, 10, 20000),
}
SEGMENTS = {
    (512, 128): (10, 128),
    (256, 256): (3, 256),
    (8192, 64): (40, 64),
    (16384, 8): (300, 8),
    (1, 2048): (1, 2048),
    (4096, 8): (300, 8),
    (700, 50): (20, 50),
    (300, 257): (3, 257),
}


class Row(NamedTuple):
    operator: str
    dtype: str
    shape: tuple[int, ...]
    counted: tuple[int, ...]
    reports: tuple[Report, ...]
    """Of the launches, in order."""
    least: int
    """Sectors that have to be read or written once."""
    sectors: int
    requests: int
    workspace: int
    """Sectors of the workspace, part of `sectors`."""

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(report.kernel for report in self.reports)

    @property
    def bank_conflicts(self) -> int:
        """Passes through shared memory beyond those without conflicts."""
        return sum(report.bank_conflicts for report in self.reports)

    @property
    def ratio(self) -> float:
        return self.sectors / self.least

    @property
    def request_ratio(self) -> float:
        return self.requests / self.least


def sectors_of(array: np.ndarray, used: np.ndarray | None = None) -> int:
    """Sectors that hold at least one element of an array (one that `used` marks)."""
    mask = np.ones(array.shape, bool) if used is None else np.broadcast_to(used, array.shape)
    offsets = np.flatnonzero(mask) * array.itemsize // SECTOR
    return int(np.unique(offsets).size)


def count(
    operator: _plan.Operator,
    inputs: dict[str, np.ndarray],
    least_inputs: int,
    shape: tuple[int, ...],
    counted: tuple[int, ...],
    *options: Any,
) -> Row:
    plan = simulated.plan_of(operator, inputs, None, *options)
    outs = simulated.new_outs(plan)
    reports = simulated.run_checked(plan, inputs, outs, checks=("traffic",))
    total = sum((report.total for report in reports), Traffic())
    workspace = sum((r.buffers.get("workspace", Traffic()) for r in reports), Traffic())
    return Row(
        operator.name,
        next(iter(inputs.values())).dtype.name,
        shape,
        counted,
        tuple(reports),
        least_inputs + sum(sectors_of(out) for out in outs.values()),
        total.read_sectors + total.write_sectors,
        total.read_requests + total.write_requests,
        workspace.read_sectors + workspace.write_sectors,
    )


def modulation_rows(dtype: str, full: bool = False) -> Iterator[Row]:
    for shape, short in MODULATION.items():
        b, length, d = counted = shape if full else short
        x, grad = (_ones((b, length, d), dtype) for _ in range(2))
        scale, shift = (_ones((b, d), dtype) for _ in range(2))
        row, everything = sectors_of(scale), sectors_of(x)
        inputs = {"x": x, "scale": scale, "shift": shift}
        yield count(_modulate._MODULATE, inputs, everything + 2 * row, shape, counted, True)
        inputs["grad_output"] = grad
        least = 2 * everything + row
        yield count(_modulate._MODULATE_BACKWARD, inputs, least, shape, counted, True)


def segment_rows(dtype: str, full: bool = False) -> Iterator[Row]:
    for shape, short in SEGMENTS.items():
        n, t = counted = shape if full else short
        x = _ones((n, t), dtype)
        yield count(_exp_segsum._EXP_SEGSUM, {"x": x}, sectors_of(x), shape, counted)
        y, grad = (_ones((n, t, t), dtype) for _ in range(2))
        below = np.tril(np.ones((t, t), bool), -1)
        least = 2 * sectors_of(y, below)
        inputs = {"y": y, "grad_output": grad}
        yield count(_exp_segsum._EXP_SEGSUM_BACKWARD, inputs, least, shape, counted)


def _ones(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return simulated.memory.copy(np.ones(shape, DTYPES[dtype]))


def table(rows: list[Row]) -> str:
    lines = [
        f"{'operator':<20} {'dtype':<9} {'shape':<16} {'counted as':<16} "
        f"{'least':>9} {'sectors':>9} {'ratio':>6} {'requests':>8} {'workspace':>9} "
        f"{'conflicts':>9}"
    ]
    for row in rows:
        shape, counted = ("x".join(str(n) for n in axes) for axes in (row.shape, row.counted))
        lines.append(
            f"{row.operator:<20} {row.dtype:<9} {shape:<16} {counted:<16} "
            f"{row.least:>9} {row.sectors:>9} {row.ratio:>6.3f} {row.request_ratio:>8.3f} "
            f"{row.workspace:>9} {row.bank_conflicts:>9}"
        )
    return "\n".join(lines)


def row_bytes(row: Row) -> int:
    return math.prod(row.counted[-1:]) * np.dtype(DTYPES[row.dtype]).itemsize


if __name__ == "__main__":
    full = "--full" in sys.argv[1:]
    for name in DTYPES:
        print(table([*modulation_rows(name, full), *segment_rows(name, full)]))
