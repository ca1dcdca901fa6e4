"""Launch arguments and limits, and what the traffic counter counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx import ArgumentError, LaunchError, Module, Pointer, memory
from ptx.bench import TARGETS, Bench, module


@pytest.fixture(params=TARGETS, ids=[f"compute_{target}" for target in TARGETS])
def planted(request: pytest.FixtureRequest) -> Module:
    return module(request.param)


@pytest.fixture
def bench(planted: Module) -> Bench:
    return Bench(planted)


# ---- launches -----------------------------------------------------------------------------------

GOOD = (np.float64(1), np.float32(2), np.int64(3), np.int32(4), np.uint8(5))


def test_scalars_arrive(bench: Bench) -> None:
    bench.run("scalars", bench.output(1), *GOOD, block=1)
    assert bench.array[0] == 15


@pytest.mark.parametrize(
    ("position", "wrong"),
    [
        (0, np.float32(1)),
        (0, np.int64(1)),
        (1, np.float64(2)),
        (1, np.int32(2)),
        (2, np.int32(3)),
        (2, 3),
        (3, np.int64(4)),
        (3, np.float32(4)),
        (4, np.int32(5)),
        (3, Pointer(0)),
        (0, 1.0),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused(bench: Bench, position: int, wrong: Any) -> None:
    arguments = list(GOOD)
    arguments[position] = wrong
    with pytest.raises(ArgumentError, match=f"argument {position + 1} is "):
        bench.run("scalars", bench.output(1), *arguments, block=1)


def test_swapped_or_missing_arguments_are_refused(bench: Bench) -> None:
    y = bench.output(1)
    with pytest.raises(ArgumentError, match="argument 1"):
        bench.run("scalars", y, GOOD[1], GOOD[0], *GOOD[2:])
    with pytest.raises(ArgumentError, match="5 arguments given, 6 expected"):
        bench.run("scalars", y, *GOOD[:-1])


def test_a_struct_is_passed_as_bytes_of_its_size(bench: Bench) -> None:
    layout = np.dtype([("n", np.int64), ("v", np.float32)], align=True)
    pair = np.array((2, 7.0), layout)[()]
    y = bench.output(3)
    bench.run("structs", pair, y, block=1)
    bench.run("structs", pair.tobytes(), y, block=1)
    assert bench.array[2] == 7
    with pytest.raises(ArgumentError, match="a struct of 16 bytes; got 12 bytes"):
        bench.run("structs", pair.tobytes()[:12], y)


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0,), (32,)),
        ((1, 65536), (32,)),
        ((2**31,), (32,)),
        ((1,), (0,)),
        ((1,), (1025,)),
        ((1,), (1, 1, 65)),
        ((1,), (64, 32)),
        ((1, 1, 1, 1), (1,)),
    ],
)
def test_sizes_beyond_the_limits_are_refused(bench: Bench, grid: Any, block: Any) -> None:
    with pytest.raises(LaunchError):
        bench.executor.launch(
            bench.module, "all_write_one", grid=grid, block=block, args=[bench.output(1)]
        )


def test_launch_bounds_hold(bench: Bench) -> None:
    bench.run("bounded", bench.output(64))
    with pytest.raises(LaunchError, match="launch bounds"):
        bench.run("bounded", bench.output(65, "z"), block=65)


def test_shared_memory_is_limited(bench: Bench) -> None:
    args = bench.output(64), np.int32(0)
    with pytest.raises(LaunchError, match="49152 allowed"):
        bench.run("shared_overrun", *args, shared_bytes=48 * 1024 + 1)
    most = bench.module.max_shared()
    assert most == {75: 64, 90: 227}[bench.module.architecture] * 1024
    bench.run("shared_overrun", *args, shared_bytes=most, max_dynamic_shared_bytes=most)
    with pytest.raises(LaunchError, match=f"has {most}"):
        bench.run("shared_overrun", *args, shared_bytes=most + 4, max_dynamic_shared_bytes=most + 4)


# ---- traffic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "sectors"), [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_sectors_are_counted_per_warp_instruction(bench: Bench, step: int, sectors: int) -> None:
    args = bench.input(np.zeros(512)), bench.output(32), np.int32(step)
    report = bench.run("stride", *args, block=32)
    assert report.buffers["x"].read_requests == sectors
    assert report.buffers["y"].write_requests == 4
    assert report.buffers["x"].write_sectors == 0


def test_a_sector_counts_once_per_block(bench: Bench) -> None:
    args = bench.input(np.zeros(32)), bench.output(64), np.int32(0)
    report = bench.run("stride", *args, block=64, grid=1)
    assert report.buffers["x"].read_requests == 2  # one for each of two warps
    assert report.buffers["x"].read_sectors == 1
    assert report.total.write_sectors == 8


def test_an_unaligned_base_costs_a_sector(bench: Bench) -> None:
    x = bench.memory.register(memory.empty(64, np.float32, offset=4), "x", readonly=True)
    args = x, bench.output(32), np.int32(1)
    bench.executor.checks = ("traffic",)
    assert bench.run("stride", *args, block=32).buffers["x"].read_requests == 5


@pytest.mark.parametrize(("step", "extra"), [(1, 0), (2, 1), (4, 3), (32, 31)])
def test_bank_conflicts_are_counted(bench: Bench, step: int, extra: int) -> None:
    report = bench.run("columns", bench.output(32), np.int32(step), block=32)
    assert report.shared_requests == 1
    assert report.bank_conflicts == extra


@pytest.mark.parametrize(
    ("width", "step", "wavefronts", "least"),
    [(8, 1, 2, 2), (8, 2, 4, 2), (16, 1, 4, 4), (16, 2, 8, 4), (16, 8, 32, 4)],
)
def test_wide_accesses_go_by_parts_of_a_warp(
    bench: Bench, width: int, step: int, wavefronts: int, least: int
) -> None:
    args = bench.output(32), np.int32(width), np.int32(step)
    report = bench.run("wide_columns", *args, block=32, shared_bytes=32 * width * step)
    assert (report.shared_wavefronts, report.shared_minimum) == (wavefronts, least)
