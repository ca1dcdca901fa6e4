"""How exp_segsum_backward cuts a matrix into walkers, strips, bands and tiles on a GPU.

The order of its sums must be a function of T and the dtype; every cut is a place to get an index
wrong. The last tests plant such mistakes in the kernel's source and see them found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simulated
from cupyops import _exp_segsum
from cupyops._exp_segsum_device import BAND_ROWS, WHOLE_ROWS, _Walk
from ptx import LaunchError, memory
from support import (
    DTYPE_NAMES,
    array,
    assert_exp_segsum_backward,
    bits,
    gradient_pair,
)

BACKWARD = _exp_segsum._EXP_SEGSUM_BACKWARD
SOURCE = "exp_segsum_backward.cu"
MULTIPROCESSORS = 132
# Whole matrices of one lane, of one, two and more strips; tiles, with vectors and without.
LENGTHS = (5, 16, 40, 128, 136, 257, WHOLE_ROWS, WHOLE_ROWS + 1, 392)


def run(
    y: np.ndarray, grad_output: np.ndarray, checks: Any = "all", **options: Any
) -> tuple[np.ndarray, list[str]]:
    """The gradient, and the kernels that made it."""
    inputs = {"y": y, "grad_output": grad_output}
    plan = simulated.plan_of(BACKWARD, inputs)
    outs = simulated.new_outs(plan)
    reports = simulated.run_checked(plan, inputs, outs, checks=checks, **options)
    return outs["out"], [report.kernel for report in reports]


def pair(name: str, count: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y, grad = gradient_pair(rng, (count, length, length), name)
    return memory.copy(y), memory.copy(grad)


def at_odd_columns(values: np.ndarray) -> np.ndarray:
    """The same values where no row is aligned for vectors."""
    wide = memory.empty((*values.shape[:-1], values.shape[-1] + 1), values.dtype)
    wide[..., 1:] = values
    return wide[..., 1:]


# -- one order of sums ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_bits_are_a_function_of_the_matrix_alone(name: str, length: int) -> None:
    """Not of the batch, the position in it, the form of the kernel or the order of its blocks."""
    y, grad = pair(name, 3, length)
    want, kernels = run(y, grad)
    assert_exp_segsum_backward(want, y, grad, some_positions(length))
    for n in range(3):
        alone, _ = run(
            memory.copy(y[n : n + 1]), memory.copy(grad[n : n + 1]), checks=("memcheck",)
        )
        assert np.array_equal(bits(alone[0]), bits(want[n]))
    scalar, forms = run(at_odd_columns(y), grad)
    assert "false>" in forms[0]
    assert length % 8 or "true>" in kernels[0]
    assert np.array_equal(bits(scalar), bits(want))
    shuffled, _ = run(y, grad, order="shuffled", seed=3)
    assert np.array_equal(bits(shuffled), bits(want))


def some_positions(length: int) -> tuple[int, ...] | None:
    """All of a small matrix; else the borders of strips, bands and walkers."""
    if length < 100:
        return None
    borders = {0, 1, 2, length - 1, length // 2}
    borders |= {k + d for k in range(0, length, 64) for d in (-1, 0, 1)}
    return tuple(sorted(k for k in borders if 0 <= k < length))


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("length", [1, 8, 50, 64, 128, 256, 257, 320, 321, 1024, 2048])
def test_no_cut_of_a_matrix_depends_on_the_batch(name: str, length: int) -> None:
    def cut(count: int) -> list[tuple[Any, ...]]:
        spec = simulated.ArraySpec._make(
            ((count, length, length), dtype, strides, simulated.LIBRARY, "simulated:0")
        )
        plan = simulated.plan_of(BACKWARD, {"y": spec, "grad_output": spec})
        walk = plan.launches[0]
        # T, strips, bands and tiles of a matrix; lanes and walkers.
        return [walk.args[-5:-1], walk.block[:2], *(launch.kernel for launch in plan.launches)]

    dtype = array([0.0], name).dtype
    strides = (length * length * dtype.itemsize, length * dtype.itemsize, dtype.itemsize)
    assert cut(1) == cut(2) == cut(300) == cut(70_000)


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_one_large_matrix_keeps_all_multiprocessors_busy(name: str) -> None:
    y = array(np.zeros((1, 2048, 2048)), name)
    walk, combine = simulated.plan_of(BACKWARD, {"y": y, "grad_output": y}).launches
    assert walk.grid[0] >= MULTIPROCESSORS
    assert walk.block[0] * walk.block[1] == 256
    assert combine.grid[0] == 2048 // BAND_ROWS


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("length", [*LENGTHS, 1, 17, 33, 64, 65, 192, 256, 640, 2047])
def test_every_tile_on_or_below_the_diagonal_is_there_once(itemsize: int, length: int) -> None:
    walk = _Walk.of(length, itemsize)
    strips = walk.strips
    assert strips.width * strips.number >= length
    threads = strips.lanes * walk.walkers
    if not walk.bands:
        assert threads * strips.number <= 512
        assert strips.number == 1 or threads % 32 == 0
        return
    assert threads % 32 == 0
    of_band = BAND_ROWS // strips.width
    tiles = [tile(t, walk.bands, of_band) for t in range(walk.tiles)]
    want = {(b, s) for b in range(walk.bands) for s in range((b + 1) * of_band)}
    assert set(tiles) == want
    assert len(tiles) == len(want)


def tile(index: int, bands: int, of_band: int) -> tuple[int, int]:
    """`Tile` of the kernel."""
    (pair, column), sub = divmod(index // of_band, bands | 1), index % of_band
    band = bands - 1 - pair
    if column > band:
        column -= band + 1
        band = pair - (bands & 1)
    return band, column * of_band + sub


# -- what reaches what ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("length", [136, 257, 392])
def test_a_value_that_is_not_finite_reaches_exactly_its_sums(name: str, length: int) -> None:
    places = [(i, j) for i in borders(length) for j in borders(length) if j < i]
    rng = np.random.default_rng(4)
    for i, j in rng.permutation(places)[:24]:
        y, grad = pair(name, 1, length, seed=int(i))
        y[0, i, j] = np.inf
        grad[0, i, j] = 1
        got, _ = run(y, grad, checks=("memcheck",))
        k = np.arange(length)
        assert np.array_equal(~np.isfinite(got[0].astype(float)), (j < k) & (k <= i)), (i, j)


def borders(length: int) -> list[int]:
    near = {0, length - 1, *(b + d for b in range(64, length, 64) for d in (-1, 0, 1, 7))}
    return sorted(b for b in near if b < length)


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("length", [136, 257, 392])
def test_every_element_below_the_diagonal_counts_once(name: str, length: int) -> None:
    """grad_input[k] of ones is k (T - k), exact in float32 and float64."""
    ones = memory.copy(array(np.ones((1, length, length)), name))
    k = np.arange(length)
    got, _ = run(ones, ones, checks=("memcheck",))
    assert np.array_equal(bits(got[0]), bits(array(k * (length - k), name)))


# -- faults that these tests are there to find ----------------------------------------------------


MISSING_BARRIERS = {
    "before the sums of lower walkers are read": (
        "            slots.put(thread * N, columns);\n            __syncthreads();",
        "            slots.put(thread * N, columns);",
    ),
    "before the rows are stored": (
        "        __syncthreads();\n        if (tiled) {",
        "        if (tiled) {",
    ),
    "before the sums beneath are used": (
        "beneath[x] = lower;\n        __syncthreads();",
        "beneath[x] = lower;",
    ),
    "between storing products and taking them": (
        "        __syncwarp();\n        get(first",
        "        get(first",
    ),
}


@pytest.mark.parametrize("place", MISSING_BARRIERS)
def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    y, grad = pair("float32", 1, 330)
    run(y, grad)
    simulated.with_fault(monkeypatch, SOURCE, *MISSING_BARRIERS[place])
    with pytest.raises(LaunchError, match=r"race|poison"):
        run(y, grad, order="reversed")


WRONG_INDICES = {
    "a band takes its own column sums too": (
        "own = add(own, column_sums[(n * bands + below) * T + k]);",
        "own = add(own, column_sums[(n * bands + below - 1) * T + k]);",
    ),
    "the band next below is left out": (
        "below > band; --below)\n                left",
        "below > band + 1; --below)\n                left",
    ),
    "the tile that touches the diagonal is left out": (
        "s * width < top;",
        "(s + 1) * width < top;",
    ),
    "a walker takes its own columns too": ("other > threadIdx.y;", "other >= (int)threadIdx.y;"),
    "rows above the diagonal get a column too many": (
        "row + lead > 0) rows",
        "row + lead > 1) rows",
    ),
    "the diagonal is used": ("min(row + lead, width) : 0", "min(row + lead + 1, width) : 0"),
    "a band is a row too long": ("min(T - top, (int64)BAND_ROWS)", "min(T - top, BAND_ROWS + 1ll)"),
    "walkers leave out a row": ("(height + walkers - 1) / walkers", "height / walkers"),
    "a prefix sum includes its own column": (
        "rows[row] = add(rows[row], sum);\n        sum = add(sum, columns[i]);",
        "rows[row] = add(rows[row], add(sum, columns[i]));\n        sum = add(sum, columns[i]);",
    ),
}


@pytest.mark.parametrize("fault", WRONG_INDICES)
def test_a_wrong_index_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    simulated.with_fault(monkeypatch, SOURCE, *WRONG_INDICES[fault])
    with pytest.raises((LaunchError, AssertionError)):
        every_element_counts_once_and_none_above()


def every_element_counts_once_and_none_above() -> None:
    test_every_element_below_the_diagonal_counts_once("float64", 392)
    y, grad = pair("float32", 1, 330)
    above = np.broadcast_to(np.triu(np.ones(y.shape[1:], bool)), y.shape)
    run(y, grad, unread={"y": above, "grad_output": above})


def test_an_order_that_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.with_fault(
        monkeypatch,
        SOURCE,
        "row_sums[(n * strips + s) * T + k]);",
        "row_sums[(n * strips + (n & 1 ? (k - 1) / width - s : s)) * T + k]);",
    )
    with pytest.raises(AssertionError):
        test_bits_are_a_function_of_the_matrix_alone("float32", 392)
