"""modulate and modulate_backward: memory layouts, determinism, and ``out``."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import cupyops
from oracle_bits import DTYPES, modulate_backward_bits, modulate_bits, widen
from support import (
    LAYOUT_NAMES,
    STRIDINGS,
    array,
    assert_modulate_bits,
    assert_same_bits,
    assert_same_gradients,
    each_laid_out,
    forward_part,
    laid_out,
    modulate_layouts,
    modulation_problem,
    normal,
    poisoned,
    positional,
    shape_id,
)

# ---- memory layouts


@pytest.mark.parametrize("only", [None, "x", "grad_output", "scale", "shift"])
@pytest.mark.parametrize("striding", STRIDINGS)
def test_bits_do_not_depend_on_strides_or_alignment(call, dtype, striding, only):
    rng = np.random.default_rng(20)
    for layout in ("B,D", "D", "B,L,D", "1,L,D"):
        problem = modulation_problem(rng, (3, 67, 5), dtype, layout, layout)
        assert_modulate_bits(call, each_laid_out(problem, striding, only))


@pytest.mark.parametrize("striding", STRIDINGS)
@pytest.mark.parametrize("shape", [(2, 700, 300), (1, 3001, 67), (401, 2, 263)], ids=shape_id)
def test_bits_of_large_arrays_do_not_depend_on_strides(call, shape, striding):
    rng = np.random.default_rng(21)
    problem = modulation_problem(rng, shape, "float32", "B,D", "1,1,D")
    assert_modulate_bits(call, each_laid_out(problem, striding))


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))), ids=str)
def test_bits_do_not_depend_on_the_order_of_the_axes(call, dtype, axes):
    rng = np.random.default_rng(22)
    back = np.argsort(axes)
    for shape in ((3, 67, 5), (2, 130, 1), (65, 2, 3)):
        for layout in ("B,D", "1,L,D"):
            problem = modulation_problem(rng, shape, dtype, layout, "1,1,D")
            for key in ("x", "grad_output"):
                dense = np.ascontiguousarray(problem[key].transpose(axes))
                problem[key] = dense.transpose(back)
            assert_modulate_bits(call, problem)


@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_bits_do_not_depend_on_how_rows_lie(call, dtype, width):
    """NumPy may turn an axis round, or make it the inner one, by its stride alone."""
    rng = np.random.default_rng(26)
    shape = (2, 150, width)
    problem = modulation_problem(rng, shape, dtype, "B,D", "1,1,D")
    windows = np.lib.stride_tricks.sliding_window_view(
        normal(rng, (2, 150 + width - 1), dtype), width, 1
    )
    repeats = np.broadcast_to(normal(rng, (2, 1, width), dtype), shape)
    for rows in (
        normal(rng, shape, dtype)[:, ::-1],
        normal(rng, shape, dtype)[::-1],
        normal(rng, (150, 2, width), dtype).swapaxes(0, 1),
        normal(rng, (2, 300, width), dtype)[:, ::2],
        windows,
        repeats,
    ):
        assert rows.shape == shape
        assert_modulate_bits(call, problem | {"grad_output": rows, "x": rows})


def test_strides_of_zero_are_read_as_repeats(call, dtype):
    rng = np.random.default_rng(23)
    shape = (3, 70, 4)
    for small in ((1, 1, 1), (3, 1, 1), (1, 70, 1), (1, 1, 4), (3, 70, 1)):
        base = normal(rng, small, dtype)
        problem = {
            "x": np.broadcast_to(base, shape),
            "grad_output": np.broadcast_to(normal(rng, small, dtype), shape),
            "scale": np.broadcast_to(normal(rng, (1, 1), dtype), (3, 4)),
            "shift": np.broadcast_to(normal(rng, (3, 1, 1), dtype), shape),
        }
        assert_modulate_bits(call, problem)


def test_parameters_may_be_six_chunks_of_one_projection(call, dtype):
    rng = np.random.default_rng(24)
    shape = (2, 66, 5)
    projection = normal(rng, (2, 6 * shape[2]), dtype)
    chunks = np.split(projection, 6, axis=-1)
    for scale, shift in itertools.permutations(chunks, 2):
        problem = modulation_problem(rng, shape, dtype) | {"scale": scale, "shift": shift}
        assert_modulate_bits(call, problem, plus=True)


def test_memmap_is_accepted_and_results_are_plain_arrays(call, dtype, tmp_path):
    rng = np.random.default_rng(25)
    problem = modulation_problem(rng, (2, 9, 3), dtype, "B,D", "B,D")
    mapped = {}
    for key, value in problem.items():
        value.tofile(tmp_path / key)
        mapped[key] = np.memmap(tmp_path / key, value.dtype, "r", shape=value.shape)
    assert_modulate_bits(call, mapped)


# ---- determinism


def test_row_bits_do_not_depend_on_batch(call, dtype):
    rng = np.random.default_rng(30)
    shape = (64, 777, 192) if dtype == "float32" else (64, 777, 24)
    problem = modulation_problem(rng, shape, dtype, "B,D", "B,1,D")
    x, arguments = positional(problem)
    whole = call("modulate_backward", x, **arguments)
    forward = call("modulate", x, **positional(forward_part(problem))[1])
    for b in range(shape[0]):
        x, arguments = positional({key: value[b : b + 1] for key, value in problem.items()})
        single = call("modulate_backward", x, **arguments)
        assert_same_gradients(single, [part[b : b + 1] for part in whole])
        arguments.pop("grad_output")
        assert_same_bits(call("modulate", x, **arguments), forward[b : b + 1])
    if dtype == "float32":
        x, arguments = positional(problem)
        assert_same_gradients(whole, modulate_backward_bits(x, **arguments))


def test_column_bits_do_not_depend_on_width(call, dtype):
    rng = np.random.default_rng(31)
    problem = modulation_problem(rng, (2, 333, 65), dtype, "B,D", "1,L,D")
    x, arguments = positional(problem)
    whole = call("modulate_backward", x, **arguments)
    for first, last in ((0, 1), (64, 65), (3, 5), (1, 65)):
        part = {key: value[..., first:last] for key, value in problem.items()}
        x, arguments = positional(part)
        single = call("modulate_backward", x, **arguments)
        assert_same_gradients(single, [np.ascontiguousarray(p[..., first:last]) for p in whole])


def test_runs_repeat_bit_for_bit(call, dtype):
    rng = np.random.default_rng(32)
    problem = modulation_problem(rng, (2, 1025, 64), dtype, "1,1,D", "B,D")
    x, arguments = positional(problem)
    first = call("modulate_backward", x, **arguments)
    for _ in range(5):
        assert_same_gradients(call("modulate_backward", x, **arguments), first)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", ["B,D", "D", "1,1,D"])
def test_a_hundred_thousand_rows_of_a_tenth_do_not_drift(call, layout, width):
    shape = (1, 100_000, width)
    tenth, one = np.full(shape, 0.1, np.float32), np.ones(shape, np.float32)
    parameter = np.zeros(modulate_layouts(shape)[layout], np.float32)
    got = call("modulate_backward", one, grad_output=tenth, scale=parameter, shift=parameter)
    for part in (got.grad_scale, got.grad_shift):
        assert np.abs(part / 10000.000149011612 - 1).max() < 1e-6


def test_a_hundred_thousand_samples_of_a_tenth_do_not_drift(call):
    tenth = np.full((100_000, 1, 2), 0.1, np.float32)
    parameter = np.zeros((1, 1, 2), np.float32)
    per_token = np.zeros((1, 1, 2), np.float32)
    got = call("modulate_backward", tenth, grad_output=tenth, scale=per_token, shift=parameter)
    assert np.abs(got.grad_shift / 10000.000149011612 - 1).max() < 1e-6


def test_a_long_sum_of_ones_is_exact_in_every_dtype_that_can_hold_it(call, dtype):
    ones = array(np.ones((1, 2048, 3)), dtype)
    parameter = array(np.zeros((1, 3)), dtype)
    got = call("modulate_backward", ones, grad_output=ones, scale=parameter, shift=parameter)
    assert (widen(got.grad_scale) == 2048).all()
    assert (widen(got.grad_shift) == 2048).all()


# ---- out


@pytest.mark.parametrize("striding", [s for s in STRIDINGS if s != "readonly"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_out_is_filled_whatever_its_layout_and_returned(call, dtype, layout, striding):
    rng = np.random.default_rng(60)
    problem = modulation_problem(rng, (3, 67, 5), dtype, layout, layout)
    x, arguments = positional(forward_part(problem))
    out = laid_out(np.zeros_like(x), striding)
    assert call("modulate", x, **arguments, out=out) is out
    assert_same_bits(out, modulate_bits(x, **arguments))
    x, arguments = positional(problem)
    outs = tuple(laid_out(np.zeros_like(problem[k]), striding) for k in ("x", "scale", "shift"))
    got = call("modulate_backward", x, **arguments, out=outs)
    assert isinstance(got, cupyops.ModulateGrads)
    assert all(part is given for part, given in zip(got, outs, strict=True))
    assert_same_gradients(got, modulate_backward_bits(x, **arguments))


def test_nothing_around_out_is_written(call, dtype):
    rng = np.random.default_rng(61)
    for width in (1, 3, 7, 15, 17, 19, 21, 33):
        problem = modulation_problem(rng, (2, 9, width), dtype, "B,D", "B,D")
        big = {k: poisoned([n + 2 for n in problem[k].shape], DTYPES[dtype]) for k in problem}
        inner = {k: v[(slice(1, -1),) * v.ndim] for k, v in big.items()}
        x, arguments = positional(problem)
        outs = (inner["x"], inner["scale"], inner["shift"])
        call("modulate_backward", x, **arguments, out=outs)
        y = call("modulate", x, **positional(forward_part(problem))[1], out=inner["grad_output"])
        assert not np.isnan(widen(y)).any()
        for key, view in inner.items():
            assert not np.isnan(widen(view)).any()
            view[...] = array(math.nan, dtype)
            assert np.isnan(widen(big[key])).all(), f"wrote around {key}"


@pytest.mark.parametrize("kind", [tuple, cupyops.ModulateGrads._make], ids=["tuple", "grads"])
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
def test_none_in_out_is_allocated(call, dtype, given, kind):
    rng = np.random.default_rng(62)
    problem = modulation_problem(rng, (2, 5, 3), dtype, "B,D", "D")
    x, arguments = positional(problem)
    shapes = [problem[key].shape for key in ("x", "scale", "shift")]
    outs = [poisoned(s, x.dtype) if use else None for s, use in zip(shapes, given, strict=True)]
    got = call("modulate_backward", x, **arguments, out=kind(outs))
    for part, mine in zip(got, outs, strict=True):
        assert mine is None or part is mine
    assert_same_gradients(got, modulate_backward_bits(x, **arguments))


def test_out_of_an_absent_gradient_is_none(call, dtype):
    rng = np.random.default_rng(63)
    problem = modulation_problem(rng, (2, 5, 3), dtype, "B,D")
    x, arguments = positional(problem)
    outs = (np.empty_like(x), np.empty_like(problem["scale"]), None)
    got = call("modulate_backward", x, **arguments, out=outs)
    assert_same_gradients(got, modulate_backward_bits(x, **arguments))


@pytest.mark.parametrize("target", ["x", "scale", "shift"])
@pytest.mark.parametrize("shape", [(2, 9, 3), (3, 501, 130)], ids=shape_id)
def test_modulate_works_in_place_of_any_input_of_its_shape(dtype, shape, target):
    rng = np.random.default_rng(64)
    for striding in ("contiguous", "fortran", "sliced", "reversed", "unaligned"):
        problem = modulation_problem(rng, shape, dtype, "B,L,D", "B,L,D")
        x, arguments = positional(forward_part(problem))
        want = modulate_bits(x, **arguments)
        problem = {k: laid_out(v, striding) for k, v in forward_part(problem).items()}
        x, arguments = positional(problem)
        assert cupyops.modulate(x, **arguments, out=problem[target]) is problem[target]
        assert_same_bits(problem[target], want)


@pytest.mark.parametrize(
    "targets",
    [
        t
        for t in itertools.product(["x", "grad_output", "scale", "shift", None], repeat=3)
        if len({name for name in t if name}) == sum(name is not None for name in t) > 0
    ],
    ids=lambda t: "-".join(name or "new" for name in t),
)
def test_per_token_gradients_work_in_place_of_any_input(dtype, targets):
    rng = np.random.default_rng(65)
    for shape in ((2, 5, 3), (2, 601, 33)):
        problem = modulation_problem(rng, shape, dtype, "B,L,D", "B,L,D")
        x, arguments = positional(problem)
        want = modulate_backward_bits(x, **arguments, one_plus_scale=True)
        outs = tuple(None if name is None else problem[name] for name in targets)
        got = cupyops.modulate_backward(x, **arguments, one_plus_scale=True, out=outs)
        assert_same_gradients(got, want)


@pytest.mark.parametrize("target", ["x", "grad_output"])
@pytest.mark.parametrize("layout", [n for n in LAYOUT_NAMES if n != "B,L,D"])
def test_grad_input_may_replace_an_input_that_the_sums_still_need(dtype, layout, target):
    rng = np.random.default_rng(66)
    for shape in ((2, 9, 3), (3, 777, 65), (700, 3, 20)):
        problem = modulation_problem(rng, shape, dtype, layout, layout)
        x, arguments = positional(problem)
        want = modulate_backward_bits(x, **arguments)
        got = cupyops.modulate_backward(x, **arguments, out=(problem[target], None, None))
        assert got.grad_input is problem[target]
        assert_same_gradients(got, want)


def test_outputs_may_be_chunks_of_one_array(dtype):
    rng = np.random.default_rng(67)
    shape = (2, 9, 5)
    problem = modulation_problem(rng, shape, dtype, "B,D", "B,D")
    tokens, rows = poisoned((2, 9, 15), DTYPES[dtype]), poisoned((2, 30), DTYPES[dtype])
    tokens[..., 5:10], rows[:, 20:25] = problem["x"], problem["scale"]
    problem |= {"x": tokens[..., 5:10], "scale": rows[:, 20:25]}
    outs = (tokens[..., 10:15], rows[:, 0:5], rows[:, 5:10])
    want = modulate_backward_bits(
        *(problem[k].copy() for k in ("x", "grad_output", "scale", "shift"))
    )
    x, arguments = positional(problem)
    assert_same_gradients(cupyops.modulate_backward(x, **arguments, out=outs), want)
    assert np.isnan(widen(tokens[..., 0:5])).all()
    assert np.isnan(widen(rows[:, 10:20])).all()
    assert np.isnan(widen(rows[:, 25:])).all()
