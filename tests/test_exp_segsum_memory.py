"""exp_segsum and its gradient: memory layouts, determinism, error state, ``out``."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from oracle import exp_segsum_backward_exact
from oracle_bits import DTYPES, widen
from support import (
    STRIDINGS,
    assert_exp_segsum_backward,
    assert_same_bits,
    gradient_pair,
    laid_out,
    normal,
    poisoned,
    sequence,
    shape_id,
    sprinkled,
)

# ---- memory layouts, determinism


@pytest.mark.parametrize("striding", STRIDINGS)
@pytest.mark.parametrize("shape", [(3, 7), (2, 2, 33), (2, 65), (1, 130)], ids=shape_id)
def test_bits_do_not_depend_on_strides_or_alignment(call, dtype, shape, striding):
    rng = np.random.default_rng(20)
    x = sequence(rng, shape, dtype)
    assert_same_bits(call("exp_segsum", laid_out(x, striding)), call("exp_segsum", x))
    y, grad = gradient_pair(rng, (*shape, shape[-1]), dtype)
    want = call("exp_segsum_backward", y, grad_output=grad)
    for moved in ({"y"}, {"grad_output"}, {"y", "grad_output"}):
        arrays = {"y": y, "grad_output": grad}
        arrays |= {key: laid_out(arrays[key], striding) for key in moved}
        got = call("exp_segsum_backward", arrays["y"], grad_output=arrays["grad_output"])
        assert_same_bits(got, want)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))), ids=str)
def test_bits_do_not_depend_on_the_order_of_the_axes(call, axes):
    rng = np.random.default_rng(21)
    y, grad = gradient_pair(rng, (2, 3, 34, 34), "float32")
    x = sequence(rng, (2, 3, 2, 34), "float32")
    back = np.argsort(axes)
    moved_x, moved_y, moved_grad = (
        np.ascontiguousarray(a.transpose(axes)).transpose(back) for a in (x, y, grad)
    )
    assert_same_bits(call("exp_segsum", moved_x), call("exp_segsum", x))
    got = call("exp_segsum_backward", moved_y, grad_output=moved_grad)
    assert_same_bits(got, call("exp_segsum_backward", y, grad_output=grad))


def test_strides_of_zero_are_read_as_repeats(call, dtype):
    rng = np.random.default_rng(22)
    for small, shape in (((1, 1), (3, 40)), ((1, 40), (3, 40)), ((3, 1), (3, 40))):
        x = np.broadcast_to(sequence(rng, small, dtype, "decay"), shape)
        assert_same_bits(call("exp_segsum", x), call("exp_segsum", x.copy()))
    for small in ((1, 1, 1), (2, 1, 1), (1, 9, 9), (1, 9, 1), (2, 1, 9)):
        y, grad = (np.broadcast_to(normal(rng, small, dtype), (2, 9, 9)) for _ in range(2))
        got = call("exp_segsum_backward", y, grad_output=grad)
        assert_same_bits(got, call("exp_segsum_backward", y.copy(), grad_output=grad.copy()))


def test_memmap_is_accepted_and_results_are_plain_arrays(call, dtype, tmp_path):
    rng = np.random.default_rng(23)
    x = sequence(rng, (2, 9), dtype)
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", x.dtype, "r", shape=x.shape)
    y = call("exp_segsum", mapped)
    assert_same_bits(y, call("exp_segsum", x))
    y.tofile(tmp_path / "y")
    mapped = np.memmap(tmp_path / "y", y.dtype, "r", shape=y.shape)
    got = call("exp_segsum_backward", mapped, grad_output=mapped)
    assert_same_bits(got, call("exp_segsum_backward", y, grad_output=y))


@pytest.mark.parametrize("length", [1, 8, 33, 64, 128, 256])
def test_matrix_bits_do_not_depend_on_batch(call, dtype, length):
    rng = np.random.default_rng(24)
    shape = (2, 5, length)
    x = sequence(rng, shape, dtype, "decay")
    # one matrix of the batch is unlike the others: it must not change how they are computed
    x[1, 2] = sequence(rng, (length,), dtype, "steep")
    x[0, 4, -1] = math.nan
    whole = call("exp_segsum", x)
    y, grad = gradient_pair(rng, (*shape, length), dtype)
    y[1, 3, -1, 0] = math.inf
    grad[0, 1, length // 2] = 0.0
    gradient = call("exp_segsum_backward", y, grad_output=grad)
    for index in np.ndindex(shape[:2]):
        assert_same_bits(call("exp_segsum", x[index]), whole[index])
        single = call("exp_segsum_backward", y[index], grad_output=grad[index])
        assert_same_bits(single, gradient[index])
    for b in range(shape[0]):
        assert_same_bits(call("exp_segsum", x[b]), whole[b])


def test_runs_repeat_bit_for_bit(call, dtype):
    rng = np.random.default_rng(25)
    x = sequence(rng, (3, 8, 96), dtype, "decay")
    y = call("exp_segsum", x)
    grad = normal(rng, y.shape, dtype)
    first = call("exp_segsum_backward", y, grad_output=grad)
    for _ in range(4):
        assert_same_bits(call("exp_segsum", x), y)
        assert_same_bits(call("exp_segsum_backward", y, grad_output=grad), first)


@pytest.mark.parametrize("shape", [(2, 9), (40, 130)], ids=shape_id)
def test_the_users_error_state_never_triggers_and_is_left_alone(call, dtype, shape):
    rng = np.random.default_rng(26)
    x = sprinkled(rng, sequence(rng, shape, dtype, "steep"), 0.1)
    y = sprinkled(rng, normal(rng, (*shape, shape[-1]), dtype), 0.1)
    grad = sprinkled(rng, normal(rng, y.shape, dtype), 0.1)
    with np.errstate(all="raise"):
        before = np.geterr()
        call("exp_segsum", x)
        call("exp_segsum_backward", y, grad_output=grad)
        assert np.geterr() == before


# ---- out


@pytest.mark.parametrize("striding", [s for s in STRIDINGS if s != "readonly"])
@pytest.mark.parametrize("shape", [(3, 1), (2, 7), (2, 65)], ids=shape_id)
def test_out_is_filled_whatever_its_layout_and_returned(call, dtype, shape, striding):
    rng = np.random.default_rng(30)
    x = sequence(rng, shape, dtype)
    want = call("exp_segsum", x)
    out = laid_out(poisoned(want.shape, want.dtype), striding)
    assert call("exp_segsum", x, out=out) is out
    assert_same_bits(out, want)
    y, grad = gradient_pair(rng, want.shape, dtype)
    want = call("exp_segsum_backward", y, grad_output=grad)
    out = laid_out(poisoned(want.shape, want.dtype), striding)
    assert call("exp_segsum_backward", y, grad_output=grad, out=out) is out
    assert_same_bits(out, want)


@pytest.mark.parametrize("length", [1, 3, 32, 33, 65])
def test_nothing_around_out_is_written(call, dtype, length):
    rng = np.random.default_rng(31)
    x = sequence(rng, (2, length), dtype)
    big = poisoned((4, length + 2, length + 2), DTYPES[dtype])
    inner = big[1:-1, 1:-1, 1:-1]
    call("exp_segsum", x, out=inner)
    assert not np.isnan(widen(inner)).any()
    y, grad = gradient_pair(rng, (2, length, length), dtype)
    flat = poisoned((4, length + 2), DTYPES[dtype])
    call("exp_segsum_backward", y, grad_output=grad, out=flat[1:-1, 1:-1])
    assert not np.isnan(widen(flat[1:-1, 1:-1])).any()
    inner[...], flat[1:-1, 1:-1] = math.nan, math.nan
    assert np.isnan(widen(big)).all()
    assert np.isnan(widen(flat)).all()


def test_grad_output_may_be_y_itself(call, dtype):
    y, _ = gradient_pair(np.random.default_rng(32), (2, 12, 12), dtype)
    got = call("exp_segsum_backward", y, grad_output=y)
    assert_exp_segsum_backward(got, y, y)
    value, allowed = exp_segsum_backward_exact(y[0], y[0])
    assert (value[1:] > 0).all()
    assert np.isfinite(allowed).all()
