"""The occupancy calculator and the kernel table of the benchmark."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench")
sys.path.insert(0, str(BENCH.parent))

import traffic  # noqa: E402
from bench import kernels  # noqa: E402
from bench.occupancy import LIMITS, occupancy  # noqa: E402
from test_kernels_compile import ARCHITECTURES, record  # noqa: E402


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "blocks", "fraction", "limit"),
    [
        ("sm_80", 256, 32, 0, 8, 1.0, "warps"),
        ("sm_80", 256, 40, 0, 6, 0.75, "registers"),
        ("sm_80", 256, 128, 0, 2, 0.25, "registers"),
        ("sm_80", 1024, 64, 0, 1, 0.5, "registers"),
        ("sm_86", 256, 42, 0, 5, 5 * 8 / 48, "registers"),
        ("sm_75", 256, 64, 0, 4, 1.0, "warps"),
        ("sm_75", 32, 16, 0, 16, 0.5, "blocks"),
        ("sm_75", 64, 16, 16 * 1024, 4, 0.25, "shared memory"),
        # A block costs 1 KiB more than it asks for: 228 KiB hold four of 48 KiB.
        ("sm_90", 256, 32, 48 * 1024, 4, 0.5, "shared memory"),
        ("sm_90", 512, 128, 0, 1, 0.25, "registers"),
        ("sm_100", 33, 24, 0, 32, 1.0, "warps"),
        ("sm_120", 128, 255, 0, 2, 8 / 48, "registers"),
        ("sm_89", 32, 16, 0, 24, 0.5, "blocks"),
    ],
)
def test_occupancy_of_known_kernels(
    architecture: str,
    threads: int,
    registers: int,
    shared: int,
    blocks: int,
    fraction: float,
    limit: str,
) -> None:
    assert occupancy(architecture, threads, registers, shared) == (
        blocks,
        pytest.approx(fraction),
        limit,
    )


def test_every_recorded_kernel_fits_on_every_architecture() -> None:
    assert set(LIMITS) == set(ARCHITECTURES)
    for name, row in record()["instances"].items():
        for architecture, (registers, shared) in row.items():
            threads = 512 if "exp_segsum_backward_rows" in name else 256
            assert occupancy(architecture, threads, registers, shared).blocks >= 1, name


def test_the_table_has_a_line_for_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MODULATION", {(2, 256, 1152): (2, 130, 1152)})
    monkeypatch.setattr(traffic, "SEGMENTS", {(8192, 64): (4, 64), (4, 384): (1, 384)})
    rows = [*traffic.modulation_rows("float32"), *traffic.segment_rows("float32")]
    text = kernels.table(rows)
    assert text.count("\n") == sum(len(row.reports) for row in rows)
    assert text.count("combine") == 2
    (line,) = kernels.lines(rows[0])
    least = (2 * 2 * 256 * 1152 + 2 * 2 * 1152) * 4
    assert least <= line.sectors * traffic.SECTOR <= 1.05 * least


def test_the_page_shows_the_tables_of_today() -> None:
    page = (BENCH.parent.parent / "docs" / "kernels.md").read_text()
    rows = [*traffic.modulation_rows("float32"), *traffic.segment_rows("float32")]
    assert kernels.table(rows) in page
    assert traffic.table(rows) in page
    registers = record()["instances"]
    for kernel in ("modulate", "modulate_backward_rows", "exp_segsum", "exp_segsum_backward_rows"):
        (row,) = re.findall(rf"^\| `{kernel}` \| (.*) \|$", page, re.MULTILINE)
        of_dtype = []
        for name in ("f16", "bf16", "f32", "f64"):
            types = f"{name}, {name}" if kernel.startswith("modulate") else name
            of_dtype.append(registers[f"{kernel}<{types}, true>"][kernels.ARCHITECTURE][0])
        assert [int(cell) for cell in row.split(" | ")] == of_dtype
