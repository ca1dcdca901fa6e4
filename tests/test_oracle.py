"""The oracle is checked before it judges: by hand, by other libraries, by differences."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest

import oracle
import oracle_bits
from oracle_bits import DTYPES, round_to_grid, store, widen
from support import LAYOUT_NAMES, array, assert_within, modulate_layouts, normal

ONE_ROW = [[[10.0]], [[20.0]]]


def column(values, shape):
    return np.array(values, np.float64).reshape(shape)


# ---- rounding


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float16", 2049.0, 2048.0),  # tie, to even
        ("float16", 2051.0, 2052.0),
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, math.inf),
        ("float16", -65520.0, -math.inf),
        ("float16", 2.0**-25, 0.0),  # half the smallest subnormal, tie to even
        ("float16", 1.5 * 2.0**-24, 2.0**-23),
        ("float16", -(2.0**-26), -0.0),
        ("bfloat16", 257.0, 256.0),
        ("bfloat16", 259.0, 260.0),
        ("bfloat16", 511.0, 512.0),
        ("bfloat16", 2.0**-133, 2.0**-133),
        ("bfloat16", 2.0**-134, 0.0),
        ("bfloat16", 3.3961775292304957e38, math.inf),
        ("float32", 16777217.0, 16777216.0),
        ("float32", 2.0**-150, 0.0),
        ("float32", 1.5 * 2.0**-149, 2.0**-148),
        ("float32", 1e39, math.inf),
    ],
)
def test_rounding_by_hand(name, value, expected):
    got = round_to_grid(np.array([value]), name)
    assert got[0] == expected
    assert np.signbit(got[0]) == np.signbit(expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_rounding_agrees_with_the_libraries_on_every_kind_of_number(name):
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    values = pattern.view(np.float32)
    if name == "float32":
        values = widen(values) * (1 + rng.random(values.size))
    with np.errstate(all="ignore"):
        theirs = values.astype(DTYPES[name])
    ours = store(values, name)
    assert ours.dtype == theirs.dtype
    same = (widen(ours) == widen(theirs)) & (np.signbit(widen(ours)) == np.signbit(widen(theirs)))
    assert (same | np.isnan(values)).all()


def test_every_float16_and_bfloat16_number_survives_the_way_out_and_back():
    for name in ("float16", "bfloat16"):
        every = np.arange(2**16, dtype=np.uint16).view(DTYPES[name])
        wide = widen(every)
        kept = np.isnan(wide) | (store(wide, name).view(np.uint16) == every.view(np.uint16))
        assert kept.all()


def test_float64_reaches_16_bits_through_float32():
    # 1 + 2^-11 + 2^-40 lies above the tie; in float32 it is the tie, which goes to even
    value = np.array([1 + 2.0**-11 + 2.0**-40])
    assert widen(store(value, "float16"))[0] == 1.0
    assert round_to_grid(value, "float16")[0] == 1 + 2.0**-10


def test_format_constants_by_hand():
    assert [oracle_bits.eps(n) for n in DTYPES] == [2**-10, 2**-7, 2**-23, 2**-52]
    assert [oracle_bits.tiny(n) for n in DTYPES] == [2**-24, 2**-133, 2**-149, 2.0**-1074]
    assert oracle_bits.largest("float16") == 65504.0
    assert oracle_bits.overflow_threshold("float16") == 65520
    assert oracle_bits.ulp("float32", [1.0, 1.9, 2.0, 0.0, 1e-45]).tolist() == [
        2**-23,
        2**-23,
        2**-22,
        2**-149,
        2**-149,
    ]


# ---- layouts


@pytest.mark.parametrize(
    ("shape", "x_shape", "layout"),
    [
        ((2, 4), (2, 3, 4), "sample"),
        ((2, 1, 4), (2, 3, 4), "sample"),
        ((4,), (2, 3, 4), "shared"),
        ((1, 4), (2, 3, 4), "shared"),
        ((1, 1, 4), (2, 3, 4), "shared"),
        ((1, 1, 4), (2, 1, 4), "shared"),  # also when L == 1
        ((2, 3, 4), (2, 3, 4), "token"),
        ((1, 3, 4), (2, 3, 4), "token_shared"),
        ((3, 4), (3, 3, 4), "sample"),  # never (L, D), also when B == L
    ],
)
def test_layouts_by_hand(shape, x_shape, layout):
    assert oracle_bits.layout_of(shape, x_shape) == layout


@pytest.mark.parametrize("shape", [(3, 4), (2,), (2, 3), (2, 3, 1), (2, 2, 4), (4, 1, 4)])
def test_other_layouts_are_refused(shape):
    with pytest.raises(ValueError, match=r"\("):
        oracle_bits.layout_of(shape, (2, 3, 4))


# ---- modulation


@pytest.mark.parametrize(("plus", "grad_input"), [(False, [200, 600]), (True, [210, 620])])
def test_golden_modulate_backward(plus, grad_input):
    x = array(ONE_ROW, "float32")
    scale, shift = array([[20.0], [30.0]], "float32"), array([[30.0], [40.0]], "float32")
    bits = oracle_bits.modulate_backward_bits(x, x, scale, shift, plus)
    exact = oracle.modulate_backward_exact(x, x, scale, shift, plus)
    for part, expected in enumerate([grad_input, [100, 400], [10, 20]]):
        assert widen(bits[part]).ravel().tolist() == expected
        assert exact[part][0].ravel().tolist() == expected


def test_modulate_by_hand():
    x = array([[[1.0, -2.0], [3.0, 4.0]]], "float32")
    scale, shift = array([[0.5, -1.0]], "float32"), array([[10.0, 20.0]], "float32")
    for plus, expected in [(False, [10.5, 22, 11.5, 16]), (True, [11.5, 20, 14.5, 20])]:
        assert oracle_bits.modulate_bits(x, scale, shift, plus).ravel().tolist() == expected
        assert oracle.modulate_exact(x, scale, shift, plus)[0].ravel().tolist() == expected
    assert str(oracle_bits.modulate_bits(x, scale, None, True)[0, 0, 1]) == "-0.0"


def test_bound_of_the_affine_step_by_hand():
    value, error = oracle.affine(3.0, 0.5, 0.25, False, "float32", "float16")
    assert value == Fraction(7, 4)
    # 1.5 and 1.75, one float32 rounding each, then half a float16 ulp of [1, 2)
    first = Fraction(3, 2) * Fraction(1, 2**24)
    second = Fraction(7, 4) * Fraction(1, 2**24)
    assert first + second + Fraction(1, 2**11) <= error
    assert error < (first + second) * Fraction(1001, 1000) + Fraction(1, 2**11)


def test_bound_of_a_sum_by_hand():
    value, error = oracle.total([(1.0,), (-1.0,), (3.0,)], "float32", "float32", 1)
    assert value == 3
    assert error == 16 * Fraction(1, 2**23) * 5 + Fraction(1, 2**23)
    _, error = oracle.total([(1.0,), (-1.0,), (3.0,)], "float64", "float64", 2)
    assert error == 18 * Fraction(1, 2**52) * 5 + Fraction(1, 2**52)


def test_rows_go_to_eight_accumulators_by_hand():
    # float32: 2^24 absorbs a following 1 unless the 1 sits in another accumulator or chunk
    big, one = np.float32(2.0**24), np.float32(1.0)
    rows = [np.array([big])] + [np.array([one])] * 8
    # accumulator 0 holds 2^24 + 1 = 2^24; the seven others add to it one by one: still 2^24
    assert oracle_bits.sum_of_rows(rows, 1).tolist() == [2.0**24]
    # in another chunk they are added to 8 first, and to the total in float64
    rows = [np.array([big])] + [np.array([np.float32(0)])] * 63 + [np.array([one])] * 9
    assert oracle_bits.sum_of_rows(rows, 1).tolist() == [2.0**24 + 9]
    # accumulators are added 0..7, not in pairs: 1 + 2^24 absorbs, then -2^24 leaves 0
    rows = [np.array([v]) for v in (one, big, -big, one)]
    assert oracle_bits.sum_of_rows(rows, 1).tolist() == [1.0]


def test_samples_are_totalled_before_they_are_added():
    # per sample 2^53 + 1 stays 2^53 in float64; per (b, chunk) order the ones would meet otherwise
    grad = np.zeros((2, 65, 1))
    grad[0, 0, 0], grad[0, 64, 0], grad[1, 0, 0], grad[1, 64, 0] = 2.0**53, 1.0, 1.0, 1.0
    shift = np.zeros(1)
    assert oracle_bits.modulate_backward_bits(grad, grad, None, shift)[2][0] == 2.0**53 + 2


def test_a_hundred_thousand_rows_of_a_tenth():
    rows = [np.array([np.float32(0.1)])] * 100_000
    assert oracle_bits.sum_of_rows(rows, 1)[0] == pytest.approx(10000.000149011612, rel=1e-6)
    naive = float(np.cumsum(np.array(rows, np.float32)[:, 0], dtype=np.float32)[-1])
    assert abs(naive / 10000.000149011612 - 1) > 1e-6


def test_signed_zeros_and_empty_sums():
    negative = [np.array([np.float32(-0.0)])] * 70
    assert np.signbit(oracle_bits.sum_of_rows(negative, 1))[0]
    assert not np.signbit(oracle_bits.sum_of_rows([], 1))[0]


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_modulate_gradients_are_the_derivatives(layout, plus):
    rng = np.random.default_rng(1)
    shape = (2, 3, 2)
    parameter = modulate_layouts(shape)[layout]
    x, g = rng.standard_normal(shape), rng.standard_normal(shape)
    given = {
        "x": x,
        "scale": rng.standard_normal(parameter),
        "shift": rng.standard_normal(parameter),
    }
    exact = oracle.modulate_backward_exact(x, g, given["scale"], given["shift"], plus)

    def loss(**arguments):
        y = oracle.modulate_exact(arguments["x"], arguments["scale"], arguments["shift"], plus)[0]
        return sum(Fraction(float(v)) * w for v, w in zip(g.ravel(), y.ravel(), strict=True))

    step = 2.0**-6  # the loss is bilinear: its central difference is the derivative, exactly
    for (name, value), (gradient, _) in zip(given.items(), exact, strict=True):
        for index in np.ndindex(value.shape):
            moved = []
            for sign in (1, -1):
                grid = np.round(value * 2**20) / 2**20
                grid[index] += sign * step
                moved.append(loss(**(given | {name: grid})))
            slope = (moved[0] - moved[1]) / Fraction(2 * step)
            assert abs(slope - gradient[index]) < 1e-14


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_the_two_models_of_modulate_backward_agree(layout, name):
    rng = np.random.default_rng(2)
    shape = (3, 70, 2)
    parameter = modulate_layouts(shape)[layout]
    x, g = normal(rng, shape, name), normal(rng, shape, name)
    s, t = normal(rng, parameter, name), normal(rng, parameter, name)
    for plus in (False, True):
        assert_within(
            oracle_bits.modulate_bits(x, s, t, plus), *oracle.modulate_exact(x, s, t, plus)
        )
        bits = oracle_bits.modulate_backward_bits(x, g, s, t, plus)
        exact = oracle.modulate_backward_exact(x, g, s, t, plus)
        for ours, (value, allowed) in zip(bits, exact, strict=True):
            assert_within(ours, value, allowed)


# ---- exponential segment sum


def test_segment_sums_by_hand():
    nearest, rest, span = oracle.segment_sums(np.array([9.0, 1.0, -3.0, 0.5]))
    assert nearest.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [-2, -3, 0, 0], [-1.5, -2.5, 0.5, 0]]
    assert not rest.any()
    assert span[3, 0] == 3.0  # the run -3, not the whole -1.5
    tenth = np.array([0.0, 0.1, 0.2])
    nearest, rest, _ = oracle.segment_sums(tenth)
    assert Fraction(nearest[2, 0]) + Fraction(rest[2, 0]) == Fraction(0.1) + Fraction(0.2)


def test_segment_sums_reach_only_what_contains_the_special_value():
    nearest, _, _ = oracle.segment_sums(np.array([math.nan, -math.inf, 1.0, math.inf]))
    assert nearest[1, 0] == -math.inf
    assert nearest[2, 0] == -math.inf
    assert math.isnan(nearest[3, 0])
    assert nearest[2, 1] == 1.0
    assert nearest[3, 2] == math.inf


@pytest.mark.parametrize("name", list(DTYPES))
def test_float64_exponentials_agree_with_mpmath(name):
    row = normal(np.random.default_rng(3), 24, name, spread=3.0)
    value, allowed = oracle.exp_segsum_exact(row, name)
    for i in range(24):
        for j in range(i):
            exact = oracle.exp_segment(row, i, j)
            assert abs(mpmath.mpf(value[i, j]) - exact) <= 2 * oracle_bits.eps("float64") * exact
            assert allowed[i, j] < 1e-2 * value[i, j] or name in ("float16", "bfloat16")


def test_exp_segsum_shape_of_the_result():
    value, allowed = oracle.exp_segsum_exact(np.array([5.0, 0.25, -0.5]), "float64")
    assert not np.triu(value, 1).any()
    assert np.diag(value).tolist() == [1.0, 1.0, 1.0]
    assert value[1, 0] == math.exp(0.25)
    assert value[2, 0] == math.exp(-0.25)
    assert not np.triu(allowed).any()


def test_bound_of_the_exponential_by_hand():
    _, allowed = oracle.exp_segsum_exact(array([0.0, 1.0, 1.0], "float32"), "float32")
    u = 2.0**-23
    assert allowed[2, 0] == pytest.approx(math.exp(2) * (6 * u * 2 + 4 * u), rel=1e-5)


def test_ones_give_k_times_t_minus_k():
    for length in (1, 2, 4, 7, 33):
        ones = np.ones((length, length))
        expected = [k * (length - k) for k in range(length)]
        assert oracle.exp_segsum_backward_exact(ones, ones)[0].tolist() == expected
        assert oracle.exp_segsum_backward_nine_steps(ones, ones).tolist() == expected
    assert expected[:1] == [0]


def test_exp_segsum_backward_by_hand():
    g = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    y = np.array([[1.0, 0, 0], [2, 1, 0], [3, 5, 1]])
    # m10 = 8, m20 = 21, m21 = 40
    assert oracle.exp_segsum_backward_exact(g, y)[0].tolist() == [0.0, 29.0, 61.0]
    assert oracle.exp_segsum_backward_nine_steps(g, y).tolist() == [0.0, 29.0, 61.0]


def test_definition_and_nine_steps_agree():
    rng = np.random.default_rng(4)
    for name in DTYPES:
        g, y = normal(rng, (37, 37), name), normal(rng, (37, 37), name)
        value, _ = oracle.exp_segsum_backward_exact(g, y)
        nine = oracle.exp_segsum_backward_nine_steps(g, y)
        assert np.allclose(value, nine, rtol=0, atol=1e-11)


def test_split_products_are_exact():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal(500) * 1e3, rng.standard_normal(500) * 1e-5
    a[0], b[0] = 1.7e308, 0.9
    parts = oracle.exact_products(a, b)
    for index in range(500):
        split = sum(Fraction(float(part[index])) for part in parts)
        assert split == Fraction(a[index]) * Fraction(b[index])


def test_reach_of_a_non_finite_product():
    g, y = np.ones((6, 6)), np.ones((6, 6))
    g[4, 1] = np.inf
    value, allowed = oracle.exp_segsum_backward_exact(g, y)
    assert np.flatnonzero(np.isinf(value)).tolist() == oracle.reached_by(4, 1, 6) == [2, 3, 4]
    assert np.flatnonzero(allowed == 0).tolist() == [0, 2, 3, 4]
    g[3, 2] = -np.inf
    value, _ = oracle.exp_segsum_backward_exact(g, y)
    assert [str(v) for v in value[2:5]] == ["inf", "nan", "inf"]


def test_exp_segsum_gradient_is_the_derivative():
    rng = np.random.default_rng(6)
    x, g = rng.standard_normal(7), rng.standard_normal((7, 7))

    def loss(row):
        value, _ = oracle.exp_segsum_exact(row, "float64")
        return math.fsum((g * value).ravel().tolist())

    gradient, _ = oracle.exp_segsum_backward_exact(g, oracle.exp_segsum_exact(x, "float64")[0])
    step = 1e-4  # central: step^2 / 6 times third derivatives near 30, and 1e-16 / step
    for k in range(7):
        moved = [loss(x + sign * step * (np.arange(7) == k)) for sign in (1, -1)]
        assert abs((moved[0] - moved[1]) / (2 * step) - gradient[k]) < 1e-6
