"""modulate and modulate_backward: values, bits, special values, empty arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import cupyops
from oracle import modulate_backward_exact, modulate_exact
from oracle_bits import DTYPES, store, widen
from support import (
    DTYPE_NAMES,
    LAYOUT_NAMES,
    array,
    assert_modulate_bits,
    assert_same_bits,
    assert_within,
    bits,
    forward_part,
    modulate_layouts,
    modulation_problem,
    normal,
    poisoned,
    positional,
    shape_id,
    sprinkled,
)

LAYOUTS_OR_ABSENT = [None, *LAYOUT_NAMES]
# odd, prime, around the chunk of 64 rows and the 8 accumulators, around powers of two
SHAPES = [
    (1, 1, 1),
    (1, 1, 2),
    (2, 1, 1),
    (1, 7, 1),
    (7, 1, 5),
    (2, 8, 3),
    (3, 9, 2),
    (2, 63, 1),
    (1, 64, 3),
    (2, 65, 1),
    (65, 2, 1),
    (129, 1, 3),
    (2, 127, 17),
    (1, 128, 4),
    (5, 257, 2),
    (2, 577, 1),
]
# beyond any block or thread threshold one would choose, and thin in one direction
LARGE = [
    (2, 1031, 257),
    (1, 5003, 64),
    (700, 3, 129),
    (1, 1, 300_007),
    (3, 20_011, 1),
    (4099, 1, 33),
]


def layout_id(layout) -> str:
    return layout or "absent"


# ---- golden values


@pytest.mark.parametrize(("plus", "grad_input"), [(False, [200, 600]), (True, [210, 620])])
def test_golden_gradients(call, dtype, plus, grad_input):
    x = array([[[10.0]], [[20.0]]], dtype)
    scale, shift = array([[20.0], [30.0]], dtype), array([[30.0], [40.0]], dtype)
    got = call("modulate_backward", x, grad_output=x, scale=scale, shift=shift, one_plus_scale=plus)
    assert isinstance(got, cupyops.ModulateGrads)
    # 210 and 620 are bfloat16 numbers too: 620 = 155 * 4
    assert widen(got.grad_input).ravel().tolist() == grad_input
    assert widen(got.grad_scale).tolist() == [[100], [400]]
    assert widen(got.grad_shift).tolist() == [[10], [20]]
    assert all(part.dtype == DTYPES[dtype] for part in got)


def test_one_plus_scale_is_off_by_default(call):
    x = array([[[3.0]]], "float32")
    scale = array([[2.0]], "float32")
    assert call("modulate", x, scale=scale)[0, 0, 0] == 6.0
    assert call("modulate_backward", x, grad_output=x, scale=scale).grad_input[0, 0, 0] == 6.0


# ---- every layout, every dtype


@pytest.mark.parametrize("shift", LAYOUTS_OR_ABSENT, ids=lambda v: f"shift-{layout_id(v)}")
@pytest.mark.parametrize("scale", LAYOUTS_OR_ABSENT, ids=lambda v: f"scale-{layout_id(v)}")
def test_every_pair_of_layouts_and_dtypes_has_the_contracts_bits(call, dtype, scale, shift):
    rng = np.random.default_rng(10)
    for parameter, plus in itertools.product(DTYPE_NAMES, (False, True)):
        problem = modulation_problem(rng, (2, 67, 3), dtype, scale, shift, parameter)
        assert_modulate_bits(call, problem, plus)


@pytest.mark.parametrize("plus", [False, True], ids=["scale", "one-plus-scale"])
@pytest.mark.parametrize("parameter", DTYPE_NAMES, ids=lambda v: f"parameters-{v}")
@pytest.mark.parametrize("layout", LAYOUTS_OR_ABSENT, ids=layout_id)
def test_every_element_is_within_the_error_bound(call, dtype, layout, parameter, plus):
    rng = np.random.default_rng(11)
    problem = modulation_problem(rng, (3, 21, 2), dtype, layout, layout, parameter)
    x, arguments = positional(forward_part(problem))
    got = call("modulate", x, **arguments, one_plus_scale=plus)
    assert got.dtype == x.dtype
    assert_within(got, *modulate_exact(x, **arguments, one_plus_scale=plus))
    x, arguments = positional(problem)
    got = call("modulate_backward", x, **arguments, one_plus_scale=plus)
    exact = modulate_backward_exact(x, **arguments, one_plus_scale=plus)
    for part, pair in zip(got, exact, strict=True):
        assert (part is None) == (pair is None)
        if pair is not None:
            assert_within(part, *pair)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_every_shape_has_the_contracts_bits(call, dtype, shape, layout):
    rng = np.random.default_rng(12)
    problem = modulation_problem(rng, shape, dtype, layout, layout)
    assert_modulate_bits(call, problem, plus=bool(shape[1] % 2))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("shape", LARGE, ids=shape_id)
def test_large_arrays_have_the_contracts_bits(call, shape, layout):
    rng = np.random.default_rng(13)
    # the two parameters in different layouts, so that one pass has to serve both
    other = LAYOUT_NAMES[LAYOUT_NAMES.index(layout) - 3]
    problem = modulation_problem(rng, shape, "float32", layout, other)
    assert_modulate_bits(call, problem)


@pytest.mark.parametrize("parameter", DTYPE_NAMES, ids=lambda v: f"parameters-{v}")
def test_large_arrays_of_every_dtype_have_the_contracts_bits(call, dtype, parameter):
    rng = np.random.default_rng(14)
    problem = modulation_problem(rng, (3, 517, 131), dtype, "B,D", "1,1,D", parameter)
    assert_modulate_bits(call, problem, plus=True)


def test_rank_two_is_a_row_per_sample_even_when_batch_equals_length(call, dtype):
    x, g = array(np.ones((3, 3, 2)), dtype), array(np.ones((3, 3, 2)), dtype)
    scale = array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype)
    y = call("modulate", x, scale=scale)
    assert (widen(y) == widen(scale)[:, None, :]).all()
    got = call("modulate_backward", x, grad_output=g, scale=scale)
    assert (widen(got.grad_input) == widen(scale)[:, None, :]).all()


@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 1, 3)], ids=shape_id)
def test_one_one_d_is_shared_by_the_batch_also_when_length_is_one(call, shape):
    rng = np.random.default_rng(15)
    problem = modulation_problem(rng, shape, "float32", "1,1,D", "1,1,D")
    x, arguments = positional(problem)
    got = call("modulate_backward", x, **arguments)
    assert got.grad_scale.shape == got.grad_shift.shape == (1, 1, 3)
    assert_modulate_bits(call, problem)


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_backward_is_the_derivative_of_forward(call, layout, plus):
    rng = np.random.default_rng(16)
    shape = (2, 5, 3)
    problem = modulation_problem(rng, shape, "float64", layout, layout)
    x, arguments = positional(problem)
    gradients = call("modulate_backward", x, **arguments, one_plus_scale=plus)

    def loss(**moved):
        x, rest = positional(forward_part(problem | moved))
        y = call("modulate", x, **rest, one_plus_scale=plus)
        return math.fsum((y * problem["grad_output"]).ravel().tolist())

    step = 2.0**-10  # bilinear, so only rounding separates the two: some 1e-16 * |loss| / step
    for name, gradient in zip(("x", "scale", "shift"), gradients, strict=True):
        for index in np.ndindex(problem[name].shape):
            moved = [problem[name].copy() for _ in range(2)]
            moved[0][index] += step
            moved[1][index] -= step
            slope = (loss(**{name: moved[0]}) - loss(**{name: moved[1]})) / (2 * step)
            assert abs(slope - gradient[index]) < 1e-10


# ---- special values


@pytest.mark.parametrize("parameter", DTYPE_NAMES, ids=lambda v: f"parameters-{v}")
@pytest.mark.parametrize("layout", [None, *LAYOUT_NAMES], ids=layout_id)
def test_special_values_follow_ieee(call, dtype, layout, parameter):
    rng = np.random.default_rng(40)
    for plus in (False, True):
        problem = modulation_problem(rng, (2, 30, 7), dtype, layout, layout, parameter)
        problem = {key: sprinkled(rng, value, 0.2) for key, value in problem.items()}
        assert_modulate_bits(call, problem, plus)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_the_sign_of_zero_survives_every_sum(call, dtype, layout):
    shape = (3, 70, 2)
    negative = array(np.full(shape, -0.0), dtype)
    parameter = array(np.full(modulate_layouts(shape)[layout], 1.0), dtype)
    got = call("modulate_backward", negative, grad_output=negative, shift=parameter)
    assert np.signbit(widen(got.grad_shift)).all()
    assert np.signbit(widen(got.grad_input)).all()
    ones = array(np.ones(shape), dtype)
    got = call("modulate_backward", ones, grad_output=negative, scale=parameter)
    assert np.signbit(widen(got.grad_scale)).all()


def test_absent_parameters_leave_every_bit_alone(call, dtype):
    rng = np.random.default_rng(41)
    x = sprinkled(rng, normal(rng, (2, 9, 8), dtype), 0.5)
    y = call("modulate", x)
    assert not np.shares_memory(y, x)
    assert_same_bits(y, x)
    got = call("modulate_backward", array(np.ones(x.shape), dtype), grad_output=x)
    assert got.grad_scale is None
    assert got.grad_shift is None
    assert_same_bits(got.grad_input, x)
    assert not np.shares_memory(got.grad_input, x)


def test_subnormal_numbers_are_not_flushed(call, dtype):
    least = bits(array([1.0], dtype)).copy()
    least[...] = 5  # five times the smallest subnormal
    small = least.view(DTYPES[dtype])
    shape = (1, 3, 1)
    x = np.broadcast_to(small.reshape(1, 1, 1), shape)
    one, zero = array([[1.0]], dtype), array([[0.0]], dtype)
    assert (bits(call("modulate", x, scale=one, shift=zero)) == 5).all()
    got = call(
        "modulate_backward", array(np.ones(shape), dtype), grad_output=x, scale=one, shift=one
    )
    assert (bits(got.grad_input) == 5).all()
    assert bits(got.grad_scale).item() == bits(got.grad_shift).item() == 15


def test_a_non_finite_element_reaches_only_its_own_sums(call, dtype):
    rng = np.random.default_rng(42)
    for value, b, row, d in itertools.product((math.nan, math.inf), (0, 2), (0, 7, 66), (0, 3)):
        problem = modulation_problem(rng, (3, 67, 4), dtype, "B,D", "1,L,D")
        problem["grad_output"][b, row, d] = value
        x, arguments = positional(problem)
        got = call("modulate_backward", x, **arguments)
        for part, index in zip(got, [(b, row, d), (b, d), (0, row, d)], strict=True):
            wild = np.argwhere(~np.isfinite(widen(part)))
            assert wild.tolist() == [list(index)]


def test_sums_are_not_kept_in_sixteen_bits(call):
    x = array(np.array([300.0, -299.0]).reshape(1, 2, 1), "float16")
    g = array(np.full((1, 2, 1), 300.0), "float16")
    got = call("modulate_backward", x, grad_output=g, scale=array([[0.0]], "float16"))
    assert widen(got.grad_scale).item() == 300.0


def test_a_float64_result_is_rounded_to_float32_first(call):
    value = 1 + 2.0**-11 + 2.0**-40  # above the float16 tie; the tie itself in float32
    x = array(np.ones((1, 1, 2)), "float16")
    scale = np.full((1, 2), value)
    assert widen(call("modulate", x, scale=scale)).ravel().tolist() == [1.0, 1.0]
    assert store(np.array([value]), "float16")[0] == 1.0


@pytest.mark.parametrize("shape", [(2, 5, 4), (3, 700, 200)], ids=shape_id)
def test_the_users_error_state_never_triggers_and_is_left_alone(call, dtype, shape):
    rng = np.random.default_rng(43)
    problem = modulation_problem(rng, shape, dtype, "B,D", "1,1,D")
    problem = {key: sprinkled(rng, value, 0.3) for key, value in problem.items()}
    with np.errstate(all="raise"):
        before = np.geterr()
        x, arguments = positional(problem)
        call("modulate_backward", x, **arguments)
        x, arguments = positional(forward_part(problem))
        call("modulate", x, **arguments)
        assert np.geterr() == before


# ---- empty arrays


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0), (0, 0, 0)], ids=shape_id)
def test_empty_arrays_give_empty_results_and_zero_sums(call, dtype, shape, layout):
    rng = np.random.default_rng(50)
    problem = modulation_problem(rng, shape, dtype, layout, layout)
    assert_modulate_bits(call, problem)
    x, arguments = positional(problem)
    given = cupyops.ModulateGrads(
        *(poisoned(problem[key].shape, x.dtype) for key in ("x", "scale", "shift"))
    )
    got = call("modulate_backward", x, **arguments, out=given)
    for part, mine in zip(got, given, strict=True):
        assert part is mine
        assert (bits(part) == 0).all()
