"""exp_segsum and its gradient: values, identities, reach, special values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from oracle import exp_segsum_backward_nine_steps, reached_by
from oracle_bits import DTYPES, eps, largest, tiny, widen
from support import (
    array,
    assert_exp_segsum,
    assert_exp_segsum_backward,
    assert_same_bits,
    bits,
    gradient_pair,
    normal,
    sequence,
    shape_id,
    sprinkled,
)

# around 1, powers of two and every block edge one would choose
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 50, 63, 64, 65, 96, 100, 127, 128]
LONG = [129, 200, 255, 256, 257, 300, 511, 512, 513, 600]
# random walks, decays as the state-space models use them, growth, and a spread that underflows
KINDS = ["normal", "decay", "growth", "steep"]


# ---- forward: values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_entry_is_within_the_error_bound(call, dtype, length, kind):
    x = sequence(np.random.default_rng(length), (2, length), dtype, kind)
    assert_exp_segsum(call("exp_segsum", x), x)


@pytest.mark.parametrize("length", LONG)
def test_every_entry_of_long_segments_is_within_the_error_bound(call, dtype, length):
    kind = KINDS[length % 4]
    x = sequence(np.random.default_rng(length), (1, length), dtype, kind)
    assert_exp_segsum(call("exp_segsum", x), x)


def test_an_entry_ignores_what_lies_outside_its_segment(call, dtype):
    x = array([-20000.0, -0.001, -0.001, -0.001], dtype)
    got = call("exp_segsum", x)
    assert_exp_segsum(got, x)
    # x[0] belongs to no entry at all
    moved = x.copy()
    for value in (0.0, 3.0, largest(dtype), math.inf, math.nan):
        moved[0] = value
        assert_exp_segsum(call("exp_segsum", moved), moved)


@pytest.mark.parametrize("length", [3, 17, 64, 65, 130])
@pytest.mark.parametrize("huge", [-2e4, 2e4, -3e38, 3e38])
def test_a_huge_term_spoils_no_other_segment(call, dtype, length, huge):
    if abs(huge) > largest(dtype):
        huge = math.copysign(largest(dtype), huge)
    for position in {0, 1, length // 2, length - 1}:
        x = sequence(np.random.default_rng(1), (length,), dtype, "decay") / array([16], dtype)
        x[position] = huge
        assert_exp_segsum(call("exp_segsum", x), x)


def test_huge_terms_of_both_signs_do_not_cancel_elsewhere(call, dtype):
    top = 1e4
    x = array([0.1, top, -top, 0.25, 0.5, -top, top, -0.125, 0.0625], dtype)
    assert_exp_segsum(call("exp_segsum", x), x)


@pytest.mark.parametrize(
    "leading", [(), (1,), (3,), (2, 3), (2, 1, 3, 2), (0,), (3, 0, 2)], ids=shape_id
)
def test_any_number_of_leading_axes(call, dtype, leading):
    rng = np.random.default_rng(2)
    x = sequence(rng, (*leading, 6), dtype)
    got = call("exp_segsum", x)
    assert_exp_segsum(got, x)
    y, grad = gradient_pair(rng, (*leading, 6, 6), dtype)
    assert_exp_segsum_backward(call("exp_segsum_backward", y, grad_output=grad), y, grad)


@pytest.mark.parametrize(
    "shape", [(0,), (3, 0), (2, 0, 0), (0, 5), (0, 0), (2, 0, 4)], ids=shape_id
)
def test_empty_arrays_have_the_right_shapes(call, dtype, shape):
    x = array(np.zeros(shape), dtype)
    y = call("exp_segsum", x)
    assert y.shape == (*shape, shape[-1])
    assert y.dtype == x.dtype
    gradient = call("exp_segsum_backward", y, grad_output=y)
    assert gradient.shape == shape
    assert gradient.dtype == x.dtype
    assert call("exp_segsum_backward", y, grad_output=y, out=x) is x


# ---- forward: identities


@pytest.mark.parametrize("length", [2, 8, 33, 64, 130])
def test_a_block_of_the_matrix_is_the_matrix_of_the_block(call, dtype, length):
    x = sequence(np.random.default_rng(3), (length,), dtype, "decay")
    whole = call("exp_segsum", x)
    for first, last in ((0, length // 2), (length // 2, length), (1, length - 1)):
        block = np.ascontiguousarray(whole[first:last, first:last])
        assert_exp_segsum(block, x[first:last])
        assert_exp_segsum(call("exp_segsum", x[first:last]), x[first:last])


@pytest.mark.parametrize("length", [3, 30, 63])
def test_padding_by_zeros_changes_nothing_but_repeats_the_last_row(call, dtype, length):
    x = np.zeros(length + 5, DTYPES[dtype])
    x[:length] = sequence(np.random.default_rng(4), (length,), dtype, "decay")
    got = call("exp_segsum", x)
    assert_exp_segsum(got, x)
    assert_exp_segsum(np.ascontiguousarray(got[:length, :length]), x[:length])
    assert (bits(got)[length:, length:] == bits(np.tri(5, dtype=x.dtype))).all()


@pytest.mark.parametrize("length", [4, 17, 64, 129])
def test_minus_infinity_resets(call, dtype, length):
    x = sequence(np.random.default_rng(5), (length,), dtype)
    starts = sorted({1, length // 3, length // 2, length - 1})
    x[starts] = -math.inf
    got = call("exp_segsum", x)
    assert_exp_segsum(got, x)
    for start in starts:
        assert (bits(got)[start:, :start] == 0).all()
    # the gradient of a packed sequence is finite, and zero where the reset stands
    grad = normal(np.random.default_rng(6), (length, length), dtype)
    gradient = call("exp_segsum_backward", got, grad_output=grad)
    assert np.isfinite(widen(gradient)).all()
    assert (widen(gradient)[starts] == 0).all()
    assert_exp_segsum_backward(gradient, got, grad)


@pytest.mark.parametrize("length", [2, 5, 16, 33, 65, 100])
def test_non_finite_terms_reach_exactly_the_segments_that_hold_them(call, dtype, length):
    rng = np.random.default_rng(7)
    values = (math.nan, math.inf, -math.inf)
    for one, other in itertools.product(values, (*values, None)):
        x = sequence(rng, (length,), dtype)
        first, second = rng.integers(0, length, 2)
        x[first] = one
        if other is not None:
            x[second] = other
        assert_exp_segsum(call("exp_segsum", x), x)


def test_special_values_follow_ieee(call, dtype):
    rng = np.random.default_rng(8)
    for length in (6, 40, 66):
        x = sprinkled(rng, sequence(rng, (5, length), dtype), 0.1)
        # opposite largest numbers may overflow in one grouping and not in another: not promised
        x[np.abs(widen(x)) == largest(dtype)] = -3.0
        assert_exp_segsum(call("exp_segsum", x), x)


def test_subnormal_results_survive(call):
    """exp of what lies between the smallest normal and the smallest subnormal number."""
    for name, logs in {
        "float16": (-10.0, -12.0, -16.0, -16.9),
        "bfloat16": (-88.0, -90.0, -91.5),
        "float32": (-88.0, -95.0, -100.0, -103.0),
        "float64": (-709.0, -720.0, -740.0, -744.0),
    }.items():
        for log in logs:
            for x in (array([0.0, log], name), array([0.0, log / 2, log / 2, 0.0], name)):
                got = call("exp_segsum", x)
                assert 0 < widen(got)[-1, 0] < tiny(name) / eps(name)
                assert_exp_segsum(got, x)


def test_overflow_is_infinite_only_where_it_happens(call):
    for name, log in {"float16": 12.0, "bfloat16": 89.0, "float32": 89.0, "float64": 710.0}.items():
        x = array([0.0, log, -log, 1.0], name)
        got = call("exp_segsum", x)
        assert_exp_segsum(got, x)
        assert np.argwhere(np.isinf(widen(got))).tolist() == [[1, 0]]
        assert widen(got)[2, 0] == 1.0  # logs are added, not exponentials multiplied


def test_sums_are_not_kept_in_sixteen_bits(call):
    for name, step in {"float16": 2.0**-9, "bfloat16": 2.0**-7}.items():
        x = array([0.0, 4.0] + [step] * 64, name)
        got = call("exp_segsum", x)
        assert_exp_segsum(got, x)
        assert widen(got)[-1, 0] > 1.1 * math.exp(4)


# ---- backward: values


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 100])
def test_ones_give_k_times_t_minus_k(call, dtype, length):
    ones = array(np.ones((2, length, length)), dtype)
    got = call("exp_segsum_backward", ones, grad_output=ones)
    k = np.arange(length)
    assert_same_bits(got, array(np.broadcast_to(k * (length - k), (2, length)), dtype))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_gradient_is_within_the_error_bound(call, dtype, length):
    y, grad = gradient_pair(np.random.default_rng(length), (2, length, length), dtype)
    assert_exp_segsum_backward(call("exp_segsum_backward", y, grad_output=grad), y, grad)


@pytest.mark.parametrize("length", LONG)
def test_gradients_of_long_segments_are_within_the_error_bound(call, dtype, length):
    rng = np.random.default_rng(length)
    y, grad = gradient_pair(rng, (1, length, length), dtype)
    got = call("exp_segsum_backward", y, grad_output=grad)
    edges = {0, 1, 2, length // 2, length - 2, length - 1}
    some = edges | {int(k) for k in rng.integers(0, length, 4)}
    assert_exp_segsum_backward(got, y, grad, sorted(some))
    # all others against the literal nine steps, whose own float64 rounding the factor 2 covers
    clean = [np.where(np.tri(length, k=-1, dtype=bool), a[0], 0).astype(a.dtype) for a in (grad, y)]
    nine = exp_segsum_backward_nine_steps(*clean)
    size = exp_segsum_backward_nine_steps(*(np.abs(widen(a)) for a in clean))
    compute = eps("float64" if dtype == "float64" else "float32")
    allowed = 2 * (length + 8) * compute * size + eps(dtype) * np.abs(nine)
    assert (np.abs(widen(got[0]) - nine) <= allowed).all()


@pytest.mark.parametrize("length", [2, 5, 33, 64, 65, 130])
def test_upper_triangle_is_never_read(call, dtype, length):
    rng = np.random.default_rng(9)
    unread = np.triu(np.ones((length, length), bool))
    y, grad = normal(rng, (2, length, length), dtype), normal(rng, (2, length, length), dtype)
    want = call("exp_segsum_backward", y, grad_output=grad)
    assert np.isfinite(widen(want)).all()
    for value in (math.nan, math.inf, -math.inf, largest(dtype), 0.0):
        for poison_y, poison_grad in ((True, True), (True, False), (False, True)):
            bad_y, bad_grad = y.copy(), grad.copy()
            if poison_y:
                bad_y[..., unread] = value
            if poison_grad:
                bad_grad[..., unread] = value
            got = call("exp_segsum_backward", bad_y, grad_output=bad_grad)
            assert_same_bits(got, want)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("length", [2, 3, 7, 12])
def test_each_non_finite_product_reaches_exactly_its_own_outputs(call, dtype, length, value):
    rng = np.random.default_rng(10)
    y, grad = gradient_pair(rng, (length, length), dtype)
    clean = widen(call("exp_segsum_backward", y, grad_output=grad))
    for i, j in itertools.combinations(range(length), 2):
        i, j = j, i
        for spoilt in ("y", "grad_output"):
            bad = {"y": y.copy(), "grad_output": grad.copy()}
            bad[spoilt][i, j] = value
            got = call("exp_segsum_backward", bad["y"], grad_output=bad["grad_output"])
            assert np.flatnonzero(~np.isfinite(widen(got))).tolist() == reached_by(i, j, length)
            assert_exp_segsum_backward(got, bad["y"], bad["grad_output"])
            untouched = np.isfinite(widen(got))
            assert np.allclose(widen(got)[untouched], clean[untouched], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("length", [31, 64, 65, 128, 257])
def test_non_finite_products_reach_exactly_their_outputs_at_larger_lengths(call, dtype, length):
    rng = np.random.default_rng(length)
    corners = [(1, 0), (length - 1, 0), (length - 1, length - 2), (length // 2, length // 2 - 1)]
    drawn = [tuple(sorted(rng.choice(length, 2, replace=False))[::-1]) for _ in range(12)]
    for i, j in corners + drawn:
        y, grad = gradient_pair(rng, (length, length), dtype)
        grad[i, j] = rng.choice([math.nan, math.inf, -math.inf])
        got = widen(call("exp_segsum_backward", y, grad_output=grad))
        assert np.flatnonzero(~np.isfinite(got)).tolist() == reached_by(i, j, length)


def test_two_infinities_meet_only_where_both_belong(call, dtype):
    y, grad = gradient_pair(np.random.default_rng(11), (9, 9), dtype)
    grad[4, 1], grad[7, 3] = array(math.inf, dtype), array(-math.inf, dtype)
    y[4, 1] = y[7, 3] = array(1.0, dtype)
    got = widen(call("exp_segsum_backward", y, grad_output=grad))
    assert [str(v) for v in got[2:8]] == ["inf", "inf", "nan", "-inf", "-inf", "-inf"]
    assert np.isfinite(got[[0, 1, 8]]).all()


def test_zero_times_infinity_is_nan_only_where_it_belongs(call, dtype):
    y, grad = array(np.tri(5), dtype), array(np.ones((5, 5)), dtype)
    y[3, 1], grad[3, 1] = math.inf, 0.0
    got = widen(call("exp_segsum_backward", y, grad_output=grad))
    assert np.isnan(got).tolist() == [False, False, True, True, False]


def test_products_that_overflow_the_compute_type_reach_their_outputs_only(call):
    for name, big in {"bfloat16": 1e30, "float32": 1e30, "float64": 1e200}.items():
        y, grad = gradient_pair(np.random.default_rng(12), (8, 8), name)
        y[5, 2], grad[5, 2] = array(big, name), array(-big, name)
        got = widen(call("exp_segsum_backward", y, grad_output=grad))
        assert [k for k in range(8) if got[k] == -math.inf] == reached_by(5, 2, 8)
        assert np.isfinite(np.delete(got, reached_by(5, 2, 8))).all()


@pytest.mark.parametrize("length", [4, 33, 65, 200])
def test_a_large_entry_does_not_cancel_elsewhere(call, length):
    rng = np.random.default_rng(13)
    for name, big in {"bfloat16": 1e8, "float32": 1e8, "float64": 1e17, "float16": 6e4}.items():
        for i, j in ((1, 0), (length - 1, length - 2), (length // 2, length // 2 - 1)):
            y, grad = gradient_pair(rng, (length, length), name)
            y[i, j], grad[i, j] = array(1.0, name), array(big, name)
            got = call("exp_segsum_backward", y, grad_output=grad)
            few = sorted({*reached_by(i, j, length)[:2], 1, j, min(i + 1, length - 1), length - 1})
            assert_exp_segsum_backward(got, y, grad, few)


def test_sums_of_the_gradient_are_not_kept_in_sixteen_bits(call):
    ones = array(np.ones((512, 512)), "bfloat16")
    got = widen(call("exp_segsum_backward", ones, grad_output=ones))
    assert got[[0, 1, 2, 256]].tolist() == [0.0, 512.0, 1020.0, 65536.0]
    y = array([[1, 0, 0], [300, 1, 0], [-299, 0, 1]], "float16")
    grad = array(np.full((3, 3), 300.0), "float16")
    got = widen(call("exp_segsum_backward", y, grad_output=grad))
    assert got.tolist() == [0.0, 300.0, -math.inf]  # 90000 - 89700; and -89700 beyond float16


def test_subnormal_products_and_sums_are_not_flushed(call, dtype):
    width = bits(np.zeros(1, DTYPES[dtype])).dtype
    small = np.full((6, 6), 3, width).view(DTYPES[dtype])
    ones = array(np.ones((6, 6)), dtype)
    want = [3 * k * (6 - k) for k in range(6)]
    assert bits(call("exp_segsum_backward", small, grad_output=ones)).tolist() == want
    assert bits(call("exp_segsum_backward", ones, grad_output=small)).tolist() == want


def test_backward_is_the_derivative_of_forward(call):
    rng = np.random.default_rng(14)
    for length in (1, 2, 9, 40):
        x, grad = 0.3 * rng.standard_normal(length), rng.standard_normal((length, length))
        y = call("exp_segsum", x)
        gradient = call("exp_segsum_backward", y, grad_output=grad)
        step = 1e-5  # third derivatives stay below some 1e4: step^2 * 1e4; and 1e-13 / step
        for k in range(length):
            shift = step * (np.arange(length) == k)
            up, down = (call("exp_segsum", x + sign * shift) for sign in (1, -1))
            slope = math.fsum((grad * (up - down)).ravel().tolist()) / (2 * step)
            assert abs(slope - gradient[k]) < 1e-5
