"""The kernel table: what every launch of every operator uses and moves, known without a GPU.

    python tests/bench/kernels.py [DTYPE ...]

Grids are those of the benchmark's shapes; sectors are counted on the shorter shapes of
tests/traffic.py and scaled, blocks being alike. Registers are those of tests/kernel_resources.json.
The predicted time is sectors at 4.3 TB/s, the rate of an H200; beside it stands the time that the
PTX instructions take at one per clock and lane, an estimate from above (machine code has fewer).
`in flight` is what resident threads ask for before they wait, against what that rate needs at the
latency of memory (Little's law).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import simulated  # noqa: E402
import traffic  # noqa: E402
from bench.occupancy import Occupancy, occupancy  # noqa: E402
from cupyops import _exp_segsum, _modulate  # noqa: E402
from cupyops._arrays import ArraySpec  # noqa: E402
from cupyops._launch import Launch  # noqa: E402
from cupyops._plan import Plan  # noqa: E402

PAGE = TESTS.parent / "docs" / "kernels.md"
TRAFFIC_DTYPE = "float32"
ARCHITECTURE, MULTIPROCESSORS = "sm_90", 132
BANDWIDTH = 4.3e12
LATENCY = 0.7e-6
"""Seconds from a load to its value, under load; a typical figure, not a measured one."""
LANES_PER_SECOND = MULTIPROCESSORS * 128 * 1.755e9
LAUNCH = 2e-6
"""Seconds below which a kernel's start and end weigh more than its bytes."""
LOADS = {
    "modulate": lambda size, vector: 1 if not vector else 2 if size == 2 else 4,
    "modulate_backward_rows": lambda size, vector: 2 if not vector else 4 if size == 2 else 8,
    "modulate_backward_combine": lambda size, vector: 2,
    "exp_segsum": lambda size, vector: 32,
    "exp_segsum_backward_rows": lambda size, vector: 8 if vector else 2 if size == 2 else 4,
    "exp_segsum_backward_combine": lambda size, vector: 2,
}
"""Groups of 16 bytes that a thread loads before it uses the first; exp_segsum stores, and waits for
nothing."""


class Line(NamedTuple):
    row: traffic.Row
    launch: Launch
    registers: int
    shared_bytes: int
    occupancy: Occupancy
    sectors: float
    instructions: float
    """Of all threads; like sectors, for the whole benchmark shape."""

    @property
    def kernel(self) -> str:
        return self.launch.kernel.name.partition("<")[0]

    @property
    def blocks(self) -> int:
        return math.prod(self.launch.grid)

    @property
    def threads(self) -> int:
        return math.prod(self.launch.block)

    @property
    def waves(self) -> float:
        return self.blocks / (self.occupancy.blocks * MULTIPROCESSORS)

    @property
    def seconds(self) -> float:
        return self.sectors * traffic.SECTOR / BANDWIDTH

    @property
    def instruction_seconds(self) -> float:
        return self.instructions / LANES_PER_SECOND

    @property
    def in_flight(self) -> float:
        """Bytes asked for, of those that the bandwidth needs."""
        resident = min(self.blocks, self.occupancy.blocks * MULTIPROCESSORS) * self.threads
        size = np.dtype(traffic.DTYPES[self.row.dtype]).itemsize
        vector = self.launch.kernel.name.endswith("true>")
        return resident * 16 * LOADS[self.kernel](size, vector) / (BANDWIDTH * LATENCY)

    @property
    def limit(self) -> str:
        if max(self.seconds, self.instruction_seconds) < LAUNCH:
            return "launch"
        if self.instruction_seconds > self.seconds:
            return "instructions"
        if self.in_flight < 1:
            return "latency" if self.blocks >= MULTIPROCESSORS else "latency, few blocks"
        return "bandwidth"


def plan_of(row: traffic.Row) -> Plan:
    """The plan for the benchmark's shape, from metadata alone."""
    dtype = np.dtype(traffic.DTYPES[row.dtype])
    if row.operator.startswith("modulate"):
        x = spec(row.shape, dtype)
        parameter = spec((row.shape[0], row.shape[2]), dtype)
        inputs = {"x": x, "grad_output": x, "scale": parameter, "shift": parameter}
        backward = row.operator == "modulate_backward"
        operator = _modulate._MODULATE_BACKWARD if backward else _modulate._MODULATE
        return simulated.plan_of(operator, inputs, None, True)
    if row.operator == "exp_segsum":
        return simulated.plan_of(_exp_segsum._EXP_SEGSUM, {"x": spec(row.shape, dtype)})
    matrix = spec((*row.shape, row.shape[-1]), dtype)
    inputs = {"y": matrix, "grad_output": matrix}
    return simulated.plan_of(_exp_segsum._EXP_SEGSUM_BACKWARD, inputs)


def spec(shape: tuple[int, ...], dtype: np.dtype) -> ArraySpec:
    strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
    return ArraySpec._make((shape, dtype, strides, simulated.LIBRARY, "simulated:0"))


def lines(row: traffic.Row) -> Iterator[Line]:
    record = json.loads((TESTS / "kernel_resources.json").read_text())["instances"]
    scale = math.prod(row.shape) / math.prod(row.counted)
    launches = plan_of(row).launches
    assert [launch.kernel.name for launch in launches] == list(row.kernels)
    for launch, report in zip(launches, row.reports, strict=True):
        registers, static = record[launch.kernel.name][ARCHITECTURE]
        shared = static + launch.shared_bytes
        held = occupancy(ARCHITECTURE, math.prod(launch.block), registers, shared)
        sectors = (report.total.read_sectors + report.total.write_sectors) * scale
        # The sums that a combining kernel adds are longer than those of the counted shape.
        instructions = 0 if "combine" in launch.kernel.name else report.instructions * scale
        yield Line(row, launch, registers, shared, held, sectors, instructions)


def table(rows: list[traffic.Row]) -> str:
    head = (
        f"{'shape':<14} {'kernel':<28} {'form':<6} {'blocks':>7} {'threads':>7} {'regs':>4} "
        f"{'shared':>6} {'occ':>4} {'waves':>6} {'MB':>8} {'ratio':>6} {'us':>7} "
        f"{'us instr':>8} {'in flight':>9} limit"
    )
    texts = [head]
    for row in rows:
        for line in lines(row):
            name = line.launch.kernel.name
            form = "vector" if "true" in name else "scalar" if "false" in name else ""
            texts.append(
                f"{'x'.join(map(str, row.shape)):<14} {line.kernel:<28} {form:<6} "
                f"{line.blocks:>7} {line.threads:>7} {line.registers:>4} {line.shared_bytes:>6} "
                f"{line.occupancy.fraction:>4.0%} {line.waves:>6.2f} "
                f"{line.sectors * traffic.SECTOR / 1e6:>8.2f} {row.ratio:>6.3f} "
                f"{line.seconds * 1e6:>7.1f} {line.instruction_seconds * 1e6:>8.1f} "
                f"{line.in_flight:>9.1f} {line.limit}"
            )
    return "\n".join(texts)


def replace_table(heading: str, text: str) -> None:
    """The first text block of the page after a heading."""
    before, found, after = PAGE.read_text().partition(heading)
    start = after.index("```text\n") + len("```text\n")
    end = after.index("\n```", start)
    PAGE.write_text(before + found + after[:start] + text + after[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description="What is known of the kernels without a GPU.")
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", help=", ".join(traffic.DTYPES))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/kernels.md")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes or list(traffic.DTYPES)
    for dtype in dtypes:
        if dtype not in traffic.DTYPES:
            parser.error(f"{dtype} is none of {', '.join(traffic.DTYPES)}")
    for dtype in dtypes:
        rows = [*traffic.modulation_rows(dtype), *traffic.segment_rows(dtype)]
        print(f"\n{dtype}, {ARCHITECTURE}, {MULTIPROCESSORS} multiprocessors")
        print(table(rows))
        if arguments.write:
            replace_table(f"### {dtype}\n", table(rows))
            if dtype == TRAFFIC_DTYPE:
                replace_table("## Traffic in sectors\n", traffic.table(rows))


if __name__ == "__main__":
    main()
