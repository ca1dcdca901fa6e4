"""Each checker is proved by a kernel that has the fault it is there to find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx import ALL_CHECKS, Kind, Module, NeverWrittenError, Pointer, memory
from ptx.bench import TARGETS, Bench, module


@pytest.fixture(params=TARGETS, ids=[f"compute_{target}" for target in TARGETS])
def planted(request: pytest.FixtureRequest) -> Module:
    return module(request.param)


@pytest.fixture
def bench(planted: Module) -> Bench:
    return Bench(planted)


# ---- memcheck -----------------------------------------------------------------------------------


def test_a_sound_kernel_passes_every_check(bench: Bench) -> None:
    x = np.arange(100, dtype=np.float32)
    args = bench.input(x), bench.output(100), np.int32(100)
    report = bench.run("copy", *args, grid=2)
    bench.memory.check_written("y")
    assert np.array_equal(bench.array, x)
    assert report.checks == ALL_CHECKS
    assert report.instructions > 0


def test_an_off_by_one_tail_is_out_of_bounds(bench: Bench) -> None:
    args = bench.input(np.zeros(100)), bench.output(100), np.int32(100)
    text = bench.fails(Kind.OUT_OF_BOUNDS, "copy_off_by_one", *args, grid=2)
    assert "0 bytes past the end of 'x'" in text
    assert "block (1, 0, 0), thread (36, 0, 0)" in text
    assert "ld.global" in text
    assert "planted.cu:11" in text


def test_a_store_to_an_input_is_refused(bench: Bench) -> None:
    x = bench.input(np.zeros(64))
    bench.fails(Kind.READ_ONLY, "copy", x, x, np.int32(64))


def test_a_released_buffer_is_out_of_bounds(bench: Bench) -> None:
    args = bench.input(np.zeros(64)), bench.output(64), np.int32(64)
    bench.memory.release("x")
    assert "released buffer 'x'" in bench.fails(Kind.OUT_OF_BOUNDS, "copy", *args)


def test_an_unregistered_address_is_out_of_bounds(bench: Bench) -> None:
    bench.fails(Kind.OUT_OF_BOUNDS, "copy", Pointer(0), bench.output(64), np.int32(64))


@pytest.mark.parametrize("shift", [4, 8])
def test_a_misaligned_vector_is_found(bench: Bench, shift: int) -> None:
    x = bench.memory.register(memory.empty(65, np.float32, offset=shift), "x")
    bench.fails(Kind.MISALIGNED, "copy_vector", x, bench.output(64), np.int32(16))


def test_gaps_between_rows_are_out_of_bounds(planted: Module) -> None:
    for column_count, slack, kind in ((5, False, None), (6, False, Kind.OUT_OF_BOUNDS)):
        bench = Bench(planted)
        base = memory.copy(np.arange(32, dtype=np.float32).reshape(4, 8))
        x = bench.memory.register(base[:, :5], "x", readonly=True, sector_slack=slack)
        args = x, bench.output((4, 6)), np.int64(8), np.int64(6), np.int32(column_count)
        if kind is None:
            bench.run("copy_rows", *args, grid=4, block=32)
            assert np.array_equal(bench.array[:, :5], base[:, :5])
        else:
            bench.fails(kind, "copy_rows", *args, grid=4, block=32)


def test_sector_slack_allows_loads_but_not_their_use(planted: Module) -> None:
    base = np.arange(32, dtype=np.float32)
    bench = Bench(planted)
    x = memory.copy(base)
    pointer = bench.memory.register(x[:5], "x", readonly=True, sector_slack=True)
    args = pointer, bench.output(8)
    bench.run("select_below", *args, np.int32(5), block=2)
    assert bench.array.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    bench.fails(Kind.POISON_STORED, "select_below", *args, np.int32(6), block=2)
    # The next sector holds no element.
    bench.fails(Kind.OUT_OF_BOUNDS, "select_below", *args, np.int32(5), block=3)


def test_sector_slack_does_not_allow_stores(bench: Bench) -> None:
    y = memory.empty(8, np.float32)
    pointer = bench.memory.register(y[:5], "y", sector_slack=True)
    bench.fails(Kind.OUT_OF_BOUNDS, "copy", bench.input(np.zeros(8)), pointer, np.int32(6))


def test_whole_base_makes_the_gaps_live(bench: Bench) -> None:
    base = memory.copy(np.arange(32, dtype=np.float32).reshape(4, 8))
    x = bench.memory.register(base[:, :5], "x", readonly=True, whole_base=True)
    args = x, bench.output((4, 6)), np.int64(8), np.int64(6), np.int32(6)
    bench.run("copy_rows", *args, grid=4, block=32)
    assert np.array_equal(bench.array, base[:, :6])


def test_columns_of_one_base_are_told_apart(bench: Bench) -> None:
    base = memory.copy(np.arange(64, dtype=np.float32).reshape(4, 16))
    left = bench.memory.register(base[:, :8], "left", readonly=True)
    right = bench.memory.register(base[:, 8:], "right")
    args = left, right, np.int64(16), np.int64(16)
    report = bench.run("copy_rows", *args, np.int32(8), grid=4, block=32)
    assert np.array_equal(base[:, :8], base[:, 8:])
    assert report.buffers["left"].read_sectors == report.buffers["right"].write_sectors == 4
    bench.fails(Kind.READ_ONLY, "copy_rows", right, left, *args[2:], np.int32(8), grid=4, block=32)


def test_shared_memory_has_bounds(bench: Bench) -> None:
    y = bench.output(64)
    bench.run("shared_overrun", y, np.int32(0), shared_bytes=256)
    text = bench.fails(Kind.SHARED_BOUNDS, "shared_overrun", y, np.int32(1), shared_bytes=256)
    assert "shared memory offset 256" in text


def test_offsets_beyond_32_bits_reach_sparse_memory(planted: Module) -> None:
    rows, stride = 3, 2**33 + 64
    bench = Bench(planted)
    x = np.arange(rows * 20, dtype=np.float32).reshape(rows, 20)
    pointer = bench.memory.register_sparse(x, "x", base=2**45, strides=(stride, 4), readonly=True)
    y = np.zeros_like(x)
    out = bench.memory.register_sparse(y, "y", base=2**46, strides=(2 * stride, 4), poison=True)
    args = pointer, out, np.int64(stride // 4), np.int64(stride // 2), np.int32(20)
    bench.run("copy_rows", *args, grid=rows, block=32)
    bench.memory.check_written("y")
    assert np.array_equal(x, y)
    # The same offsets computed in 32 bits would land elsewhere.
    wrong = pointer, out, np.int64(stride // 4 % 2**31), np.int64(stride // 2), np.int32(20)
    bench.fails(Kind.OUT_OF_BOUNDS, "copy_rows", *wrong, grid=rows, block=32)


# ---- initcheck ----------------------------------------------------------------------------------


def test_an_element_never_written_is_reported(bench: Bench) -> None:
    args = bench.input(np.zeros(64)), bench.output(64), np.int32(64)
    bench.run("copy_skips_last", *args)
    with pytest.raises(NeverWrittenError, match=r"y: 1 of 64 elements never written.*\(63,\)"):
        bench.memory.check_written("y")
    assert bench.memory.written("y").sum() == 63


def test_plain_launches_cannot_vouch_for_writes(planted: Module) -> None:
    bench = Bench(planted, checks=())
    bench.run("copy", bench.input(np.zeros(64)), bench.output(64), np.int32(64))
    with pytest.raises(RuntimeError, match="checked launches only"):
        bench.memory.check_written("y")


def test_poison_may_be_loaded_and_selected_away(bench: Bench) -> None:
    upper = np.arange(8) >= 5
    args = bench.input(np.ones(8), poison=upper), bench.output(8)
    bench.run("select_below", *args, np.int32(5), block=2)
    bench.memory.check_written("y")
    assert bench.array.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_poison_times_zero_is_poison(bench: Bench) -> None:
    upper = np.arange(8) >= 5
    args = bench.input(np.ones(8), poison=upper), bench.output(8)
    text = bench.fails(Kind.POISON_STORED, "multiply_below", *args, np.int32(5), block=2)
    assert "thread (1, 0, 0)" in text


def test_poison_is_found_in_a_store_a_branch_and_an_address(bench: Bench) -> None:
    x = bench.output(64, "x")
    y = bench.output(96)
    bench.fails(Kind.POISON_STORED, "copy", x, y, np.int32(64))
    bench.fails(Kind.POISONED_BRANCH, "branch_on_value", x, y, block=32)
    bench.fails(Kind.POISONED_ADDRESS, "gather", x, x, y, block=32)


def test_what_one_launch_writes_the_next_may_read(bench: Bench) -> None:
    workspace, y = bench.output(64, "workspace"), bench.output(64)
    bench.run("copy", bench.input(np.ones(64)), workspace, np.int32(64))
    bench.run("copy", workspace, y, np.int32(64))
    bench.memory.poison("workspace", np.arange(64) == 7)
    bench.fails(Kind.POISON_STORED, "copy", workspace, y, np.int32(64))


def test_shared_memory_starts_as_poison(bench: Bench) -> None:
    text = bench.fails(Kind.POISON_STORED, "uninitialised_tile", bench.output(64))
    assert "thread (5, 0, 0)" in text


def test_division_by_zero_is_poison(bench: Bench) -> None:
    y = bench.output(1, dtype=np.int32)
    bench.run("divide", y, np.int32(7), np.int32(2), block=1)
    assert bench.array[0] == 3
    bench.fails(Kind.POISON_STORED, "divide", y, np.int32(7), np.int32(0), block=1)


def test_initcheck_alone_decides_about_poison(planted: Module) -> None:
    bench = Bench(planted, checks=("memcheck", "racecheck"))
    bench.run("copy", bench.output(64, "x"), bench.output(64), np.int32(64))


# ---- racecheck ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_a_missing_barrier_is_a_race(planted: Module, order: str) -> None:
    bench = Bench(planted, "all", order)
    args = bench.input(np.arange(64)), bench.output(64)
    bench.run("reverse", *args, np.int32(1))
    assert np.array_equal(bench.array, np.arange(64)[::-1])
    bench = Bench(planted, ("racecheck",), order)
    args = bench.input(np.arange(64)), bench.output(64)
    assert "shared memory offset" in bench.fails(Kind.RACE_IN_BLOCK, "reverse", *args, np.int32(0))


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_a_missing_second_barrier_is_a_race(planted: Module, order: str) -> None:
    bench = Bench(planted, "all", order)
    args = bench.input(np.arange(64)), bench.output(64)
    bench.run("double_buffer", *args, np.int32(1), block=32)
    bench.fails(Kind.RACE_IN_BLOCK, "double_buffer", *args, np.int32(0), block=32)


def test_warp_synchronisation_orders_its_own_warp(planted: Module) -> None:
    for mode in (1, 2):
        bench = Bench(planted)
        args = bench.input(np.arange(64)), bench.output(64)
        bench.run("reverse_in_warp", *args, np.int32(mode))
        assert np.array_equal(bench.array, np.arange(64) ^ 31)
    bench = Bench(planted, ("racecheck",))
    args = bench.input(np.arange(64)), bench.output(64)
    bench.fails(Kind.RACE_IN_BLOCK, "reverse_in_warp", *args, np.int32(0))


def test_warp_synchronisation_does_not_order_other_warps(planted: Module) -> None:
    bench = Bench(planted, ("racecheck",))
    args = bench.input(np.arange(64)), bench.output(64)
    bench.fails(Kind.RACE_IN_BLOCK, "reverse_over_warps", *args)


def test_a_partial_warp_synchronisation_does_not_order_the_rest(planted: Module) -> None:
    bench = Bench(planted, ("racecheck",))
    args = bench.input(np.arange(32)), bench.output(32)
    bench.fails(Kind.RACE_IN_BLOCK, "half_warp_sync", *args, block=32)


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_every_reader_counts_not_only_the_last(planted: Module, order: str) -> None:
    bench = Bench(planted, ("racecheck",), order)
    args = bench.input([0]), bench.output(32)
    bench.run("readers_then_writer", *args, np.int32(1), block=32)
    bench.fails(Kind.RACE_IN_BLOCK, "readers_then_writer", *args, np.int32(2), block=32)


def test_two_threads_writing_one_element_race(bench: Bench) -> None:
    bench.fails(Kind.RACE_IN_BLOCK, "all_write_one", bench.output(1))


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_blocks_may_not_share_what_one_writes(planted: Module, order: str) -> None:
    bench = Bench(planted, ("racecheck",), order)
    bench.fails(Kind.RACE_BETWEEN_BLOCKS, "block_sum", bench.output(1), grid=2)
    text = bench.fails(Kind.RACE_BETWEEN_BLOCKS, "read_neighbour", bench.output(8, "z"), grid=8)
    assert "another block" in text or "an earlier block" in text
    bench.run("block_sum", bench.output(1, "alone"), grid=1)


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_a_block_may_not_write_what_another_has_read(planted: Module, order: str) -> None:
    bench = Bench(planted, ("racecheck",), order)
    x, z = bench.output(1, "x"), bench.output(1, "z")
    kernel = "one_reads_one_writes"
    bench.fails(Kind.RACE_BETWEEN_BLOCKS, kernel, x, x, z, grid=2, block=1)
    bench.run(kernel, x, bench.output(1), z, grid=2, block=1)


# ---- barriers and warp operations ---------------------------------------------------------------


@pytest.mark.parametrize("checks", [(), "all"])
def test_a_barrier_that_some_never_reach_fails_with_counts(planted: Module, checks: Any) -> None:
    bench = Bench(planted, checks)
    text = bench.fails(Kind.WARP_STUCK, "partial_barrier", bench.output(64), np.int32(16))
    assert "mask 0xffffffff: 16 of 32 lanes arrived" in text
    assert "16 threads wait at a barrier" in text


@pytest.mark.parametrize("checks", [(), "all"])
def test_barriers_in_both_arms_are_divergent(planted: Module, checks: Any) -> None:
    bench = Bench(planted, checks)
    text = bench.fails(Kind.BARRIER_DIVERGED, "barrier_in_both_arms", bench.output(64))
    assert text.count("bar.sync") == 2
    assert "32 of 64 threads" in text


@pytest.mark.parametrize("checks", [(), "all"])
def test_a_shuffle_that_some_lanes_never_reach_fails(planted: Module, checks: Any) -> None:
    bench = Bench(planted, checks)
    text = bench.fails(Kind.WARP_STUCK, "partial_shuffle_then_barrier", bench.output(64))
    assert "mask 0xffffffff: 8 of 32 lanes arrived" in text
    assert "56 threads wait at a barrier" in text
    assert "shfl.sync.down" in text


def test_threads_that_have_left_are_not_waited_for(bench: Bench) -> None:
    y = bench.output(64)
    bench.run("early_exit", y, np.int32(40))
    assert bench.memory.written("y").sum() == 40
    bench.run("partial_shuffle", bench.output(32, "z"), block=32)
    assert bench.array.tolist() == [i ^ 1 for i in range(16)] + list(range(16, 32))


def test_a_lane_outside_its_mask_is_found(bench: Bench) -> None:
    bench.fails(Kind.WARP_NOT_MEMBER, "foreign_mask", bench.output(32), block=32)


def test_a_lane_that_takes_no_part_gives_poison(bench: Bench) -> None:
    bench.fails(Kind.POISON_STORED, "reads_outside_mask", bench.output(32), block=32)
