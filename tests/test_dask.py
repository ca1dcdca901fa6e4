"""Dask arrays have the bits of the undivided call, or its error bounds."""

from __future__ import annotations

from itertools import pairwise

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyops
import simulated
from chunked import call, computed, in_chunks
from cupyops._dask_blocks import BackwardBlock, modulate_backward_block
from cupyops._modulate_rows import CHUNK_ROWS, Rows
from libraries import require_gpu
from oracle import modulate_backward_exact
from oracle_bits import DTYPES
from support import (
    DTYPE_NAMES,
    LAYOUT_NAMES,
    assert_same_bits,
    assert_same_gradients,
    assert_within,
    gradient_pair,
    laid_out,
    modulation_problem,
    positional,
    sequence,
    sprinkled,
)

# ---- bits


@st.composite
def borders(draw, length: int, step: int) -> tuple[int, ...]:
    """Chunks of an axis, some perhaps empty, with borders at multiples of `step`."""
    cuts = draw(st.lists(st.integers(0, length // step), max_size=4))
    edges = [0, *sorted(cut * step for cut in cuts), length]
    return tuple(stop - start for start, stop in pairwise(edges))


@st.composite
def chunked_problems(draw, shapes, aligned: bool):
    """(arrays, the same as Dask arrays or not, names of the parameters' layouts)."""
    shape = draw(shapes)
    name, parameter = draw(st.sampled_from(DTYPE_NAMES)), draw(st.sampled_from(DTYPE_NAMES))
    layouts = [draw(st.sampled_from([None, *LAYOUT_NAMES])) for _ in range(2)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = modulation_problem(rng, shape, name, *layouts, parameter)
    if draw(st.integers(0, 3)) == 0:
        problem = {key: sprinkled(rng, value, 0.02) for key, value in problem.items()}
    striding = draw(st.sampled_from(["contiguous", "contiguous", "transposed", "sliced"]))
    problem["x"] = laid_out(problem["x"], striding)
    # A sum over B is cut like one over L.
    steps = [CHUNK_ROWS if aligned and "1,L,D" in layouts else 1, CHUNK_ROWS if aligned else 1, 1]
    chunks = [draw(borders(n, step)) for n, step in zip(shape, steps, strict=True)]
    lazy = {"x": da.from_array(problem["x"], chunks=chunks)}
    for key, value in problem.items():
        if key != "x" and draw(st.booleans()):
            own = [draw(borders(n, 1)) for n in value.shape]  # aligned with x by the call
            lazy[key] = da.from_array(value, chunks=own)
    return problem, problem | lazy, layouts


lengths = st.sampled_from([0, 1, 5, 64, 65, 128, 200, 257])
shapes = st.tuples(st.sampled_from([0, 1, 2, 3, 7, 130]), lengths, st.sampled_from([0, 1, 2, 5]))


@settings(max_examples=250)
@given(case=chunked_problems(shapes, aligned=True), plus=st.booleans())
def test_borders_at_multiples_of_64_rows_leave_the_bits_alone(case, plus):
    problem, lazy, _ = case
    for name in ("modulate", "modulate_backward"):
        got = computed(call(name, lazy, one_plus_scale=plus))
        want = call(name, problem, one_plus_scale=plus)
        (assert_same_gradients if name == "modulate_backward" else assert_same_bits)(got, want)


small = st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 3))


@settings(max_examples=100)
@given(case=chunked_problems(small, aligned=False), plus=st.booleans())
def test_any_borders_keep_the_error_bounds_and_give_the_same_bits_again(case, plus):
    problem, lazy, _ = case
    grads = call("modulate_backward", lazy, one_plus_scale=plus)
    got = computed(grads)
    x, others = positional(problem)
    for part, pair in zip(
        got, modulate_backward_exact(x, **others, one_plus_scale=plus), strict=True
    ):
        if part is not None:
            assert_within(part, *pair)
    assert_same_bits(got.grad_input, call("modulate_backward", problem, one_plus_scale=plus)[0])
    assert_same_gradients(type(got)(*dask.compute(*grads, scheduler="threads")), got)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_long_sums_in_many_chunks_have_the_bits_of_one(layout, dtype):
    rng = np.random.default_rng(1)
    shape, chunks = ((3, 2600, 2), (2, 64, 2)) if layout != "1,L,D" else ((2600, 3, 2), (64, 2, 2))
    problem = modulation_problem(rng, shape, dtype, layout, layout, dtype)
    problem["grad_output"] *= np.asarray(4, DTYPES[dtype])  # partial sums that have to be rounded
    lazy = in_chunks(problem, chunks)
    got = computed(call("modulate_backward", lazy))
    assert_same_gradients(got, call("modulate_backward", problem))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_several_whole_samples_in_a_chunk_have_the_bits_of_the_batch(layout):
    problem = modulation_problem(np.random.default_rng(9), (5, 256, 3), "float32", layout, layout)
    borders = (5, 256, 3) if layout == "1,L,D" else (2, 256, 3)
    got = computed(call("modulate_backward", in_chunks(problem, borders)))
    assert_same_gradients(got, call("modulate_backward", problem))


def test_a_sum_is_rounded_to_the_compute_type_on_its_way_to_16_bits():
    grad = np.zeros((1, 128, 1), np.float32)
    grad[0, 0], grad[0, 64] = 1 + 2.0**-11, 2.0**-40  # more than half-way, in float64
    problem = {"x": grad, "grad_output": grad, "shift": np.zeros((1, 1), np.float16)}
    got = computed(call("modulate_backward", in_chunks(problem, (1, 64, 1))))
    assert got.grad_shift[0, 0] == 1
    assert_same_gradients(got, call("modulate_backward", problem))


def test_other_borders_change_the_bits_and_nothing_else_does():
    """Else the rule that the manual states would be idle."""
    rng = np.random.default_rng(2)
    problem = modulation_problem(rng, (1, 640, 50), "float32", "B,D")
    whole = call("modulate_backward", problem).grad_scale
    for rows, same in ((64, True), (128, True), (192, True), (100, False), (8, False)):
        got = call("modulate_backward", in_chunks(problem, (1, rows, 50))).grad_scale.compute()
        assert np.array_equal(got, whole) == same
        np.testing.assert_allclose(got, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("zeros", [-0.0, 0.0])
def test_sums_of_zeros_keep_their_sign(zeros):
    x = np.full((2, 130, 3), 1.0, np.float32)
    problem = {"x": x, "grad_output": x * np.float32(zeros), "scale": x[:, 0], "shift": x[0, 0]}
    got = computed(call("modulate_backward", in_chunks(problem, (1, 64, 3))))
    assert_same_gradients(got, call("modulate_backward", problem))


@settings(max_examples=60)
@given(data=st.data())
def test_exp_segsum_in_any_chunks_of_the_leading_axes(data):
    leading = data.draw(st.sampled_from([(), (0,), (3,), (2, 3), (1, 2, 2)]))
    length = data.draw(st.sampled_from([0, 1, 2, 17, 64]))
    name = data.draw(st.sampled_from(DTYPE_NAMES))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = sequence(rng, (*leading, length), name)
    chunks = tuple(data.draw(borders(n, 1)) for n in leading)
    y = cupyops.exp_segsum(da.from_array(x, chunks=(*chunks, -1)))
    assert y.chunks == (*chunks, (length,), (length,))
    assert_same_bits(computed(y), cupyops.exp_segsum(x))
    y, grad = gradient_pair(rng, (*leading, length, length), name)
    others = tuple(data.draw(borders(n, 1)) for n in leading)
    lazy = [da.from_array(y, chunks=(*chunks, -1, -1)), da.from_array(grad, (*others, -1, -1))]
    want = cupyops.exp_segsum_backward(y, grad_output=grad)
    for first, second in (lazy, (y, lazy[1]), (lazy[0], grad)):
        got = cupyops.exp_segsum_backward(first, grad_output=second)
        assert_same_bits(computed(got), want)
    assert got.chunks == (*chunks, (length,))


# ---- chunks on a GPU


class Chunk(simulated.GpuArray):
    """What the tasks ask of a CuPy array beyond an operand of a kernel."""

    def _view(self, values):
        return type(self)(values)

    def __getitem__(self, index):
        return self._view(self.values[index])

    def reshape(self, *shape):
        result = self.values.reshape(*shape)
        assert not result.size or np.shares_memory(result, self.values), "a copy would be filled"
        return self._view(result)

    def swapaxes(self, *axes):
        return self._view(self.values.swapaxes(*axes))

    def astype(self, dtype, copy=True):
        return self._view(self.values.astype(dtype, copy=copy))

    def get(self):
        return self.values.copy()

    def __array_function__(self, function, types, arguments, options):
        assert function in (np.broadcast_to, np.repeat, np.zeros_like)
        array, *rest = arguments
        return self._view(function(array.values, *rest, **options))


ON_A_GPU = [("B,D", "D"), ("1,L,D", "B,D"), ("B,L,D", "D"), (None, "B,D")]


@pytest.mark.parametrize(
    ("layouts", "whole"),
    [(layouts, False) for layouts in ON_A_GPU]
    + [(layouts, True) for layouts in ON_A_GPU if "1,L,D" not in layouts],
)
def test_tasks_take_chunks_on_a_gpu(layouts, whole, monkeypatch):
    rows = {"B,D": Rows.PER_SAMPLE, "D": Rows.SHARED, "1,L,D": Rows.PER_POSITION}
    rows |= {"B,L,D": Rows.PER_TOKEN, None: None}
    problem = modulation_problem(np.random.default_rng(6), (3, 150, 4), "bfloat16", *layouts)
    scale = problem.get("scale")
    scale = scale[0] if layouts[0] == "1,L,D" else scale
    kinds = [rows[layout] for layout in layouts]
    block = BackwardBlock(False, np.dtype(np.float32), problem["x"].dtype, *kinds, whole=whole)
    arrays = (problem["grad_output"], *(() if scale is None else (problem["x"], scale)))
    want = modulate_backward_block(*arrays, call=block)
    simulated.install(monkeypatch, simulated.SimulatedExecutor())
    Chunk.__module__, Chunk.__qualname__ = simulated.LIBRARY, "GpuArray"
    monkeypatch.setattr(simulated, "GpuArray", Chunk)
    got = modulate_backward_block(*(Chunk(array) for array in arrays), call=block)
    for part, expected in zip(got, want, strict=True):
        assert (part is None) == (expected is None)
        if expected is not None:
            values = part.values if isinstance(part, Chunk) else part
            assert_same_bits(np.ascontiguousarray(values), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_chunks_of_cupy_have_the_bits_of_numpy(layout, dtype):
    cupy = require_gpu()
    problem = modulation_problem(np.random.default_rng(7), (3, 200, 5), dtype, layout, layout)
    lazy = {
        key: da.from_array(cupy.asarray(value), chunks=(3, 64, 4) if value.ndim == 3 else -1)
        for key, value in problem.items()
        if key in ("x", "grad_output")
    }
    moved = {key: cupy.asarray(value) for key, value in problem.items()} | lazy
    for name in ("modulate", "modulate_backward"):
        result, want = call(name, moved), call(name, problem)
        parts, wanted = (r if isinstance(r, tuple) else (r,) for r in (result, want))
        for lazy_part, expected in zip(parts, wanted, strict=True):
            assert isinstance(lazy_part._meta, cupy.ndarray)
            assert_same_bits(lazy_part.compute().get(), expected)
    x = sequence(np.random.default_rng(8), (4, 33), dtype)
    y = cupyops.exp_segsum(da.from_array(cupy.asarray(x), chunks=(3, -1)))
    assert_same_bits(y.compute().get(), cupyops.exp_segsum(cupy.asarray(x)).get())
